"""What every norm declares about itself, and where norms register."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from normexp.errors import UserError
from normexp.registry import Registry

# The axes that a statistic can be computed over. "ghost" is a chunk of the batch, "group" a group
# of channels, "part" the first channels.
Axis = Literal["batch", "ghost", "channel", "group", "part", "position"]
StatisticSet = tuple[Axis, ...]
EpsPlace = Literal["inside_sqrt", "outside_sqrt", "clamp", "magnitude"]
Divisor = Literal["M", "M-1"]
Kernel = Literal["fused", "composite", "none"]
SingleValue = Literal["raises", "zero", "sign", "amplified", "finite", "raises at N=1, else zero"]


@dataclass(frozen=True)
class WeightCard:
    """What a norm declares about the weight of the convolution or linear layer it belongs to.

    A statistic is over the fan-in of one output: input channels x kernel area.

    Attributes:
        formula: The effective weight, in one line.
        is_centring: Whether the mean over the fan-in is subtracted.
        is_scale_invariant: Whether a positive factor on the raw weight changes nothing.
        divisor: What the sum of squares is divided by, M the fan-in; None for a plain sum.
        eps_place: Where eps stands; None without one.
        parameters: Names of the parameters beside the raw weight, with their shapes in terms of
            O, the number of outputs.
        parametrize: Puts the norm on a module's weight, in place. Takes the module and the
            options of the norm that concern the weight, and returns the module.
    """

    formula: str
    is_centring: bool
    is_scale_invariant: bool
    divisor: Divisor | None
    eps_place: EpsPlace | None
    parameters: dict[str, tuple[str, ...]]
    parametrize: Callable[..., nn.Module]


@dataclass(frozen=True)
class NormCard:
    """What a norm declares; the contract suite proves it by experiment, but for text.

    What is said here is about training mode and default options, unless said otherwise; of a norm
    with a warm-up also about the time after it. M is the number of elements of a statistic set.

    Attributes:
        formula: The output, in one line. ``mean`` and ``var`` are over the statistic set and
            ``var`` is the biased variance unless said otherwise.
        source: Paper with section or equation, and the torch layer that is used.
        dims: Number of position axes of the inputs it is defined for: 0 for features ``[N, C]``,
            1 for sequences ``[N, L, C]``, 2 for images ``[N, C, H, W]``.
        statistic_sets: For each entry of ``dims``, the axes that each of its statistics is
            computed over; empty for no statistic.
        is_centring: Whether a mean is subtracted. A layer whose output goes straight into such
            a norm is built without a bias, as is the custom for every norm of this kind (strictly
            redundant it is where each channel has a mean of its own).
        divisor: What the sum of squares is divided by; None without statistics.
        eps_place: Where eps stands: inside the square root, outside, as a lower bound, or added
            to the magnitude of the input; None without an eps.
        mixes_samples: Whether the output of a sample in training depends on its batch mates.
        mixes_positions: Whether an output position depends on other positions.
        is_same_in_eval: Whether training and evaluation compute the same function.
        is_shift_invariant: Whether adding a constant to the whole input changes nothing.
        is_scale_invariant: Whether a positive factor on the whole input changes nothing, but
            for eps.
        state: Names of the buffers.
        parameters: Names of the parameters with their shapes in terms of C, the channels.
        single_value: What comes out where a statistic set has a single value: an error, zero
            (before gain and shift) whatever the input, the sign of the input, the input divided
            by something tiny, or something that is none of these; None without statistics.
        takes_mask: Whether sequences take a mask of valid positions: ``forward(x, mask)``.
        keeps_channels_last: Whether images in channels-last strides come out so.
        kernel: What computes it, in words.
        kernel_cpu: One fused kernel, a composite of several, or nothing to compute.
        kernel_cuda: The same on CUDA.
        includes_activation: Whether it brings its own activation, so that no other follows; its
            builder takes ``is_activated``: False where no activation belongs.
        takes_condition: Whether it is called with a condition beside the input.
        has_exact_gradient: Whether the backward pass is the derivative of the forward pass.
        is_vectorizable: Whether it works under torch.vmap with stacked parameters and buffers.
        is_chained: Whether the second statistic is computed from what the first has normalized.
        is_experimental: Whether it is ours or a source's untested idea, not an established method.
        plain_at: Own parameters with values at which the output is the normalized input without
            the activation's bend; for the experiments of the contract suite.
        weight: What it does to the weight of the layer it belongs to; None for nothing.
    """

    formula: str
    source: str
    dims: tuple[int, ...]
    statistic_sets: dict[int, tuple[StatisticSet, ...]]
    is_centring: bool
    divisor: Divisor | None
    eps_place: EpsPlace | None
    mixes_samples: bool
    mixes_positions: bool
    is_same_in_eval: bool
    is_shift_invariant: bool
    is_scale_invariant: bool
    state: tuple[str, ...]
    parameters: dict[str, tuple[str, ...]]
    single_value: SingleValue | None
    takes_mask: bool
    keeps_channels_last: bool
    kernel: str
    kernel_cpu: Kernel
    kernel_cuda: Kernel
    includes_activation: bool = False
    takes_condition: bool = False
    has_exact_gradient: bool = True
    is_vectorizable: bool = True
    is_chained: bool = False
    is_experimental: bool = False
    plain_at: dict[str, float] = field(default_factory=dict)
    weight: WeightCard | None = None

    def kernel_on(self, device_type: str) -> Kernel:
        """Return the kernel on "cuda", or on anything else as on the CPU."""
        return self.kernel_cuda if device_type == "cuda" else self.kernel_cpu


NORMS: Registry[NormCard] = Registry("norm", "normexp.norms", NormCard)

# Keyword-only arguments of a builder that normexp fills in itself.
RESERVED = frozenset({"dims", "is_activated"})

SHAPES = {0: "features [N, C]", 1: "sequences [N, L, C]", 2: "images [N, C, H, W]"}


def check_dims(name: str, dims: int, *, supported: tuple[int, ...], instead: str) -> None:
    """Raise unless the norm is defined for inputs of that kind.

    Args:
        name: The norm.
        dims: Number of position axes: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``,
            2 for images ``[N, C, H, W]``.
        supported: The kinds that the norm is defined for.
        instead: Which norms to use for the other kind, as the end of the message.

    Raises:
        UserError: If ``dims`` is not supported.
    """
    if dims not in supported:
        shape = SHAPES.get(dims, f"inputs with dims={dims}")
        raise UserError("norm", name, f"not defined for {shape}; use {instead}")
