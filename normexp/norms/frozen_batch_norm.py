"""Frozen batch normalization: the statistics are constants."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._batch import (
    batch_moments,
    check_input,
    evaluate,
    standardize,
)
from normexp.norms._batch_running import RunningNorm, move_running, running_statistics, unbiased
from normexp.norms._registry import NORMS, NormCard, StatisticSet, check_dims
from normexp.norms._statistics import by_channel, scale_shift, upcast, zero_invalid

CARD = NormCard(
    formula="y_c = (x_c - running_mean_c) / sqrt(running_var_c + eps) * weight_c + bias_c",
    source="Wu & He, ECCV 2018, section 4.2 (BN*); torchvision.ops.FrozenBatchNorm2d",
    dims=(0, 1, 2),
    statistic_sets={0: (), 1: (), 2: ()},
    is_centring=True,
    divisor=None,
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    is_shift_invariant=False,
    is_scale_invariant=False,
    state=("running_mean", "running_var", "num_batches_tracked"),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value=None,
    takes_mask=True,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.batch_norm with training=False)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class FrozenBatchNorm(RunningNorm):
    """Batch normalization whose statistics are constants, from the start or after a while.

    Args:
        num_features: Channels C.
        dims: Number of position axes: 0, 1 or 2.
        eps: Added to the variance, inside the square root.
        affine: Whether there is a gain and a shift a channel.
        momentum: Weight of the new batch in the running statistics while these move.
        train_affine: Whether gain and shift are parameters; else they are buffers.
        freeze_after_micro_batches: Training forward passes in which the statistics move.
    """

    def __init__(
        self,
        num_features: int,
        *,
        dims: int,
        eps: float,
        affine: bool,
        momentum: float | None,
        train_affine: bool,
        freeze_after_micro_batches: int,
    ) -> None:
        super().__init__(num_features, dims=dims, eps=eps, affine=affine, momentum=momentum)
        self.freeze_after_micro_batches = freeze_after_micro_batches
        self.has_trained_affine = affine and train_affine
        if affine and not train_affine:
            # Buffers, not parameters without requires_grad: a model-wide requires_grad_(True)
            # or a gradient by name would set those free.
            for name in ("weight", "bias"):
                value = getattr(self, name).detach()
                delattr(self, name)
                self.register_buffer(name, value)

    @property
    def statistic_sets(self) -> tuple[StatisticSet, ...]:
        """The sets of the time before the freeze; none where the statistics never move."""
        if self.freeze_after_micro_batches == 0:
            return ()
        return (("batch",),) if self.dims == 0 else (("batch", "position"),)

    def forward(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized input.

        Args:
            x: Features, sequences or images, as ``dims`` says. Half-precision types are computed
                in float32 and cast back at the end.
            mask: For sequences, True where a position is valid; None for all. The output is zero
                elsewhere. While the statistics move they are over the valid positions, and fewer
                than two of these in the whole micro-batch leave the buffers as they are.

        Raises:
            ValueError: If the shapes do not fit, or, in training with statistics that move or
                have moved and without a mask, a channel has a single value.
        """
        check_input(x, self.num_features, self.dims, mask)
        if not self.training or self.freeze_after_micro_batches == 0:
            if self.has_trained_affine:
                return evaluate(self, x, self.dims, mask)
            return self._scale_shift(x, mask)
        assert self.num_batches_tracked is not None
        wide = upcast(x)
        if mask is not None:
            wide = zero_invalid(wide, mask)
        mean, var, count = batch_moments(wide, self.dims, mask)
        # Both branches are computed: reading the counter back would stop the device, and would
        # run neither under torch.vmap nor in one graph.
        is_frozen = self.num_batches_tracked >= self.freeze_after_micro_batches
        running_mean, running_var = running_statistics(self, wide.dtype)
        used_mean = torch.where(is_frozen, running_mean, mean)
        used_var = torch.where(is_frozen, running_var, var)
        y = standardize(
            wide, by_channel(used_mean, self.dims), by_channel(used_var, self.dims), self.eps
        )
        y = scale_shift(y, self.weight, self.bias, self.dims)
        is_counted = (count > 1) & ~is_frozen
        move_running(self, mean[None], unbiased(var, count)[None], is_counted[None])
        return (y if mask is None else zero_invalid(y, mask)).to(x.dtype)

    def _scale_shift(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the input times one constant a channel plus another.

        Nothing in them is learned, so there is no sum over the input in the backward pass, which
        torch's kernel would compute.
        """
        wide = upcast(x) if mask is None else zero_invalid(upcast(x), mask)
        mean, var = running_statistics(self, wide.dtype)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight.to(wide.dtype)
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias.to(wide.dtype)
        y = wide * by_channel(scale, self.dims) + by_channel(shift, self.dims)
        return (y if mask is None else zero_invalid(y, mask)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options as torch's layers print them."""
        return (
            f"{super().extra_repr()}, train_affine={self.has_trained_affine}, "
            f"freeze_after_micro_batches={self.freeze_after_micro_batches}"
        )


@NORMS.register("frozen_batch_norm", CARD)
def build_frozen_batch_norm(
    num_features: int,
    *,
    dims: int,
    eps: float = 1e-5,
    affine: bool = True,
    momentum: float | None = 0.1,
    train_affine: bool = True,
    freeze_after_micro_batches: int = 0,
) -> nn.Module:
    """Build ``y_c = (x_c - running_mean_c) / sqrt(running_var_c + eps) * weight_c + bias_c``.

    The running statistics are constants, in training and in evaluation: mean 0 and variance 1
    until the state of a batch_norm is loaded, whose names it shares. The gradient takes them as
    constants too. There is no statistic set.

    With ``freeze_after_micro_batches`` T above 0 it is batch_norm for the first T training forward
    passes, statistic sets and running statistics included, and frozen from then on.
    ``num_batches_tracked`` counts them, so that a resumed training goes on counting, and so that
    the count that comes with a loaded state counts as well.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, which take a mask of
            valid positions, 0 for features ``[N, C]``.
        eps: Added to the variance, inside the square root. Has to be that of the layer whose state
            is loaded.
        affine: Whether there is a gain (starts at 1) and a shift (starts at 0) a channel.
        momentum: Weight of the new batch in the running statistics while these move. None
            averages all batches with equal weight.
        train_affine: Whether gain and shift are learned. Else they are constants (buffers of the
            same names), which nothing sets free.
        freeze_after_micro_batches: Training forward passes before the statistics freeze.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is none of these or ``freeze_after_micro_batches`` is negative.

    Source:
        Wu & He, "Group Normalization", ECCV 2018, section 4.2, where it is called BN*.
    """
    check_dims("frozen_batch_norm", dims, supported=CARD.dims, instead="dims 0, 1 or 2")
    if freeze_after_micro_batches < 0:
        raise UserError(
            "norm.params.freeze_after_micro_batches",
            freeze_after_micro_batches,
            "a whole number of 0 or more is needed",
        )
    return FrozenBatchNorm(
        num_features,
        dims=dims,
        eps=eps,
        affine=affine,
        momentum=momentum,
        train_affine=train_affine,
        freeze_after_micro_batches=freeze_after_micro_batches,
    )
