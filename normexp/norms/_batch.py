"""What the batch normalizations share: input checks, statistics by chunk, normalizing with them.

Legend: N samples, L positions of a sequence, C channels, H, W height and width; k chunks of the
micro-batch with m elements a channel each.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from normexp.norms._batch_running import move_running, unbiased
from normexp.norms._statistics import (
    channel_axis,
    masked_mean_var,
    scale_shift,
    upcast,
    zero_invalid,
)

# From this size on the copies of a chunk cost more than a call of the kernel.
MIN_CHUNK_ELEMENTS = 2**14


def check_input(x: Tensor, num_features: int, dims: int, mask: Tensor | None = None) -> None:
    """Raise unless the input has the layer's axes and features, and the mask fits it.

    torch's BatchNorm1d takes sequences with channels in the second axis, so that on ``[N, L, C]``
    it would normalize the positions, without a word where L equals C.

    Args:
        x: The input.
        num_features: Channels C of the layer.
        dims: Number of position axes of the layer.
        mask: True where a position is valid, ``[N, L]``; None for all.

    Raises:
        ValueError: If they do not fit.
    """
    shape, axis = tuple(x.shape), channel_axis(dims)
    if x.ndim != dims + 2 or shape[axis] != num_features:
        raise ValueError(
            f"an input with {dims + 2} axes and {num_features} features in axis {axis} "
            f"is needed, not one of shape {shape}"
        )
    if mask is not None and (dims != 1 or mask.shape != shape[:2] or mask.dtype != torch.bool):
        raise ValueError(
            f"a mask is for sequences [N, L, C]: bool of shape [N, L]; not {mask.dtype} of shape "
            f"{tuple(mask.shape)} for an input of shape {shape}"
        )


def channels_second(x: Float[Tensor, "*shape"], dims: int) -> Float[Tensor, "*flat"]:
    """Return the input with channels in the second axis, as torch's kernels want it; no copy.

    Sequences become features ``[N*L, C]``.
    """
    return x.flatten(0, 1) if dims == 1 else x


def evaluate(
    layer: _BatchNorm,
    x: Float[Tensor, "*shape"],
    dims: int,
    mask: Bool[Tensor, "n l"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the input normalized by the layer's running statistics, in one kernel.

    Args:
        layer: Has gain, shift, eps and the buffers.
        x: The input.
        dims: Number of its position axes.
        mask: True where a position is valid; the output is zero elsewhere. None for all.
    """
    if mask is not None:
        # A NaN times the zero gradient that arrives there would reach the gain.
        x = zero_invalid(x, mask)
    y = F.batch_norm(
        channels_second(x, dims),
        _upcast_vector(layer.running_mean),
        _upcast_vector(layer.running_var),
        _upcast_vector(layer.weight),
        _upcast_vector(layer.bias),
        training=False,
        eps=layer.eps,
    ).reshape(x.shape)
    return y if mask is None else zero_invalid(y, mask)


def normalize_chunks(
    x: Float[Tensor, "*shape"],
    like: Float[Tensor, " c"],
    weight: Float[Tensor, " c"] | None,
    bias: Float[Tensor, " c"] | None,
    *,
    num_chunks: int,
    eps: float,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "k c"], Float[Tensor, "k c"]]:
    """Return each chunk of the batch normalized by its own statistics, and these.

    Large chunks take one call of torch's kernel each. Small ones take one call together, side by
    side as further channels; that takes a copy on the way in and one on the way out.

    Args:
        x: Features ``[N, C]`` or images ``[N, C, H, W]``; N is a multiple of ``num_chunks``.
        like: A running statistic, for type and device.
        weight: One gain a channel; None for none.
        bias: One shift a channel; None for none.
        num_chunks: k.
        eps: Added to the variance, inside the square root.

    Returns:
        (output, mean, unbiased variance).

    Raises:
        ValueError: If a chunk has one value a channel.
    """
    if num_chunks == 1 or x.numel() >= num_chunks * MIN_CHUNK_ELEMENTS:
        parts = [_normalize_alone(c, like, weight, bias, eps=eps) for c in x.chunk(num_chunks)]
        outputs, means, variances = zip(*parts, strict=True)
        y = outputs[0] if num_chunks == 1 else torch.cat(outputs)
        return y, torch.stack(means), torch.stack(variances)
    num_channels = x.shape[1]
    # Positions before channels in memory: the chunk goes between them, and strides stay.
    has_channels_last = x.ndim == 4 and x.stride(1) == 1
    moved = x.movedim(1, -1) if has_channels_last else x
    tail = (num_channels,) if has_channels_last else x.shape[1:]
    side_by_side = moved.reshape(num_chunks, -1, *tail).transpose(0, 1)
    wide = side_by_side.reshape(-1, num_chunks * num_channels, *tail[1:])
    y, mean, var = _normalize_alone(
        wide,
        like.repeat(num_chunks),
        None if weight is None else weight.repeat(num_chunks),
        None if bias is None else bias.repeat(num_chunks),
        eps=eps,
    )
    y = y.reshape(side_by_side.shape).transpose(0, 1).reshape(moved.shape)
    y = y.movedim(-1, 1) if has_channels_last else y
    return y, mean.reshape(num_chunks, -1), var.reshape(num_chunks, -1)


def _normalize_alone(
    x: Tensor, like: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, mean and unbiased variance of batch normalization, channels second."""
    # Built from a buffer, so that under vmap they are one a replica. With a momentum of 1 the
    # kernel leaves in them what it computes anyway.
    mean = torch.zeros_like(upcast(like))
    var = torch.zeros_like(mean)
    gain, shift = _upcast_vector(weight), _upcast_vector(bias)
    y = F.batch_norm(x, mean, var, gain, shift, training=True, momentum=1.0, eps=eps)
    return y, mean, var


def _upcast_vector(vector: Tensor | None) -> Tensor | None:
    """Return a vector in the type of the statistics, or None as it is.

    With half-precision vectors torch's kernel would round ``bias - mean * weight / std`` to that.
    """
    return None if vector is None else upcast(vector)


def standardize(
    x: Float[Tensor, "*shape"],
    mean: Float[Tensor, "*reduced"],
    var: Float[Tensor, "*reduced"],
    eps: float,
) -> Float[Tensor, "*shape"]:
    """Return ``(x - mean) / sqrt(var + eps)``."""
    return (x - mean) * torch.rsqrt(var + eps)


def normalize_masked(
    layer: _BatchNorm, x: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"], num_chunks: int = 1
) -> Float[Tensor, "n l c"]:
    """Return batch normalization over the valid positions, by chunk; zero at the others.

    Training only. Composite; statistics, gain and shift in float32 for half-precision types, then
    cast back. The layer's buffers move by each chunk that has two valid positions or more.

    Args:
        layer: Has gain, shift, eps, momentum and the buffers.
        x: Sequences; what stands at invalid positions has no influence.
        mask: True where a position is valid.
        num_chunks: k, the chunks of consecutive samples with statistics of their own.
    """
    chunks = upcast(x).reshape(num_chunks, -1, x.shape[2])
    valid = mask.reshape(num_chunks, -1)
    chunks = zero_invalid(chunks, valid)
    mean, var, count = masked_mean_var(chunks, valid, (1,))
    count = count[:, 0, :1]
    move_running(layer, mean[:, 0], unbiased(var[:, 0], count), count > 1)
    y = scale_shift(standardize(chunks, mean, var, layer.eps), layer.weight, layer.bias, 1)
    return zero_invalid(y, valid).reshape(x.shape).to(x.dtype)


def batch_moments(
    x: Float[Tensor, "*shape"], dims: int, mask: Bool[Tensor, "n l"] | None
) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"], Float[Tensor, " 1"]]:
    """Return mean and biased variance of each channel over the batch, and their elements' number.

    Args:
        x: The input, in the type of the statistics.
        dims: Number of its position axes.
        mask: True where a position is valid; None for all.

    Raises:
        ValueError: If there is no mask and a channel has a single value.
    """
    if mask is not None:
        mean, var, count = masked_mean_var(x, mask, (0, 1))
        return mean.flatten(), var.flatten(), count.flatten()[:1]
    num_elements = count_elements(x, dims)
    if num_elements == 1:
        raise ValueError(f"more than one value a channel is needed in training, not {x.shape}")
    axes = tuple(axis for axis in range(x.ndim) if axis != channel_axis(dims))
    var, mean = torch.var_mean(x, axes, correction=0)
    return mean, var, torch.full_like(mean[:1], num_elements)


def count_elements(x: Tensor, dims: int) -> int:
    """Return the number of elements of a channel: N times the positions."""
    return math.prod(x.shape) // x.shape[channel_axis(dims)]
