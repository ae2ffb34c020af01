"""Which factor becomes an arm, an axis or a panel, and what each is called."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from normexp.analysis.display import short_names, show_value
from normexp.analysis.figures._style import Look, norm_look
from normexp.analysis.leaks import mark_name

MAX_COLUMNS = 6
# A grid of rows and columns with more holes than this is a list of panels instead.
MOSTLY_FULL = 0.75


def arm_factors(factors: Sequence[str]) -> list[str]:
    """Return the factors that make an arm: the norm and its parameters."""
    return [factor for factor in factors if factor == "norm" or factor.startswith("norm.")]


def panel_factors(frame: pd.DataFrame, factors: Sequence[str], along: Sequence[str]) -> list[str]:
    """Return the factors that are still open once arm and axis are known, in their order.

    A factor that the others decide (a rate that follows the batch, an accumulation that keeps
    the effective batch) needs no panel. The micro-batch is asked first, so it stays.
    """
    known = [*arm_factors(factors), *along]
    open_factors = []
    for factor in sorted(factors, key=lambda name: name != "micro_batch_size"):
        if factor not in known and not _is_decided(frame, factor, known):
            known.append(factor)
            open_factors.append(factor)
    return [factor for factor in factors if factor in open_factors]


def describe(row: pd.Series, factors: Sequence[str]) -> str:
    """Return ``name=value`` of some factors, comma separated; null parameters are left out."""
    names = short_names(factors)
    return ", ".join(f"{names[f]}={show_value(row[f])}" for f in factors if row[f] is not None)


def describe_arm(row: pd.Series, factors: Sequence[str]) -> str:
    """Return the name of an arm: the norm, then its parameters that vary, then if it leaks."""
    settings = describe(row, [f for f in arm_factors(factors) if f != "norm"])
    name = f"{row['norm']}, {settings}" if settings else str(row["norm"])
    return mark_name(name, row.get("is_leaking"))


def name_arms(frame: pd.DataFrame, factors: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Return the name of the arm of each row: norm, its parameters, all else that arms differ in.

    Args:
        frame: Rows with the factors.
        factors: All factors of the experiment.
        shown: Factors that the panels and the axis show.
    """
    arms = [describe_arm(row, factors) for _, row in frame.iterrows()]
    rest = [factor for factor in factors if factor not in (*arm_factors(factors), *shown)]
    return add_differences(frame, arms, rest, shown)


def add_differences(
    frame: pd.DataFrame, labels: Sequence[str], factors: Sequence[str], shown: Sequence[str]
) -> list[str]:
    """Return labels with every further factor in which the labelled rows differ.

    A factor that only follows what is ``shown`` is the same for all labels and left out; one
    that has several values under a label is written with all of them.
    """
    names = short_names(factors)
    extended = list(labels)
    for factor in factors:
        values = [show_value(value) for value in frame[factor]]
        if not _is_different(frame, labels, values, shown):
            continue
        by_label: dict[str, list[str]] = {}
        for label, value in zip(labels, values, strict=True):
            by_label.setdefault(label, []).append(value)
        for i, label in enumerate(labels):
            words = f"{names[factor]}={'/'.join(dict.fromkeys(by_label[label]))}"
            extended[i] = f"{extended[i]}, {words}" if extended[i] else words
    return extended


def arm_looks(frame: pd.DataFrame) -> dict[object, Look]:
    """Return the look of each arm of a frame with columns ``norm`` and ``arm``, in order."""
    looks: dict[object, Look] = {}
    variants: dict[object, int] = {}
    for norm, arm in zip(frame["norm"], frame["arm"], strict=True):
        if arm not in looks:
            looks[arm] = norm_look(norm, variants.get(norm, 0))
            variants[norm] = variants.get(norm, 0) + 1
    return looks


def split_panels(frame: pd.DataFrame, factors: Sequence[str]) -> pd.DataFrame:
    """Return the frame with ``panel_row`` and ``panel_column``: labels of the panel of each row.

    The last factor makes the columns, the micro-batch if it is among them.
    """
    last = "micro_batch_size" if "micro_batch_size" in factors else (factors or [""])[-1]
    others = [factor for factor in factors if factor != last]
    if others and last and frame[last].map(show_value).nunique() > MAX_COLUMNS:
        others, last = [], ""
    column = [last] if last else list(factors)
    used = len({tuple(show_value(row[f]) for f in factors) for _, row in frame.iterrows()})
    levels = {tuple(show_value(row[f]) for f in others) for _, row in frame.iterrows()}
    if used < MOSTLY_FULL * len(levels) * (frame[last].map(show_value).nunique() if last else 1):
        others, column = [], list(factors)
    return frame.assign(
        panel_row=[describe_panel(row, others) for _, row in frame.iterrows()],
        panel_column=[describe_panel(row, column) for _, row in frame.iterrows()],
    )


def describe_panel(row: pd.Series, factors: Sequence[str]) -> str:
    """Return the label of a panel; null is a level like another."""
    names = short_names(factors)
    return ", ".join(f"{names[factor]}={show_value(row[factor])}" for factor in factors)


def score_name(frame: pd.DataFrame) -> str:
    """Return the name of the one score whose mean a frame holds."""
    return next(str(name) for name in frame if str(name).endswith("_mean")).removesuffix("_mean")


def _is_different(
    frame: pd.DataFrame, labels: Sequence[str], values: Sequence[str], shown: Sequence[str]
) -> bool:
    """Return whether labels differ in their values at one place, or without a place for it."""
    overall: dict[str, set[str]] = {}
    at_place: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for label, value, (_, row) in zip(labels, values, frame.iterrows(), strict=True):
        place = at_place.setdefault(tuple(show_value(row[name]) for name in shown), {})
        for known in (overall, place):
            known.setdefault(label, set()).add(value)
    if any(len({frozenset(found) for found in place.values()}) > 1 for place in at_place.values()):
        return True
    follows = all(len(set().union(*place.values())) == 1 for place in at_place.values())
    return not follows and len({frozenset(found) for found in overall.values()}) > 1


def _is_decided(frame: pd.DataFrame, factor: str, known: Sequence[str]) -> bool:
    """Return whether rows that agree in the known factors agree in this one too."""
    values: dict[tuple[str, ...], str] = {}
    for _, row in frame.iterrows():
        key = tuple(show_value(row[name]) for name in known)
        if values.setdefault(key, show_value(row[factor])) != show_value(row[factor]):
            return False
    return True
