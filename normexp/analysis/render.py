"""One table as CSV with every digit, and as readable Markdown and LaTeX."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from normexp.analysis.display import show_value

# "1,234", "4 of 5", "98.1 [97.0, 99.2]" or the mark for no number; run ids are not numbers.
NUMBER = r"-|-?[\d,]{1,13}(\.\d+)?(e[+-]\d+)?( of \d+)?( \[.*\])?"


@dataclass(frozen=True)
class Table:
    """A table twice: every number (``frame``) and what fits on a page (``rows``)."""

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def numeric_columns(self) -> list[bool]:
        """Return which columns hold numbers alone, perhaps with an interval: set right."""
        return [
            all(re.fullmatch(NUMBER, row[place]) for row in self.rows)
            for place in range(len(self.headers))
        ]


def render_csv(frame: pd.DataFrame) -> str:
    """Return a frame as CSV with every digit: a float reads back as the same float.

    A null among factor values is written ``null``; a number that does not exist is empty.
    """
    shown = frame.copy()
    for name in shown.columns:
        if shown[name].dtype == object:
            shown[name] = pd.Series(
                [_csv_value(value) for value in frame[name]], index=shown.index, dtype=object
            )
    return shown.to_csv(index=False, lineterminator="\n", float_format=_csv_float)


def render_markdown(table: Table) -> str:
    """Return the readable rows as a Markdown table, columns aligned also as plain text."""
    if not table.rows:
        return "No rows.\n"
    cells = [[text.replace("|", "\\|") for text in row] for row in (table.headers, *table.rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(table.headers))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def render_latex(table: Table) -> str:
    """Return the readable rows as a LaTeX ``tabular`` that needs no package."""
    columns = "l" * max(1, len(table.headers))
    lines = [f"% {line}" for line in (table.title, table.caption)]
    lines += [f"\\begin{{tabular}}{{{columns}}}", "\\hline"]
    if table.rows:
        lines += [_latex_row(table.headers), "\\hline", *map(_latex_row, table.rows)]
    else:
        lines.append("No rows. \\\\")
    return "\n".join([*lines, "\\hline", "\\end{tabular}"]) + "\n"


def escape_latex(text: str) -> str:
    r"""Return text whose every character LaTeX prints as it is.

    Examples:
        >>> print(escape_latex("test_accuracy (%)"))
        test\_accuracy (\%)
    """
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\char34{}",
    }
    return "".join(
        special.get(character, f"\\{character}" if character in "&%$#_{}" else character)
        for character in text
    )


def _latex_row(cells: Sequence[str]) -> str:
    """Return one row; braces keep a leading bracket from being read as an option."""
    return " & ".join(f"{{{escape_latex(cell)}}}" for cell in cells) + " \\\\"


def _csv_float(value: Any) -> str:
    """Return the shortest text that reads back as the same float."""
    return repr(float(value))


def _csv_value(value: object) -> object:
    """Return an object as CSV text: null by name, containers as JSON, NaN empty."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return "" if math.isnan(value) else _csv_float(value)
    if isinstance(value, dict | list | tuple):
        return json.dumps(value)
    return show_value(value) if isinstance(value, bool) else value
