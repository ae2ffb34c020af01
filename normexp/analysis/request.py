"""What an experiment asks of its report, checked before the runs rather than after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normexp.analysis.figures import FIGURES
from normexp.analysis.selection import CHOOSERS, DEFAULT_CHOOSER, short_factor
from normexp.errors import UserError, choices_hint


def check_request(
    figures: Sequence[str], select: Mapping[str, Any] | None, factors: Sequence[str]
) -> None:
    """Raise unless the report can show what the experiment asks of it.

    Args:
        figures: Names of figures; empty stands for all.
        select: ``factor`` to choose a level of and ``metric`` that chooses, or None.
        factors: Short dotted keys by which the cells differ, such as ``optimizer.lr``.

    Raises:
        UserError: On an unknown figure, a factor that does not vary, or a metric that must not
            choose.
    """
    for name in figures:
        FIGURES.get(name, key="experiment.figures")
    if select is None:
        return
    factor = str(select.get("factor", ""))
    if short_factor(factor) not in factors:
        hint = choices_hint(factor, factors)
        raise UserError("experiment.select.factor", factor, f"no factor of the grid; {hint}")
    metric = select.get("metric", DEFAULT_CHOOSER)
    if metric not in CHOOSERS:
        raise UserError(
            "experiment.select.metric",
            metric,
            f"selection must see the validation split alone; {choices_hint(metric, CHOOSERS)}",
        )
