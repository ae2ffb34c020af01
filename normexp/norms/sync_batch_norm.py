"""Synchronized batch normalization: batch normalization over the micro-batches of all processes."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normexp.norms._batch import (
    channels_second,
    check_input,
    count_elements,
    evaluate,
    normalize_masked,
    standardize,
)
from normexp.norms._batch_running import move_running, unbiased
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import by_channel, channel_axis, scale_shift, upcast, zero_invalid

CARD = NormCard(
    formula="y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c",
    source="Ioffe & Szegedy, ICML 2015, Algorithm 1, over all processes (torch.nn.SyncBatchNorm)",
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
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=("running_mean", "running_var", "num_batches_tracked"),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="raises",
    takes_mask=True,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.batch_norm; with several processes torch.nn.SyncBatchNorm "
    "on CUDA, composite on the CPU); composite with a mask",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's layer, also for sequences, for masks and for processes on the CPU.

    torch's own class raises on the CPU as soon as there is a process group.

    Args:
        num_features: Channels C.
        dims: Number of position axes: 0, 1 or 2.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain and a shift a channel.
        momentum: Weight of the new batch in the running statistics; None averages all batches.
    """

    def __init__(
        self, num_features: int, *, dims: int, eps: float, affine: bool, momentum: float | None
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.dims = dims

    @property
    def world_size(self) -> int:
        """Number of processes that share statistics; 1 without a process group."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self.process_group)

    def forward(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized input.

        Args:
            x: Features, sequences or images, as ``dims`` says; the processes may have different
                numbers of samples. Half-precision types are computed in float32 and cast back at
                the end.
            mask: For sequences, True where a position is valid; None for all. Every process has
                one or none has. Statistics are over the valid positions, and the output is zero
                elsewhere. Fewer than two valid positions leave the buffers as they are.

        Raises:
            ValueError: If the shapes do not fit, or, with one process and without a mask, a
                channel has a single value in training.
        """
        check_input(x, self.num_features, self.dims, mask)
        if not self.training:
            return evaluate(self, x, self.dims, mask)
        if self.world_size == 1:
            if mask is not None:
                return normalize_masked(self, x, mask)
            # Past torch's class, which refuses the CPU also in a group of one.
            return _BatchNorm.forward(self, channels_second(x, self.dims)).reshape(x.shape)
        if mask is None and x.is_cuda:
            return super().forward(channels_second(x, self.dims)).reshape(x.shape)
        return self._synchronize(x, mask)

    def _synchronize(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the input normalized over all processes, with own reductions."""
        wide = upcast(x)
        axes = tuple(axis for axis in range(x.ndim) if axis != channel_axis(self.dims))
        if mask is None:
            num_elements = wide.new_full((1,), count_elements(x, self.dims))
        else:
            wide = zero_invalid(wide, mask)
            num_elements = mask.sum().to(wide.dtype)[None]
        # Two passes, as everywhere: squares of deviations from the mean of all processes.
        totals = self._all_reduce(torch.cat([wide.sum(axes), num_elements]))
        count = totals[-1:]
        safe = count.clamp(min=1.0)
        mean = totals[:-1] / safe
        centred = wide - by_channel(mean, self.dims)
        if mask is not None:
            centred = zero_invalid(centred, mask)
        var = self._all_reduce(centred.square().sum(axes)) / safe
        y = standardize(wide, by_channel(mean, self.dims), by_channel(var, self.dims), self.eps)
        y = scale_shift(y, self.weight, self.bias, self.dims)
        move_running(self, mean[None], unbiased(var, count)[None], (count > 1)[None])
        return (y if mask is None else zero_invalid(y, mask)).to(x.dtype)

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all processes; its gradient is summed over them too."""
        total: Tensor = _AllReduce.apply(x, self.process_group)
        return total

    def extra_repr(self) -> str:
        """Return the options as torch's layers print them, and what is shared with whom."""
        size = self.world_size
        shared = "batch_norm: a single process" if size == 1 else f"over {size} processes"
        options = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{options}, dims={self.dims}, {shared}"


class _AllReduce(torch.autograd.Function):
    """Sum over the processes, as a step that can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.detach().clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # The loss is the sum of the processes' losses, each of which depends on the total.
        total = gradients[0].clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


@NORMS.register("sync_batch_norm", CARD)
def build_sync_batch_norm(
    num_features: int,
    *,
    dims: int,
    eps: float = 1e-5,
    affine: bool = True,
    momentum: float | None = 0.1,
) -> nn.Module:
    """Build ``y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c``.

    In training mean and var (biased) are over the micro-batches of all processes and all
    positions: statistic sets of sum(N)*H*W (images), sum(N)*L (sequences) or sum(N) (features)
    elements, with sum(N) over the processes, which may have different numbers of samples. So it
    is batch_norm of their micro-batches joined together, gradients and buffers included, where
    the loss is the sum of the processes' losses. Without a process group, or with one process, it
    is batch_norm exactly, and its printed form says so. In evaluation nothing is exchanged.

    On CUDA torch's own class does this. On the CPU, and with a mask, the sums are exchanged here,
    twice a forward and twice a backward pass; every process has to make the same passes. With
    several processes it does not run under torch.vmap.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, which take a mask of
            valid positions, 0 for features ``[N, C]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.
        momentum: Weight of the new batch in the running statistics (torch's sense; decay is one
            minus it). None averages all batches with equal weight, with the limits that
            batch_norm has then.

    Returns:
        A module that keeps the input's shape, with ``world_size``.

    Raises:
        UserError: If ``dims`` is none of these.

    Source:
        Ioffe & Szegedy, "Batch Normalization", ICML 2015, Algorithms 1 and 2.
    """
    check_dims("sync_batch_norm", dims, supported=CARD.dims, instead="dims 0, 1 or 2")
    return SyncBatchNorm(num_features, dims=dims, eps=eps, affine=affine, momentum=momentum)
