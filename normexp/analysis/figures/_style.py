"""The one look of all figures: sizes, colours that also differ in grey, bytes that repeat."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

# Okabe and Ito (2008): told apart with every common colour vision.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
# Tol's muted colours, for norms that are not ours: none looks like one of the above.
COLOURS = ("#332288", "#882255", "#999933", "#44AA99", "#AA4499")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (3, 1, 1, 1, 1, 1)),
)
# Width of one column and of a page in a two-column paper, in inches.
COLUMN_IN, PAGE_IN = 3.5, 7.0

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.fonttype": "path",
    # Without it element names in the SVG are random and no two files are equal.
    "svg.hashsalt": "normexp",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Look:
    """How one arm is drawn in every figure."""

    colour: str
    marker: str
    dashes: Any
    is_hollow: bool = False

    def line(self) -> dict[str, Any]:
        """Return the keyword arguments of matplotlib's lines."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "markerfacecolor": "white" if self.is_hollow else self.colour,
            "markeredgecolor": self.colour,
        }


# Norms that are often compared differ in colour; marker and dashes together tell every norm from
# every other one without it.
NORM_LOOKS = {
    "no_norm": Look(BLACK, "X", DASHES[2]),
    "signed_power": Look(BLACK, "h", DASHES[3]),
    "dynamic_tanh": Look(BLACK, ">", DASHES[1]),
    "dynamic_erf": Look(ORANGE, "<", DASHES[4]),
    # statistics over the batch
    "batch_norm": Look(BLUE, "o", DASHES[0]),
    "sync_batch_norm": Look(BLUE, "o", DASHES[1]),
    "frozen_batch_norm": Look(BLUE, "o", DASHES[2]),
    "ghost_batch_norm": Look(SKY, "v", DASHES[3]),
    "batch_renorm": Look(PURPLE, "h", DASHES[0]),
    "switchable_norm": Look(ORANGE, "*", DASHES[0]),
    "power_norm": Look(VERMILLION, "P", DASHES[2]),
    # a sample over groups of channels
    "group_norm": Look(VERMILLION, "s", DASHES[1]),
    "adaptive_group_norm": Look(VERMILLION, "s", DASHES[2]),
    "evo_norm_s0": Look(PURPLE, "D", DASHES[0]),
    "evo_norm_b0": Look(BLACK, "D", DASHES[1]),
    # a sample over all channels
    "layer_norm": Look(GREEN, "<", DASHES[0]),
    "layer_norm_chw": Look(GREEN, "^", DASHES[3]),
    "layer_norm_std_outside": Look(BLACK, "^", DASHES[0]),
    "adaptive_layer_norm": Look(GREEN, "<", DASHES[2]),
    "layer_norm_channel": Look(SKY, "v", DASHES[1]),
    # a sample and channel over the positions
    "instance_norm": Look(ORANGE, "D", DASHES[4]),
    "adaptive_instance_norm": Look(ORANGE, "D", DASHES[2]),
    "filter_response_norm": Look(ORANGE, ">", DASHES[0]),
    "spectral_band_norm": Look(ORANGE, "h", DASHES[1]),
    # no mean
    "rms_norm": Look(PURPLE, "P", DASHES[0]),
    "partial_rms_norm": Look(VERMILLION, "P", DASHES[1]),
    "scale_norm": Look(ORANGE, "X", DASHES[0]),
    # the weights
    "weight_norm": Look(SKY, "*", DASHES[1]),
    "weight_standardization": Look(SKY, "s", DASHES[0]),
    "scaled_weight_standardization": Look(GREEN, "s", DASHES[3]),
}


def norm_look(norm: object, variant: int = 0) -> Look:
    """Return the look of a norm: the same in every figure of every experiment.

    Args:
        norm: Name of the norm; one that is not ours gets a look from its letters.
        variant: Counts the settings of one norm within a figure; each is lighter than the
            one before, every second one hollow.
    """
    base = NORM_LOOKS.get(str(norm)) or _look_from_letters(str(norm))
    if not variant:
        return base
    share = min(0.25 * variant, 0.6)
    red, green, blue = (channel + (1.0 - channel) * share for channel in to_rgb(base.colour))
    dashes = DASHES[(DASHES.index(base.dashes) + variant) % len(DASHES)]
    return Look(to_hex((red, green, blue)), base.marker, dashes, is_hollow=variant % 2 == 1)


def level_looks(levels: Iterable[object]) -> dict[object, Look]:
    """Return looks for levels in order, light to dark: for lines that are no norms."""
    ordered = list(levels)
    colours = matplotlib.colormaps["viridis"]
    last = max(1, len(ordered) - 1)
    return {
        level: Look(
            to_hex(colours(0.75 - 0.75 * position / last)),
            MARKERS[position % len(MARKERS)],
            DASHES[position % len(DASHES)],
        )
        for position, level in enumerate(ordered)
    }


@contextlib.contextmanager
def use_style() -> Iterator[None]:
    """Draw in the one style, whatever the settings of the user or the program around."""
    defaults = {k: v for k, v in matplotlib.rcParamsDefault.items() if k != "backend"}
    settings: Any = {**defaults, **RC}
    with matplotlib.rc_context(settings):
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure of its own: no pyplot, no window, nothing left open."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _look_from_letters(norm: str) -> Look:
    """Return a look that only the name decides."""
    number = zlib.crc32(norm.encode())
    return Look(
        COLOURS[number % len(COLOURS)],
        MARKERS[number // 5 % len(MARKERS)],
        DASHES[number // 55 % len(DASHES)],
    )
