"""Cells whose model leaks: a norm shows positions of a causal model what comes after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from normexp.analysis.load import Results
from normexp.analysis.render import Table

MARK = "(leaks)"
MEANING = (
    f"{MARK}: sees later tokens through its norm, so it is told what it is to predict; its numbers "
    "are not those of a language model."
)


def mark_name(name: str, is_leaking: object) -> str:
    """Return the name of an arm, a factor's level or a line with the mark, if it leaks."""
    return f"{name} {MARK}" if is_leaking is True else name


def is_any_marked(texts: Sequence[object]) -> bool:
    """Return whether any text has the mark."""
    return any(isinstance(text, str) and MARK in text for text in texts)


def mark_table(results: Results, table: Table) -> Table:
    """Return a table with the column ``is_leaking``, leaking rows marked and the mark explained.

    Args:
        results: The loaded experiment.
        table: Its frame has a column ``cell`` and a row for each readable row, which starts with
            the factors; the mark stands beside the norm.
    """
    leaking = dict(zip(results.cells["cell"], results.cells["is_leaking"], strict=True))
    # The row of an arm that has no cell to choose stands for none that leaks.
    flags = [leaking.get(cell) is True for cell in table.frame["cell"]]
    frame = table.frame.copy()
    if "is_leaking" not in frame:
        frame.insert(list(frame.columns).index("cell"), "is_leaking", False)
    frame["is_leaking"] = pd.Series(flags, index=frame.index, dtype=bool)
    if not any(flags):
        return replace(table, frame=frame)
    place = results.factors.index("norm") if "norm" in results.factors else 0
    rows = tuple(
        (*row[:place], mark_name(row[place], flag), *row[place + 1 :])
        for row, flag in zip(table.rows, flags, strict=True)
    )
    return replace(table, frame=frame, rows=rows, caption=f"{table.caption} {MEANING}".strip())
