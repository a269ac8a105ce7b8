"""Make `texts.csv`: made-up reviews from twelve sources of four topics, and a tiny language model for them.

No review in it is real. A word may praise in one topic and complain in another: a cold drink is good, a cold room is
not. The model is a GPT-2 of 28,000 weights. It learns to predict the next word of other reviews, without any label.

Run by: python examples/make_texts.py
        python examples/make_texts.py tiny-gpt2
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

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
OPENINGS = (
    "the {0} was {1} and {2}",
    "a {1} {0} and so {2}",
    "we found the {0} {1} , really {2}",
    "{1} {0} , {2} too",
)
SIZES = (90, 60, 40)
PADDING, UNKNOWN = "[PAD]", "[UNK]"


def draw(topic: str, is_good: bool, random: np.random.Generator) -> str:
    """Draw one review; two words of five praise or complain in this topic alone."""
    turned = [word for word, topics in TURNED.items() if (topic in topics) == is_good]
    words = [
        random.choice(turned if random.random() < 0.6 else (GOOD if is_good else BAD).split())
        for _ in range(2)
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
                    table.writerow(
                        [f"{topic}-{number}", draw(topic, is_good, random), "good" if is_good else "bad"]
                    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer that knows every word of the reviews."""
    texts = " ".join([*NOUNS.values(), GOOD, BAD, *TURNED, *OPENINGS]).replace(",", " , ").split()
    words = [PADDING, UNKNOWN, *sorted({word for word in texts if "{" not in word})]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PADDING, unk_token=UNKNOWN)


def pretrain(folder: Path, steps: int = 600, seed: int = 1) -> float:
    """Train a tiny GPT-2 to predict the next word, write it to a folder, and return its last loss."""
    random, tokenizer = np.random.default_rng(seed), make_tokenizer()
    topics = [str(random.choice(list(NOUNS))) for _ in range(3000)]
    texts = [draw(topic, bool(random.random() < 0.5), random) for topic in topics]
    ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = ids[torch.randint(0, len(ids), (64,))]
        loss = model(
            input_ids=batch, attention_mask=(batch != 0).long(), labels=batch.masked_fill(batch == 0, -100)
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float(loss.detach())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(f"wrote {sys.argv[1]}, loss {pretrain(Path(sys.argv[1])):.2f}")
    else:
        write()
        print(f"wrote {FILE.name}: {len(NOUNS) * sum(SIZES)} reviews of {len(NOUNS) * len(SIZES)} sources")
