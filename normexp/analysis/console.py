"""The main table in the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

import rich.table
from rich import box
from rich.console import Console, JustifyMethod
from rich.text import Text

from normexp.analysis import provenance, target
from normexp.analysis.display import ABSENT, MIN_VALUES_FOR_INTERVAL
from normexp.analysis.load import Results
from normexp.analysis.render import Table
from normexp.analysis.tables import build_cells_table


def print_summary(results: Results, console: Console | None = None) -> None:
    """Print the main table and what must be known before reading it, within 100 columns.

    Args:
        results: The loaded experiment.
        console: Where to print; standard output by default.
    """
    out = console or Console()
    table = build_cells_table(results)
    unbounded = out.options.update_width(1000)
    shown = _lay_out(table, table.headers, gap=1)
    # The interval says more than the spread, which is in the written tables, and so is all that
    # follows from the loss.
    fewer = [name for name in table.headers if not name.startswith("std")]
    fewest = [name for name in fewer if not name.endswith((": mean", ": median"))]
    for headers, gap in ((fewer, 1), (fewest, 1), (fewest, 0)):
        if out.measure(shown, options=unbounded).maximum > out.width:
            shown = _lay_out(table, headers, gap=gap)
    out.print(Text(str(results.plan.get("title") or results.name), style="bold"))
    out.print(shown)
    counts = ", ".join(f"{n} {words}" for words, n in provenance.count_statuses(results))
    has_no_interval = any(f"[{ABSENT}]" in text for row in table.rows for text in row)
    mark = f" [{ABSENT}]: no interval where n < {MIN_VALUES_FOR_INTERVAL}."
    marks = mark if has_no_interval else ""
    out.print(Text(f"{len(results.runs)} runs: {counts}. M: smallest statistic set.{marks}"))
    sentence = target.describe_target(results)
    if sentence:
        out.print(Text(f"Target: {sentence}"))
    for warning in provenance.list_warnings(results):
        out.print(Text(f"! {warning}", style="yellow"))


def _lay_out(table: Table, headers: Sequence[str], *, gap: int) -> rich.table.Table:
    """Return some columns of a table for the terminal; too long cells wrap, none is cut."""
    shown = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0))
    places = [table.headers.index(header) for header in headers]
    numeric = table.numeric_columns()
    for place, header in zip(places, headers, strict=True):
        widest = max((len(row[place]) for row in table.rows), default=0)
        justify: JustifyMethod = "right" if numeric[place] else "left"
        shown.add_column(
            Text(break_header(header, max(widest, 6))), justify=justify, overflow="fold"
        )
    for row in table.rows:
        # A cell that lost runs must not look like the others.
        style = "yellow" if row[-1] else None
        shown.add_row(*(Text(row[place]) for place in places), style=style)
    return shown


def break_header(header: str, width: int) -> str:
    r"""Return a header broken at spaces and after underscores into lines of about a width.

    Examples:
        >>> break_header("micro_batch_size", 11).split("\n")
        ['micro_', 'batch_size']
    """
    lines = [""]
    for word in re.findall(r"[^ _]+[ _]*", header):
        if lines[-1] and len(lines[-1] + word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)
