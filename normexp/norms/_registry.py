"""What every norm declares about itself, and where norms register."""

from __future__ import annotations

from dataclasses import dataclass

from normexp.errors import UserError
from normexp.registry import Registry


@dataclass(frozen=True)
class NormCard:
    """What a norm declares; the tests prove every field by experiment.

    Attributes:
        formula: The output, in one line. ``mean`` and ``var`` are over the statistic axes and
            ``var`` is the biased variance unless said otherwise.
        source: Paper with section or equation, and the torch layer that is used.
        dims: Kinds of input: 2 for images ``[N, C, H, W]``, 1 for features ``[N, C]``.
        statistic_axes: For each entry of ``dims``, the axes that one statistic is computed over,
            out of "batch", "channel", "group" and "position"; empty for no statistic.
        is_centring: Whether a mean is subtracted. A layer whose output goes straight into such
            a norm is built without a bias, as is the custom for every norm of this kind (strictly
            redundant it is where each channel has a mean of its own).
        mixes_samples: Whether the output of a sample in training depends on its batch mates.
        mixes_positions: Whether an output pixel depends on other pixels.
        is_same_in_eval: Whether training and evaluation compute the same function.
        state: Names of the buffers.
        kernel: What computes it: one native kernel or a composite of several.
    """

    formula: str
    source: str
    dims: tuple[int, ...]
    statistic_axes: dict[int, tuple[str, ...]]
    is_centring: bool
    mixes_samples: bool
    mixes_positions: bool
    is_same_in_eval: bool
    state: tuple[str, ...]
    kernel: str


NORMS: Registry[NormCard] = Registry("norm", "normexp.norms")

_SHAPES = {1: "features [N, C]", 2: "images [N, C, H, W]"}


def check_dims(name: str, dims: int, *, supported: tuple[int, ...], instead: str) -> None:
    """Raise unless the norm is defined for inputs of that kind.

    Args:
        name: The norm.
        dims: 2 for images ``[N, C, H, W]``, 1 for features ``[N, C]``.
        supported: The kinds that the norm is defined for.
        instead: Which norms to use for the other kind, as the end of the message.

    Raises:
        UserError: If ``dims`` is not supported.
    """
    if dims not in supported:
        shape = _SHAPES.get(dims, f"inputs with dims={dims}")
        raise UserError("norm", name, f"not defined for {shape}; use {instead}")
