"""Where figures register, and what is declared about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from normexp.analysis.load import Results
from normexp.registry import Registry


class NotApplicable(Exception):
    """A figure that this experiment cannot show; the message is the reason for the report."""


@dataclass(frozen=True)
class FigureCard:
    """What is declared about a figure; the registered builder draws its frame.

    Attributes:
        frame: Returns the numbers that are drawn, all of them; raises ``NotApplicable``.
        title: What the figure shows, in a few words.
        caption: How to read it: formula of the bars, meaning of every mark.
        notes: Returns further sentences of the caption, which depend on the numbers drawn.
    """

    frame: Callable[[Results], pd.DataFrame]
    title: str
    caption: str
    notes: Callable[[pd.DataFrame], list[str]] = lambda _: []


FIGURES: Registry[FigureCard] = Registry("figure", "normexp.analysis.figures")
