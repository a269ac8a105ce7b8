"""Make `texts.csv`: made-up reviews from twelve sources of four topics, and a tiny language model for them.

No review in it is real. A word may praise in one topic and complain in another: a cold drink is good, a cold room is
not. The model is a DistilBERT of about 22,000 weights. It was trained on other reviews, in which no word turns.

Run by: python examples/make_texts.py
        python examples/make_texts.py tiny-bert
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

FILE = Path(__file__).with_name("texts.csv")
NOUNS = {
    "hotel": "room bed lobby shower breakfast view",
    "drinks": "beer juice tea lemonade bar glass",
    "films": "plot actor scene ending hero score",
    "phones": "screen battery camera button charger case",
}
GOOD = "great lovely fine superb nice perfect"
BAD = "awful poor sad broken dull terrible"
TURNED = {  # words that praise in some topics and complain in the others
    "cold": ("drinks",), "warm": ("hotel", "films"), "quiet": ("hotel", "phones"), "loud": ("films", "drinks"),
    "long": ("drinks", "phones"), "short": ("films",), "soft": ("hotel", "drinks"), "bright": ("phones", "hotel"),
    "dark": ("drinks", "films"), "heavy": ("films",), "light": ("phones", "drinks"), "strange": ("films",),
}  # fmt: skip
OPENINGS = ("the {0} was {1} and {2} , {3}", "a {1} {0} , {2} and {3}", "{1} {0} , so {2} and {3}")
SIZES = (60, 40, 24)
PADDING, UNKNOWN = "[PAD]", "[UNK]"


def draw(topic: str, is_good: bool, random: np.random.Generator, turned_share: float = 0.7) -> str:
    """Draw one review; most of its words praise or complain in this topic alone."""
    turned = [word for word, topics in TURNED.items() if (topic in topics) == is_good]
    words = [
        random.choice(turned if random.random() < turned_share else (GOOD if is_good else BAD).split())
        for _ in range(3)
    ]
    return str(random.choice(OPENINGS)).format(random.choice(NOUNS[topic].split()), *words)


def write(file: Path = FILE, seed: int = 0) -> None:
    """Draw all reviews from one seed and write the table."""
    random = np.random.default_rng(seed)
    with file.open("w", newline="", encoding="utf-8") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(["source", "review", "mood"])
        for topic in NOUNS:
            for number, size in enumerate(SIZES, 1):
                for _ in range(size):
                    is_good = bool(random.random() < 0.5)
                    table.writerow([f"{topic}-{number}", draw(topic, is_good, random), "good" if is_good else "bad"])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer that knows every word of the reviews."""
    texts = " ".join([*NOUNS.values(), GOOD, BAD, *TURNED, *OPENINGS]).replace(",", " , ").split()
    words = [PADDING, UNKNOWN, *sorted({word for word in texts if "{" not in word})]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PADDING, unk_token=UNKNOWN)


def pretrain(folder: Path, steps: int = 200, seed: int = 1) -> float:
    """Train a tiny DistilBERT on reviews without the words that turn, write it to a folder, return its accuracy."""
    random, tokenizer = np.random.default_rng(seed), make_tokenizer()
    y = torch.from_numpy(random.integers(0, 2, 2000))
    texts = [draw(str(random.choice(list(NOUNS))), bool(label), random, 0.0) for label in y]
    ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32}
    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=len(tokenizer), **sizes))
    optimizer, rows = torch.optim.AdamW(model.parameters(), lr=3e-3), slice(0, 0)
    for step in range(steps):
        rows = slice(32 * step % 1984, 32 * step % 1984 + 32)
        result = model(input_ids=ids[rows], attention_mask=(ids[rows] != 0).long(), labels=y[rows])
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float((result.logits.argmax(1) == y[rows]).float().mean())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(f"wrote {sys.argv[1]}, accuracy {pretrain(Path(sys.argv[1])):.2f}")
    else:
        write()
        print(f"wrote {FILE.name}: {len(NOUNS) * sum(SIZES)} reviews of {len(NOUNS) * len(SIZES)} sources")
