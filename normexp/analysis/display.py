"""How names and numbers are written for people: labels, rounding, notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from normexp.analysis.statistics import Summary
from normexp.records.identity import shorten_hashes

ABSENT = "-"
# Student's t of two values is 12.7 standard errors wide: for accuracies that leaves [0, 100].
MIN_VALUES_FOR_INTERVAL = 3


UNITS = {"loss": "nats", "loss_per_token": "nats a token", "bits_per_byte": "bits a byte"}
# Where the name of a metric would say its unit twice.
WORDS = {"loss_per_token": "loss", "bits_per_byte": "loss"}


@dataclass(frozen=True)
class Score:
    """One metric as it is shown: accuracies become errors in figures and percent everywhere.

    Attributes:
        metric: Name in the records, such as ``test/accuracy``.
        name: Name of what figures show, such as ``test/error``; of a language model's loss
            ``test/loss_per_token``, which is the same number.
    """

    metric: str
    name: str

    @property
    def is_error(self) -> bool:
        """Whether the figure shows one minus the metric."""
        return self.name.endswith("/error")

    @property
    def scale(self) -> float:
        """Factor from the number to its label: 100 for percent."""
        return 100.0 if self.is_error else 1.0

    @property
    def label(self) -> str:
        """Axis label with the unit."""
        return metric_label(self.name)

    def convert(self, summary: Summary) -> Summary:
        """Return the summary of what the figure shows."""
        if not self.is_error:
            return summary
        return Summary(
            summary.n,
            1.0 - summary.mean,
            summary.std,
            1.0 - summary.ci95_high,
            1.0 - summary.ci95_low,
        )


def choose_score(metrics: Sequence[str], split: str) -> Score:
    """Return the score of a split: its error if it has an accuracy, else its loss.

    Of a language model it is the loss: how often the likeliest token is right says less.
    """
    if is_language_model(metrics):
        return Score(f"{split}/loss", f"{split}/loss_per_token")
    if f"{split}/accuracy" in metrics or f"{split}/loss" not in metrics:
        return Score(f"{split}/accuracy", f"{split}/error")
    return Score(f"{split}/loss", f"{split}/loss")


def is_language_model(metrics: Iterable[str]) -> bool:
    """Return whether metrics are those of language models: they alone have a perplexity."""
    return any(metric.endswith("/perplexity") for metric in metrics)


def is_percent(metric: str) -> bool:
    """Return whether a metric is a fraction that labels show in percent."""
    return metric.endswith(("/accuracy", "/error"))


def metric_label(metric: str, metrics: Iterable[str] = ()) -> str:
    """Return a metric's name with its unit.

    Args:
        metric: The metric.
        metrics: All metrics of the experiment: they tell whether a loss is one of tokens.

    Examples:
        >>> metric_label("test/accuracy")
        'test accuracy (%)'
        >>> metric_label("val/loss")
        'val loss (nats)'
        >>> metric_label("val/loss", ["val/loss", "val/perplexity"])
        'val loss (nats a token)'
        >>> metric_label("test/bits_per_byte")
        'test loss (bits a byte)'
    """
    split, _, quantity = metric.rpartition("/")
    if quantity == "loss" and is_language_model(metrics):
        quantity = "loss_per_token"
    unit = " (%)" if is_percent(metric) else f" ({UNITS[quantity]})" if quantity in UNITS else ""
    words = WORDS.get(quantity, quantity).replace("_", " ")
    return f"{split.replace('/', ' ').replace('_', ' ')} {words}".strip() + unit


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last word of each dotted key where that is enough to tell them apart.

    Examples:
        >>> short_names(["norm", "model.depth", "data.size", "model.size"])
        {'norm': 'norm', 'model.depth': 'depth', 'data.size': 'data.size', 'model.size': 'model.size'}
    """  # noqa: E501
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)
    }


def show_value(value: object) -> str:
    """Return a factor's value or a count as YAML would write it; ``null`` is a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:g}" if isinstance(value, float) else str(value)
    # A list of plugins' hashes tells levels apart by its first digits; a fingerprint stays whole.
    return shorten_hashes(text) if text.startswith("[") else text


def show_number(value: object, *, digits: int = 4) -> str:
    """Return a number to so many significant digits, ``-`` if there is none."""
    if value is None or value is pd.NA:
        return ABSENT
    number = float(value)  # type: ignore[arg-type]
    if math.isnan(number):
        return ABSENT
    if number == int(number) if math.isfinite(number) else False:
        return f"{int(number):,}" if abs(number) < 1e15 else f"{number:.{digits}g}"
    if 10**digits <= abs(number) < 1e15:
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


def show_mean(summary: Summary, metric: str) -> str:
    """Return ``mean [low, high]``; for fewer than three values the interval is ``-``.

    Examples:
        >>> show_mean(Summary(3, 0.92, 0.02, 0.9, 0.94), "test/accuracy")
        '92.00 [90.00, 94.00]'
    """
    if math.isnan(summary.mean):
        return ABSENT
    mean, low, high = (
        _show_metric(number, metric)
        for number in (summary.mean, summary.ci95_low, summary.ci95_high)
    )
    interval = ABSENT if summary.n < MIN_VALUES_FOR_INTERVAL else f"{low}, {high}"
    return f"{mean} [{interval}]"


def show_average(summary: Summary, metric: str) -> str:
    """Return the mean alone."""
    return ABSENT if math.isnan(summary.mean) else _show_metric(summary.mean, metric)


def show_std(summary: Summary, metric: str) -> str:
    """Return the standard deviation, ``-`` for fewer than two values."""
    return ABSENT if math.isnan(summary.std) else _show_metric(summary.std, metric)


def show_spread(row: pd.Series, name: str) -> str:
    """Return ``median [q25, q75]`` of a measured time."""
    if math.isnan(row[f"{name}_median"]):
        return ABSENT
    parts = [show_number(row[f"{name}_{part}"], digits=3) for part in ("median", "q25", "q75")]
    return f"{parts[0]} [{parts[1]}, {parts[2]}]"


def show_count(n: int, num_seeds: int) -> str:
    """Return how many of the planned runs a mean is over."""
    return str(n) if n == num_seeds else f"{n} of {num_seeds}"


def show_notes(row: pd.Series, metric: str) -> str:
    """Return what a reader must know of a cell beside its mean."""
    notes = [
        f"{row[f'num_{status}']} {words}"
        for status, words in (
            ("diverged", "diverged"),
            ("failed", "failed"),
            ("interrupted", "interrupted"),
            ("not_run", "not run"),
        )
        if row[f"num_{status}"]
    ]
    lost = int(row["num_completed"]) - int(row[f"{metric}_n"])
    if lost:
        notes.append(f"{lost} without a finite value")
    if row["mixed"]:
        notes.append(f"mixed {row['mixed'].replace(' ', ', ')}")
    return "; ".join(notes)


def _show_metric(value: float, metric: str) -> str:
    """Return a metric's value as tables print it."""
    if is_percent(metric):
        return f"{100 * value:.2f}"
    # A perplexity is e to the loss, so it may be of any size; no exponents below a million.
    if metric.endswith("/perplexity") and 1e4 <= value < 1e6:
        return f"{value:,.0f}"
    return f"{value:#.4g}".rstrip(".")
