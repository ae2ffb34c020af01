"""EvoNorm-B0: the input over the larger of two deviations; norm and activation in one.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.norms._registry import NORMS, NormCard, StatisticSet, check_dims
from normexp.norms._statistics import (
    by_channel,
    masked_mean_var,
    position_axes,
    scale_shift,
    upcast,
    zero_invalid,
)

CARD = NormCard(
    formula="y_nc = x_nc / max(sqrt(var_c + eps), v_c * x_nc + sqrt(var_nc + eps)) * weight_c + "
    "bias_c",
    source="Liu et al., NeurIPS 2020, arXiv:2004.02967, EvoNorm-B0",
    dims=(1, 2),
    statistic_sets={
        1: (("batch", "position"), ("position",)),
        2: (("batch", "position"), ("position",)),
    },
    is_centring=False,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=True,
    mixes_positions=True,
    is_same_in_eval=False,
    is_shift_invariant=False,
    is_scale_invariant=True,
    state=("running_var",),
    parameters={"weight": ("C",), "bias": ("C",), "v": ("C",)},
    single_value="raises",
    takes_mask=True,
    keeps_channels_last=True,
    kernel="composite",
    kernel_cpu="composite",
    kernel_cuda="composite",
    includes_activation=True,
    plain_at={"v": 0.0},
)


class EvoNormB0(nn.Module):
    """``x / max(batch deviation, v * x + instance deviation)``, then gain and shift.

    Args:
        num_features: Channels C.
        dims: Number of position axes of the input.
        eps: Added to both variances, inside the square roots.
        momentum: Weight of the new batch in the running variance.
        is_activated: Whether an activation belongs here; else gain and shift are all there is.
    """

    running_var: Tensor

    def __init__(
        self, num_features: int, *, dims: int, eps: float, momentum: float, is_activated: bool
    ) -> None:
        super().__init__()
        self.dims = dims
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.v = nn.Parameter(torch.ones(num_features)) if is_activated else None
        if is_activated:
            self.register_buffer("running_var", torch.ones(num_features))
        else:
            self.statistic_sets: tuple[StatisticSet, ...] = ()

    def forward(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized and activated input.

        Args:
            x: Sequences ``[N, L, C]`` or images ``[N, C, H, W]``. Everything is computed in
                float32 for half-precision types and cast to their type at the end.
            mask: True where a position is valid; for sequences, where all are without one.

        Returns:
            The same shape, zero at invalid positions.

        Raises:
            ValueError: If images come with a mask, or a channel of a sample has one position.
        """
        if mask is not None and self.dims != 1:
            raise ValueError("only sequences take a mask")
        y = upcast(x) if mask is None else zero_invalid(upcast(x), mask)
        if self.v is not None:
            axes = position_axes(self.dims)
            if all(x.shape[axis] == 1 for axis in axes):
                raise ValueError("evo_norm_b0 needs 2 positions or more for its instance variance")
            if mask is None:
                instance_var = y.var(axes, correction=0, keepdim=True)
            else:
                _, instance_var, _ = masked_mean_var(y, mask, axes)
            batch_std = torch.sqrt(self._choose_batch_var(y, mask, axes) + self.eps)
            bend = by_channel(self.v, self.dims) * y + torch.sqrt(instance_var + self.eps)
            y = y / torch.maximum(by_channel(batch_std, self.dims), bend)
        y = scale_shift(y, self.weight, self.bias, self.dims)
        if mask is not None:
            y = zero_invalid(y, mask)
        return y.to(x.dtype)

    def _choose_batch_var(
        self, x: Tensor, mask: Tensor | None, axes: tuple[int, ...]
    ) -> Float[Tensor, " c"]:
        """Return the micro-batch's variance, noting it, or in evaluation the running one."""
        if not self.training:
            return upcast(self.running_var)
        if mask is None:
            var = x.var((0, *axes), correction=0)
            size = x.numel() // len(var)
            self._track(var.detach() * (size / (size - 1)), self.momentum)
        else:
            var, count = (s.flatten() for s in masked_mean_var(x, mask, (0, *axes))[1:])
            # Fewer than 2 valid positions have no unbiased variance: the buffer stays.
            rate = self.momentum * (count >= 2).to(x.dtype)
            self._track(var.detach() * (count / (count - 1.0).clamp(min=1.0)), rate)
        return var

    def _track(self, unbiased_var: Tensor, rate: Tensor | float) -> None:
        """Move the running variance towards a new one, in place."""
        self.running_var.mul_(1.0 - rate).add_(rate * unbiased_var)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        options = f"eps={self.eps}, momentum={self.momentum}"
        return f"{len(self.weight)}, {options}, is_activated={self.v is not None}"


@NORMS.register("evo_norm_b0", CARD)
def build_evo_norm_b0(
    num_features: int,
    *,
    dims: int,
    eps: float = 1e-3,
    momentum: float = 0.1,
    is_activated: bool = True,
) -> nn.Module:
    """Build ``y = x / max(sqrt(var_c + eps), v_c * x + sqrt(var_nc + eps)) * weight_c + bias_c``.

    var_c (biased) is over the micro-batch and all positions of a channel, N*H*W (images) or N*L
    (sequences) elements; var_nc (biased) over the positions of one sample, H*W or L elements;
    with a mask both are over valid positions. The means go into the variances alone and are not
    taken out of x. v, one number a channel, starts at 1. Where no activation belongs, only gain
    and shift are left, as in the authors' code: no statistics, no v, no buffer. In sequences an
    output depends on later positions: not for causal models.

    In evaluation var_c is the running variance, ``running = (1 - momentum) * running +
    momentum * batch`` of the unbiased variance, as in torch's batch norm (the authors keep the
    biased one); var_nc is the sample's own. On 1x1 maps and sequences of length 1 var_nc is zero
    whatever the input: the layer raises, and so does the check before training.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``.
        eps: Added to both variances, inside the square roots.
        momentum: Weight of the new batch in the running variance (torch's sense; decay is one
            minus it).
        is_activated: Whether an activation belongs here; normexp says so.

    Returns:
        A module that keeps the input's shape. For sequences its forward takes a mask of valid
        positions.

    Raises:
        UserError: If ``dims`` is neither 1 nor 2.

    Source:
        Liu et al., "Evolving Normalization-Activation Layers", NeurIPS 2020,
        arXiv:2004.02967.
    """
    check_dims(
        "evo_norm_b0", dims, supported=CARD.dims, instead="evo_norm_s0 (features have no positions)"
    )
    return EvoNormB0(num_features, dims=dims, eps=eps, momentum=momentum, is_activated=is_activated)
