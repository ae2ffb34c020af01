"""Two small data sets of texts, and cells of a tiny Transformer on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from normexp.config.schema import (
    BudgetConfig,
    CellConfig,
    DataConfig,
    EvaluationConfig,
    LrScalingConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    PlacementConfig,
    ScheduleConfig,
)
from normexp.data import DATASETS, Dataset, DatasetCard
from normexp.data._texts import LabelledTexts, assemble_language_model, assemble_texts

LANGUAGE, LABELS = "small_language", "small_labels"
TASKS = (LANGUAGE, LABELS)
NUM_CLASSES = 3
SIZES = {"train": 44, "val": 21, "test": 13}
# Of the labels: one text of the training split in six is empty, one is much longer than the rest.
LONGEST = 24
_LETTERS = "abcdef é"
_CARD = DatasetCard(description="letters", source="drawn here", is_text=True)


def register_small_texts() -> None:
    """Register both; tests/conftest.py takes them away after each test."""
    DATASETS.register(LANGUAGE, _CARD)(build_small_language)
    DATASETS.register(LABELS, _CARD)(build_small_labels)


def draw_text(rng: np.random.Generator, length: int, label: int) -> str:
    """Return letters, most of them those of the label."""
    weights = np.ones(len(_LETTERS))
    weights[2 * label : 2 * label + 2] = 6.0
    return "".join(rng.choice(list(_LETTERS), size=length, p=weights / weights.sum()))


def draw_labelled(split: str) -> LabelledTexts:
    """Return the texts of a split: of 0 to 9 letters, and one of ``LONGEST``."""
    count = SIZES[split]
    rng = np.random.default_rng([count, 1])
    labels = rng.integers(0, NUM_CLASSES, count).tolist()
    lengths = rng.integers(1, 10, count)
    lengths[::6] = 0
    lengths[count // 2] = LONGEST
    texts = [draw_text(rng, n, label) for n, label in zip(lengths, labels, strict=True)]
    return LabelledTexts(texts, labels)


def build_small_labels(
    *, tokenizer: str = "characters", padding: str = "batch", padding_share: float = 0.0
) -> Dataset:
    """Build texts with labels."""
    return assemble_texts(
        LABELS,
        {split: draw_labelled(split) for split in SIZES},
        num_classes=NUM_CLASSES,
        tokenizer=tokenizer,
        max_vocabulary=None,
        max_length=LONGEST,
        padding=padding,
        padding_share=padding_share,
    )


def draw_documents() -> dict[str, list[str]]:
    """Return the documents that a language model learns from, by split."""
    rng = np.random.default_rng(5)
    return {
        split: [draw_text(rng, int(n), i % 3) for i, n in enumerate(rng.integers(20, 60, count))]
        for split, count in {"train": 8, "val": 3, "test": 2}.items()
    }


def build_small_language(
    *, tokenizer: str = "characters", max_vocabulary: int | None = None, context_length: int = 7
) -> Dataset:
    """Build a language model's blocks; of the last one not every token is predicted."""
    return assemble_language_model(
        LANGUAGE,
        draw_documents(),
        tokenizer=tokenizer,
        max_vocabulary=max_vocabulary,
        context_length=context_length,
    )


def make_text_cell(
    root: Path, task: str, norm: str | NormConfig = "layer_norm", **changes: Any
) -> CellConfig:
    """Return a cell of a tiny Transformer; a norm over positions may leak."""
    model = {"depth": 1, "width": 8, "num_heads": 2, "mlp_ratio": 2}
    settings: dict[str, Any] = {
        "name": "text",
        "output_root": str(root / "results"),
        "seeds": [0],
        "data": DataConfig(task),
        "model": ModelConfig("transformer", {**model, **changes.pop("model_params", {})}),
        "norm": NormConfig(norm) if isinstance(norm, str) else norm,
        "placement": PlacementConfig("pre"),
        "optimizer": OptimizerConfig("adamw", 0.01, 0.01, ["weight"]),
        "schedule": ScheduleConfig("cosine"),
        "lr_scaling": LrScalingConfig("none", 32),
        "micro_batch_size": 4,
        "accumulation_steps": 2,
        "budget": BudgetConfig(updates=12),
        "num_evaluations": 2,
        "evaluation": EvaluationConfig("running"),
    }
    return CellConfig(**{**settings, **changes})
