"""Arithmetic that several norms share: where channels stand, float32 statistics, masks.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def upcast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the input in the type that statistics are computed in: float32, or float64 as it is.

    The square of a half-precision number overflows from 256 on, and its mean loses most digits.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def channel_axis(dims: int) -> int:
    """Return the axis of the channels: the last in sequences ``[N, L, C]``, else the second."""
    return 2 if dims == 1 else 1


def count_channels(shape: tuple[int, ...]) -> int:
    """Return C of an input's shape."""
    return shape[channel_axis(len(shape) - 2)]


def position_axes(dims: int) -> tuple[int, ...]:
    """Return the axes of the positions, of inputs with that many of them."""
    return {0: (), 1: (1,), 2: (2, 3)}[dims]


def by_channel(vector: Float[Tensor, " c"], dims: int) -> Float[Tensor, "*reduced"]:
    """Return one number a channel in a shape that broadcasts against inputs."""
    return vector[:, None, None] if dims == 2 else vector


def scale_shift(
    x: Float[Tensor, "*shape"],
    weight: Float[Tensor, " c"] | None,
    bias: Float[Tensor, " c"] | None,
    dims: int,
) -> Float[Tensor, "*shape"]:
    """Return ``x * weight + bias`` by channel, in the input's type; None for neither."""
    if weight is not None:
        x = x * by_channel(weight.to(x.dtype), dims)
    if bias is not None:
        x = x + by_channel(bias.to(x.dtype), dims)
    return x


def masked_mean_var(
    x: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"], axes: tuple[int, ...]
) -> tuple[Float[Tensor, "*reduced"], Float[Tensor, "*reduced"], Float[Tensor, "*reduced"]]:
    """Return mean, biased variance and number of the valid elements, over some axes.

    Two passes; a set without a valid element has mean and variance 0 and number 0.

    Args:
        x: Sequences; what stands at invalid positions has no influence, not even NaN.
        mask: True where a position is valid.
        axes: Axes to reduce; they stay with extent 1.

    Returns:
        (mean, variance, count), each with extent 1 along the reduced axes.
    """
    valid = mask[:, :, None]
    x = torch.where(valid, x, 0.0)
    weights = valid.to(x.dtype).expand_as(x)
    count = weights.sum(axes, keepdim=True)
    safe = count.clamp(min=1.0)
    mean = x.sum(axes, keepdim=True) / safe
    centred = torch.where(valid, x - mean, 0.0)
    var = centred.square().sum(axes, keepdim=True) / safe
    return mean, var, count


def zero_invalid(y: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"]) -> Float[Tensor, "n l c"]:
    """Return the output with zeros at invalid positions, where shift or noise would stand."""
    return torch.where(mask[:, :, None], y, 0.0)
