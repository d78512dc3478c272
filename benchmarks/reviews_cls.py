"""Task `reviews-cls`: fine-tune all-MiniLM-L6-v2 with a new head to tell fresh review snippets from rotten ones; judge
on films it never read about.

Only snippets with one label count, each once; films that share a snippet are one film under two titles. Whole films are
drawn by a fixed generator: the first 600 snippets are held out, none of their films is trained on, and 3,000 of the
others are the training set. A run goes through it once, in an order that depends on the seed alone, never on the
strategy. The figures are the mean loss and the accuracy on the 600, where always answering "fresh" scores 57.2 %.

The head's weights come from the run's seed, through a generator of their own; dropout follows the Trainer's seed.
"""

from __future__ import annotations

import bz2
import csv
import functools
import math
from collections import defaultdict
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.language_model import drawn
from tools.demo_assets import asset

NAME = "reviews-cls"
LEARNING_RATES = (3e-5, 1e-4, 3e-4)
BATCH = 32
TRAINING = 3000
HELD_OUT = 600
STEPS = math.ceil(TRAINING / BATCH)
MAX_TOKENS = 128
FIGURE = "held-out loss"
MORE = ("accuracy",)
LABELS = ("rotten", "fresh")

Snippet = tuple[str, int, str]
"""Text, index into LABELS, film."""


def load_model(dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    from transformers import AutoModelForSequenceClassification

    names = dict(enumerate(LABELS))
    ids = {label: number for number, label in names.items()}
    model = AutoModelForSequenceClassification.from_pretrained(
        asset("minilm"), num_labels=len(LABELS), id2label=names, label2id=ids
    )
    drawn = torch.Generator().manual_seed(2_000_003 + seed)
    with torch.no_grad():
        model.classifier.weight.normal_(std=model.config.initializer_range, generator=drawn)
        model.classifier.bias.zero_()
    return model.to(dtype)


def snippets() -> list[Snippet]:
    """All snippets with one label, each once, in the order of the file."""
    found: dict[str, tuple[str, set[str], list[str]]] = {}
    with bz2.open(asset("reviews") / "rotten_tomatoes_corpus_full.csv.bz2", "rt", encoding="utf8") as lines:
        for row in csv.DictReader(lines):
            if row["category"] in LABELS:
                text = " ".join(row["text"].split())
                _, labels, films = found.setdefault(text.lower(), (text, set(), []))
                labels.add(row["category"])
                films.append(row["movie_name"])
    film = one_film([films for _, _, films in found.values()])
    return [(text, LABELS.index(*labels), film[films[0]]) for text, labels, films in found.values() if len(labels) == 1]


def one_film(shared: list[list[str]]) -> dict[str, str]:
    """Title -> the title that stands for its film: titles in the same list are the same film."""
    leader: dict[str, str] = {}

    def find(title: str) -> str:
        while leader.setdefault(title, title) != title:
            title = leader[title]
        return title

    for titles in shared:
        for title in titles:
            first, second = sorted((find(titles[0]), find(title)))
            leader[second] = first
    return {title: find(title) for title in leader}


def split(found: list[Snippet]) -> tuple[list[Snippet], list[Snippet]]:
    """(3,000 for training, 600 held out) without a film in common, the same for every run."""
    by_film: dict[str, list[Snippet]] = defaultdict(list)
    for snippet in found:
        by_film[snippet[2]].append(snippet)
    fixed = torch.Generator().manual_seed(2024)
    films = sorted(by_film)
    shuffled = [films[i] for i in torch.randperm(len(films), generator=fixed)]
    held_out: list[Snippet] = []
    while len(held_out) < HELD_OUT:
        held_out += by_film[shuffled.pop(0)]
    rest = [snippet for film in shuffled for snippet in by_film[film]]
    drawn = torch.randperm(len(rest), generator=fixed)[:TRAINING]
    return [rest[i] for i in drawn], held_out[:HELD_OUT]


@functools.cache
def rows() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """(training rows, held-out rows): token ids of their own length, and the label."""

    def encoded(chosen: list[Snippet]) -> list[dict[str, torch.Tensor]]:
        ids = tokenizer()([text for text, _, _ in chosen], truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return [
            {"input_ids": torch.tensor(i), "labels": torch.tensor(label)}
            for i, (_, label, _) in zip(ids, chosen, strict=True)
        ]

    train, held_out = split(snippets())
    return encoded(train), encoded(held_out)


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(asset("minilm"))


def collate(chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch padded to its longest row."""
    ids = [row["input_ids"] for row in chosen]
    padding = tokenizer().pad_token_id
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": torch.stack([row["labels"] for row in chosen]),
    }


def training_blocks(seed: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """The rows of a whole run: the training set in the seed's order, or as much of it as `steps` batches take."""
    train, _ = rows()
    return [train[i] for i in drawn(len(train), seed)[: steps * BATCH]]


def training_arguments(steps: int = STEPS) -> dict[str, Any]:
    """What the task fixes of TrainingArguments; the strategy, its rate and the seed come from the run."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "lr_scheduler_type": "linear",
        "warmup_steps": math.ceil(steps / 10),
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
    }


def figures(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Mean loss in nats and share of right answers, of logits (snippets, 2) and labels (snippets)."""
    logits = logits.float()
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return {FIGURE: loss, "accuracy": (logits.argmax(-1) == labels).double().mean().item()}


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> dict[str, float]:
    """Loss and accuracy on the held-out snippets; the logits are taken to fp32 before the loss."""
    _, held_out = rows()
    by_length = sorted(held_out, key=lambda row: len(row["input_ids"]))
    training = model.training
    model.eval()
    logits, labels = [], []
    for start in tqdm(range(0, len(by_length), 50), desc="held-out films", unit="batch", dynamic_ncols=True):
        batch = {key: value.to(model.device) for key, value in collate(by_length[start : start + 50]).items()}
        labels.append(batch.pop("labels"))
        logits.append(model(**batch).logits)
    model.train(training)
    return figures(torch.cat(logits), torch.cat(labels))


def evaluate_before(model: torch.nn.Module) -> dict[str, float]:
    """`evaluate` of the model with its untrained head."""
    return evaluate(model)
