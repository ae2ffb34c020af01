"""Metrics of a validation that an experiment may set a target for, and which way is better."""

from __future__ import annotations

from typing import Final, Literal

Direction = Literal["down", "up"]

# Which way is better: a target is reached at its value or beyond it.
TARGET_METRICS: Final[dict[str, Direction]] = {
    "val/loss": "down",
    "val/perplexity": "down",
    "val/bits_per_byte": "down",
    "val/accuracy": "up",
}
# Those that only a language model has.
TEXT_METRICS: Final = frozenset({"val/perplexity", "val/bits_per_byte"})
