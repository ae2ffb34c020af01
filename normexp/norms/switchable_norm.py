"""Switchable normalization: a learned mix of the statistics of instance, layer and batch norm.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.norms._batch import check_input
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import (
    by_channel,
    channel_axis,
    masked_mean_var,
    position_axes,
    scale_shift,
    upcast,
    zero_invalid,
)

CARD = NormCard(
    formula="y_c = (x_c - m) / sqrt(v + eps) * weight_c + bias_c, m = sum_k softmax(mean_weight)_k "
    "mean_k, v = sum_k softmax(var_weight)_k var_k, k = instance, layer, batch",
    source="Luo, Ren, Peng, Zhang & Li, ICLR 2019, equations 2 to 5",
    dims=(0, 1, 2),
    statistic_sets={
        0: (("batch",), ("channel",)),
        1: (("position",), ("channel", "position"), ("batch", "position")),
        2: (("position",), ("channel", "position"), ("batch", "position")),
    },
    is_centring=True,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=True,
    mixes_positions=True,
    is_same_in_eval=False,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=("running_mean", "running_var"),
    parameters={
        "weight": ("C",),
        "bias": ("C",),
        "mean_weight": ("num_statistics",),
        "var_weight": ("num_statistics",),
    },
    single_value="finite",
    takes_mask=True,
    keeps_channels_last=True,
    kernel="composite (one mean and variance a sample and channel, combined)",
    kernel_cpu="composite",
    kernel_cuda="composite",
)


class SwitchableNorm(nn.Module):
    """Mixes means and variances with learned weights; see ``build_switchable_norm``."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, num_features: int, *, dims: int, eps: float, affine: bool, momentum: float
    ) -> None:
        super().__init__()
        self.dims = dims
        self.eps = eps
        self.momentum = momentum
        # Features have no positions, so no instance statistics.
        num_statistics = len(CARD.statistic_sets[dims])
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.mean_weight = nn.Parameter(torch.ones(num_statistics))
        self.var_weight = nn.Parameter(torch.ones(num_statistics))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    @property
    def resolved_params(self) -> dict[str, int]:
        """Means, and variances, that are mixed: 2 for features, else 3."""
        return {"num_statistics": len(self.mean_weight)}

    def forward(
        self, x: Float[Tensor, n * rest], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, n * rest]:
        """Return the normalized input, in the input's type; zero at invalid positions."""
        check_input(x, len(self.running_mean), self.dims, mask)
        v = upcast(x)
        if mask is not None:
            v = zero_invalid(v, mask)
        mean, var = self._mix(v, mask)
        y = (v - mean) / (var + self.eps).sqrt()
        y = scale_shift(y, self.weight, self.bias, self.dims)
        if mask is not None:
            y = zero_invalid(y, mask)
        return y.to(x.dtype)

    def _mix(self, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean and variance to normalize by."""
        channel, positions = channel_axis(self.dims), position_axes(self.dims)
        if mask is not None:
            mean_in, var_in, count = masked_mean_var(v, mask, positions)
        elif positions:
            var_in, mean_in = torch.var_mean(v, positions, correction=0, keepdim=True)
            count = torch.ones_like(mean_in)
        else:
            mean_in, var_in, count = v, torch.zeros_like(v), torch.ones_like(v)
        # A variance is the mean of the parts' variances and the variance of the parts' means: the
        # paper's mean(var + mean^2) - mean^2 without its cancellation.
        var_means, mean_ln = torch.var_mean(mean_in, channel, correction=0, keepdim=True)
        var_ln = var_in.mean(channel, keepdim=True) + var_means
        if self.training:
            total = count.sum(0, keepdim=True)
            share = count / total.clamp(min=1.0)
            mean_bn = (share * mean_in).sum(0, keepdim=True)
            var_bn = (share * (var_in + (mean_in - mean_bn).square())).sum(0, keepdim=True)
            self._update_running(mean_bn, var_bn, total)
        else:
            mean_bn = by_channel(self.running_mean, self.dims)
            var_bn = by_channel(self.running_var, self.dims)
        means, vars_ = [mean_in, mean_ln, mean_bn], [var_in, var_ln, var_bn]
        if not positions:
            means, vars_ = means[1:], vars_[1:]
        return _weighted(self.mean_weight, means), _weighted(self.var_weight, vars_)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics; a micro-batch without a valid position moves nothing."""
        rate = self.momentum * (count > 0).to(mean.dtype).flatten()
        self.running_mean.add_(rate * (mean.flatten() - self.running_mean))
        self.running_var.add_(rate * (var.flatten() - self.running_var))

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return (
            f"{len(self.running_mean)}, eps={self.eps}, affine={self.weight is not None}, "
            f"momentum={self.momentum}"
        )


def _weighted(logits: Tensor, parts: list[Tensor]) -> Tensor:
    """Return the sum of the parts by the softmax of the logits."""
    weights = upcast(logits).softmax(0)
    total = weights[0] * parts[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = total + weight * part
    return total


@NORMS.register("switchable_norm", CARD)
def build_switchable_norm(
    num_features: int, *, dims: int, eps: float = 1e-5, affine: bool = True, momentum: float = 0.1
) -> nn.Module:
    """Build ``y_c = (x_c - m) / sqrt(v + eps) * weight_c + bias_c`` with mixed m and v.

    ``m = sum_k softmax(mean_weight)_k mean_k`` and ``v = sum_k softmax(var_weight)_k var_k`` over
    three pairs of statistics, of the instance (the positions of a channel of a sample: sets of
    H*W or L elements), the layer (all of a sample: C*H*W or C*L) and the batch (a channel of all
    samples: N*H*W or N*L). Features have no positions: two pairs, over C and over N. The logits
    are one vector a layer each, start at one (equal weights), and are learned.

    Every variance is the biased one, as in the paper; the authors' code has the unbiased one for
    the instance, and derives the other two from it. In evaluation mean and variance of the batch
    are running ones, of the same biased estimate, moved once a training pass by ``running = (1 -
    momentum) * running + momentum * batch``. They start at 0 and 1 (in the authors' code the
    variance starts at 0), so that an untrained layer evaluates without amplifying. With gradient
    accumulation every micro-batch is normalized and counted on its own.

    Half-precision inputs are computed in float32 and cast back once, at the end.

    Args:
        num_features: Channels C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``, 2 for images
            ``[N, C, H, W]``. Sequences take a mask ``[N, L]``, True where a position is valid: the
            instance and layer statistics of a sample are over its valid positions, those of the
            batch over all valid positions, each with equal weight; elsewhere the output is zero.
        eps: Added to the mixed variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel. The
            logits are learned in either case.
        momentum: Weight of the new micro-batch in the running statistics.

    Returns:
        A module that keeps the input's shape, with ``resolved_params``: num_statistics, the
        number of logits.

    Raises:
        UserError: If ``dims`` is none of 0, 1, 2.

    Source:
        Luo, Ren, Peng, Zhang & Li, "Differentiable Learning-to-Normalize via Switchable
        Normalization", ICLR 2019, equations 2 to 5.
    """
    check_dims(
        "switchable_norm", dims, supported=CARD.dims, instead="features, sequences or images"
    )
    return SwitchableNorm(num_features, dims=dims, eps=eps, affine=affine, momentum=momentum)
