"""Figures as files, with the drawn numbers beside each."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from normexp.analysis.figures._registry import FIGURES, NotApplicable
from normexp.analysis.figures._style import use_style
from normexp.analysis.leaks import MEANING, is_any_marked
from normexp.analysis.load import Results
from normexp.analysis.render import render_csv
from normexp.records.store import write_whole

# A date or a version in a file would make equal data give unequal bytes.
METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


@dataclass(frozen=True)
class WrittenFigure:
    """A figure of a report: its files by suffix, or why there are none."""

    name: str
    title: str
    caption: str
    paths: dict[str, Path]
    skipped: str | None = None


def write_figures(
    results: Results, folder: Path, names: Sequence[str] | None = None
) -> list[WrittenFigure]:
    """Write figures as ``.png``, ``.svg``, ``.pdf`` and their numbers as ``.csv``.

    Args:
        results: The loaded experiment.
        folder: Where to write; made if missing.
        names: Which figures; all registered ones if None or empty.

    Returns:
        One entry a figure, also for those that do not apply, with the reason.

    Raises:
        UserError: If there is no figure of that name.
    """
    written = []
    for name in names or FIGURES.names():
        entry = FIGURES.get(name, key="figures")
        title, caption = entry.card.title, entry.card.caption
        try:
            data = entry.card.frame(results)
        except NotApplicable as reason:
            written.append(WrittenFigure(name, title, caption, {}, str(reason)))
            continue
        with use_style():
            files = render(entry.build(data))
        notes = [*filter(None, entry.card.notes(data))]
        if any(is_any_marked(data[name].tolist()) for name in data):
            notes.append(MEANING)
        caption = " ".join([caption, *notes])
        paths = {}
        for suffix, content in {**files, "csv": render_csv(data).encode()}.items():
            paths[suffix] = folder / f"{name}.{suffix}"
            write_whole(paths[suffix], content)
        written.append(WrittenFigure(name, title, caption, paths))
    return written


def render(figure: Figure) -> dict[str, bytes]:
    """Return the bytes of a figure by format: the same for the same data."""
    files = {}
    for suffix, metadata in METADATA.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, metadata=metadata)
        files[suffix] = buffer.getvalue()
    return files


def plot_frame(name: str, data: pd.DataFrame) -> Figure:
    """Return a registered figure of a frame in the style of all figures."""
    with use_style():
        figure: Figure = FIGURES.get(name, key="figures").build(data)
    return figure
