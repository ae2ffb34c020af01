"""Division by the root mean square over the last axis, with a gain.

On the CPU torch computes its RMS norm with one operation for each step of the formula, forward
and backward, while its layer norm is one fused kernel each way: a comparison of the two would
compare kernels, not methods. Here the backward pass is layer norm's fused kernel, told that the
mean is zero, and one correction for the mean of the gradient that it takes out; the forward pass
reads the input twice. ``scripts/bench_norms.py`` prints what that gains.

Legend: C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from normexp.norms._statistics import upcast

# Below, starting a Python autograd function costs more than it saves.
MIN_ELEMENTS = 2**15


def rms_normalize(
    x: Float[Tensor, "*batch c"], weight: Float[Tensor, " c"] | None, eps: float
) -> Float[Tensor, "*batch c"]:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    Args:
        x: Any input; statistics are in float32 for half-precision types, and the result is
            rounded to the input's type after the gain.
        weight: One gain a channel; None for none.
        eps: Added to the mean of squares, inside the square root.

    First and second derivatives in reverse mode; forward mode (torch.func.jvp) works only where
    torch's path is taken.
    """
    if weight is not None and weight.dtype != x.dtype:
        # torch takes its slow path there, with a warning. Half-precision activations and float32
        # gains meet under autocast.
        wide = torch.promote_types(x.dtype, weight.dtype)
        return rms_normalize(x.to(wide), weight.to(wide), eps).to(x.dtype)
    is_ours = (
        x.device.type == "cpu"
        and x.numel() >= MIN_ELEMENTS
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()  # the compiler fuses the plain formula itself
    )
    if not is_ours:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # Sums over a strided axis are ten times slower than a copy.
    y: Tensor = _RmsNormalize.apply(x.contiguous(), weight, eps)[0]
    return y


def rms_normalize_images(
    x: Float[Tensor, "n c h w"], weight: Float[Tensor, " c"] | None, eps: float
) -> Float[Tensor, "n c h w"]:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the channels of each pixel.

    Args:
        x: Images; larger ones come out with channels-last strides.
        weight: One gain a channel; None for none.
        eps: Added to the mean of squares, inside the square root.
    """
    if x.device.type != "cpu" or x.numel() >= MIN_ELEMENTS:
        return rms_normalize(x.permute(0, 2, 3, 1), weight, eps).permute(0, 3, 1, 2)
    # Moving the channels costs more than it saves here.
    wide = upcast(x)
    y = wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight[:, None, None]).to(x.dtype)


class _RmsNormalize(torch.autograd.Function):
    """The output, and the reciprocal root mean square for the backward pass."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return output and ``s = 1 / sqrt(mean(x^2) + eps)``."""
        s = _reciprocal_rms(x, eps)
        y = x * s
        return (y if weight is None else y.mul_(weight)), s

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        """Keep what the backward pass needs: as many bytes as layer norm keeps."""
        x, weight, eps = inputs
        ctx.eps = eps  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return ``s (wg - y mean(wg y))``, y the normalized input, and the gain's gradient."""
        x, weight, s = ctx.saved_tensors
        g, num_channels = grads[0], x.shape[-1]
        if torch.is_grad_enabled():
            # A derivative of this one is wanted: every step must be differentiable, s too.
            y = x * _reciprocal_rms(x, ctx.eps)
            wg = g if weight is None else g * weight
            inner = (wg * y).mean(-1, keepdim=True)
            gw = None if weight is None else (g * y).flatten(0, -2).sum(0)
            return _reciprocal_rms(x, ctx.eps) * (wg - y * inner), gw, None
        # Layer norm's is s (wg - y mean(wg y) - mean(wg)); the last term goes back in.
        gx, gw, _ = torch.ops.aten.native_layer_norm_backward(
            g,
            x,
            (num_channels,),
            torch.zeros_like(s),
            s,
            weight,
            None,
            (True, weight is not None, False),
        )
        total = g.sum(-1) if weight is None else g @ weight
        return gx.add_(total[..., None] * (s / num_channels)), gw, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Return the outputs of stacked inputs and gains."""
        x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x[None]
        s = _reciprocal_rms(x, eps)
        y = x * s
        if weight is not None:
            if in_dims[1] is not None:
                weight = weight.movedim(in_dims[1], 0)
                weight = weight.reshape(weight.shape[0], *[1] * (x.ndim - 2), weight.shape[1])
            y = y * weight
        size = (info.batch_size, *y.shape[1:])
        return (y.expand(size), s.expand(info.batch_size, *s.shape[1:])), (0, 0)


def _reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """Return ``1 / sqrt(mean(x^2) + eps)`` over the last axis, which stays."""
    # vector_norm reads x once and writes no x^2; its derivative at a zero row is 0 in torch.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    s: Tensor = (norm.square() / x.shape[-1] + eps).rsqrt()
    return s
