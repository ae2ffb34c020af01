"""Batch renormalization: batch normalization corrected towards the running statistics."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._batch import (
    batch_moments,
    channels_second,
    check_input,
    count_elements,
    evaluate,
    normalize_chunks,
    standardize,
)
from normexp.norms._batch_running import RunningNorm, move_running, running_statistics, unbiased
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import scale_shift, upcast, zero_invalid

CARD = NormCard(
    formula="y_c = ((x_c - mean) / sqrt(var + eps) * r_c + d_c) * weight_c + bias_c, "
    "r and d from the running statistics",
    source="Ioffe, NeurIPS 2017, Algorithm 1",
    dims=(0, 1, 2),
    statistic_sets={
        0: (("batch",),),
        1: (("batch", "position"),),
        2: (("batch", "position"),),
    },
    is_centring=True,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=True,
    mixes_positions=True,
    is_same_in_eval=False,
    # During the warm-up it is both; later r and d hold on to the running statistics.
    is_shift_invariant=False,
    is_scale_invariant=False,
    state=("running_mean", "running_var", "num_batches_tracked"),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="raises",
    takes_mask=True,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.batch_norm) and correction; composite with a mask",
    kernel_cpu="composite",
    kernel_cuda="composite",
    has_exact_gradient=False,
)


class BatchRenorm(RunningNorm):
    """Batch normalization with a bounded correction towards the running statistics.

    Args:
        num_features: Channels C.
        dims: Number of position axes: 0, 1 or 2.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain and a shift a channel.
        momentum: Weight of the new batch in the running statistics; None averages all batches.
        r_max: Largest r, and inverse of the smallest, at the end of the schedule.
        d_max: Largest absolute d at the end of the schedule.
        warmup_micro_batches: Training forward passes without a correction.
        r_ramp_micro_batches: Further ones over which the bound of r grows.
        d_ramp_micro_batches: Further ones over which the bound of d grows.
    """

    def __init__(
        self,
        num_features: int,
        *,
        dims: int,
        eps: float,
        affine: bool,
        momentum: float | None,
        r_max: float,
        d_max: float,
        warmup_micro_batches: int,
        r_ramp_micro_batches: int,
        d_ramp_micro_batches: int,
    ) -> None:
        super().__init__(num_features, dims=dims, eps=eps, affine=affine, momentum=momentum)
        self.r_max = r_max
        self.d_max = d_max
        self.warmup_micro_batches = warmup_micro_batches
        self.r_ramp_micro_batches = r_ramp_micro_batches
        self.d_ramp_micro_batches = d_ramp_micro_batches

    def forward(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized input.

        Args:
            x: Features, sequences or images, as ``dims`` says. Half-precision types are computed
                in float32, gain and shift included, and cast back at the end.
            mask: For sequences, True where a position is valid; None for all. Statistics are over
                the valid positions, and the output is zero elsewhere. Fewer than two valid
                positions in the whole micro-batch leave the buffers as they are.

        Raises:
            ValueError: If the shapes do not fit, or, without a mask, a channel has a single
                value in training.
        """
        check_input(x, self.num_features, self.dims, mask)
        if not self.training:
            return evaluate(self, x, self.dims, mask)
        wide = upcast(x) if mask is None else zero_invalid(upcast(x), mask)
        if mask is None:
            y, mean, var1 = self._normalize(wide)
            num_elements = count_elements(x, self.dims)
            var, is_counted = var1 * ((num_elements - 1) / num_elements), None
        else:
            mean, var, count = batch_moments(wide, self.dims, mask)
            y = standardize(wide, mean, var, self.eps)
            var1, is_counted = unbiased(var, count), (count > 1)[None]
        r, d = self.compute_correction(mean, var)
        move_running(self, mean[None], var1[None], is_counted)
        y = scale_shift(scale_shift(y, r, d, self.dims), self.weight, self.bias, self.dims)
        return (y if mask is None else zero_invalid(y, mask)).to(x.dtype)

    def _normalize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalized input, mean and unbiased variance, all by torch's kernel."""
        assert self.running_mean is not None
        y, mean, var = normalize_chunks(
            channels_second(x, self.dims),
            self.running_mean.to(x.dtype),
            None,
            None,
            num_chunks=1,
            eps=self.eps,
        )
        return y.reshape(x.shape), mean[0], var[0]

    def compute_correction(
        self, mean: Float[Tensor, " c"], var: Float[Tensor, " c"]
    ) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
        """Return r and d for a batch, from the running statistics before it; no gradient.

        Args:
            mean: The batch's mean.
            var: Its biased variance.
        """
        assert self.num_batches_tracked is not None
        mean, var = mean.detach(), var.detach()
        running_mean, running_var = running_statistics(self, var.dtype)
        running_std = torch.sqrt(running_var + self.eps)
        done = (self.num_batches_tracked - self.warmup_micro_batches).to(var.dtype)
        r_max = 1.0 + (self.r_max - 1.0) * _ramp(done, self.r_ramp_micro_batches)
        d_max = self.d_max * _ramp(done, self.d_ramp_micro_batches)
        r = torch.sqrt(var + self.eps) / running_std
        d = (mean - running_mean) / running_std
        return r.clamp(1.0 / r_max, r_max), d.clamp(-d_max, d_max)

    def extra_repr(self) -> str:
        """Return the options as torch's layers print them."""
        return (
            f"{super().extra_repr()}, r_max={self.r_max}, d_max={self.d_max}, "
            f"warmup_micro_batches={self.warmup_micro_batches}, "
            f"r_ramp_micro_batches={self.r_ramp_micro_batches}, "
            f"d_ramp_micro_batches={self.d_ramp_micro_batches}"
        )


def _ramp(done: Tensor, length: int) -> Tensor:
    """Return which part of a ramp of that length is done; all of one of length 0 from its start."""
    return (done / length).clamp(0.0, 1.0) if length else (done >= 0.0).to(done.dtype)


@NORMS.register("batch_renorm", CARD)
def build_batch_renorm(
    num_features: int,
    *,
    dims: int,
    eps: float = 1e-3,
    affine: bool = True,
    momentum: float | None = 0.01,
    r_max: float = 3.0,
    d_max: float = 5.0,
    warmup_micro_batches: int = 5000,
    r_ramp_micro_batches: int = 35000,
    d_ramp_micro_batches: int = 20000,
) -> nn.Module:
    """Build ``y_c = ((x_c - mean) / sqrt(var + eps) * r_c + d_c) * weight_c + bias_c``.

    In training mean and var (biased) are over the micro-batch and all positions: statistic sets
    of N*H*W (images), N*L (sequences) or N (features) elements. With running statistics as they
    are before this batch moves them,
    ``r = clip(sqrt(var + eps) / sqrt(running_var + eps), 1 / R, R)`` and
    ``d = clip((mean - running_mean) / sqrt(running_var + eps), -D, D)``,
    and both are constants to the backward pass. Where neither is clipped the output is the one of
    evaluation, ``(x - running_mean) / sqrt(running_var + eps)``.

    The bounds follow the paper, counted in training forward passes by ``num_batches_tracked``:
    R = 1 and D = 0 (batch_norm) for the first 5000; then linearly to R = 3 at 40,000 and to
    D = 5 at 25,000. A short training that leaves these options alone is one of batch_norm with
    another momentum and eps.

    The buffers move as those of batch_norm do: ``running_var`` averages unbiased variances, while
    the paper averages ``sqrt(var + eps)`` itself.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, which take a mask of
            valid positions, 0 for features ``[N, C]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.
        momentum: Weight of the new batch in the running statistics. None averages all batches
            with equal weight.
        r_max: R at the end of the schedule, 1 or more.
        d_max: D at the end of the schedule, 0 or more.
        warmup_micro_batches: Training forward passes with R = 1 and D = 0.
        r_ramp_micro_batches: Further ones until R = r_max; 0 for at once.
        d_ramp_micro_batches: Further ones until D = d_max; 0 for at once.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is none of these, or a bound or a number is out of range.

    Source:
        Ioffe, "Batch Renormalization", NeurIPS 2017, Algorithm 1 and section 4.
    """
    check_dims("batch_renorm", dims, supported=CARD.dims, instead="dims 0, 1 or 2")
    if r_max < 1.0:
        raise UserError("norm.params.r_max", r_max, "1 or more is needed")
    if d_max < 0.0:
        raise UserError("norm.params.d_max", d_max, "0 or more is needed")
    numbers = {
        "warmup_micro_batches": warmup_micro_batches,
        "r_ramp_micro_batches": r_ramp_micro_batches,
        "d_ramp_micro_batches": d_ramp_micro_batches,
    }
    for name, number in numbers.items():
        if number < 0:
            raise UserError(f"norm.params.{name}", number, "a whole number of 0 or more is needed")
    return BatchRenorm(
        num_features,
        dims=dims,
        eps=eps,
        affine=affine,
        momentum=momentum,
        r_max=r_max,
        d_max=d_max,
        **numbers,
    )
