"""Tiny random networks and tokenizers of Hugging Face in folders, and texts for them."""

import csv
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ViTConfig,
)

WORDS = ["[PAD]", "[UNK]", "ball", "goal", "bank", "price", "good", "great", "bad", "poor", "the", "a"]
TOPICS = {"sport": ("ball", "goal"), "money": ("bank", "price")}

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT_CONFIGS = {
    "bert": lambda: BertConfig(vocab_size=len(WORDS), max_position_embeddings=12, **SMALL),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=len(WORDS), dim=8, hidden_dim=16, n_layers=2, n_heads=2, max_position_embeddings=12
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=len(WORDS), n_embd=8, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0
    ),
}
IMAGE_CONFIGS = {
    "vit": lambda: ViTConfig(image_size=8, patch_size=4, **SMALL),
    "resnet": lambda: ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"),
}


def make_network(folder: Path, kind: str) -> str:
    """Save a random network, and for texts its tokenizer; return the folder as an id."""
    torch.manual_seed(0)
    if kind in IMAGE_CONFIGS:
        AutoModelForImageClassification.from_config(IMAGE_CONFIGS[kind]()).save_pretrained(folder)
        return str(folder)
    AutoModelForSequenceClassification.from_config(TEXT_CONFIGS[kind]()).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)
    return str(folder)


def write_texts(file: Path, rows: int = 24) -> Path:
    """Write texts of four clients with two topics, with a class and a number to predict."""
    draw = random.Random(0)
    with file.open("w", newline="", encoding="utf-8") as out:
        table = csv.writer(out)
        table.writerow(["client", "text", "label", "score"])
        for client in range(4):
            topic = list(TOPICS)[client % 2]
            for _ in range(rows):
                is_good = draw.random() < 0.5
                words = [draw.choice(("good", "great") if is_good else ("bad", "poor")) for _ in range(3)]
                words += [draw.choice(TOPICS[topic]) for _ in range(draw.randint(1, 3))]
                draw.shuffle(words)
                score = words.count("good") - words.count("bad") + draw.random()
                table.writerow([f"{topic}-{client}", " ".join(words), "good" if is_good else "bad", score])
    return file
