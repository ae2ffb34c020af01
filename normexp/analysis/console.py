"""The main table in the terminal."""

from __future__ import annotations

import re

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from normexp.analysis import provenance
from normexp.analysis.load import Results
from normexp.analysis.tables import build_cells_table


def print_summary(results: Results, console: Console | None = None) -> None:
    """Print the main table and what must be known before reading it, within 100 columns.

    Args:
        results: The loaded experiment.
        console: Where to print; standard output by default.
    """
    out = console or Console()
    table = build_cells_table(results)
    shown = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for place, header in enumerate(table.headers):
        is_text = place < len(results.factors) or header == "notes"
        widest = max((len(row[place]) for row in table.rows), default=0)
        shown.add_column(
            Text(break_header(header, max(widest, 8))),
            justify="left" if is_text else "right",
            no_wrap=header != "notes",
            overflow="fold",
        )
    for row in table.rows:
        # A cell that lost runs must not look like the others.
        shown.add_row(*(Text(cell) for cell in row), style="yellow" if row[-1] else None)
    out.print(Text(str(results.plan.get("title") or results.name), style="bold"))
    out.print(shown)
    counts = ", ".join(f"{n} {words}" for words, n in provenance.count_statuses(results))
    out.print(Text(f"{len(results.runs)} runs: {counts}. M: smallest statistic set."))
    for warning in provenance.list_warnings(results):
        out.print(Text(f"! {warning}", style="yellow"))


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
