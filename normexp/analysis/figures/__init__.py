"""Figures: one file a figure, its numbers (``frame``) apart from its drawing (``plot``)."""

from __future__ import annotations

from normexp.analysis.figures._registry import FIGURES, FigureCard, NotApplicable
from normexp.analysis.figures._write import WrittenFigure, plot_frame, write_figures

__all__ = [
    "FIGURES",
    "FigureCard",
    "NotApplicable",
    "WrittenFigure",
    "plot_frame",
    "write_figures",
]
