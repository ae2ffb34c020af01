"""Running statistics of the batch normalizations, with torch's names.

Legend: C channels; k batches or chunks of a batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


class RunningNorm(_BatchNorm):
    """Parameters and buffers of torch's batch normalization, and the number of position axes.

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

    def extra_repr(self) -> str:
        """Return the options as torch's layers print them."""
        options = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{options}, dims={self.dims}"


def unbiased(var: Float[Tensor, "*k c"], count: Float[Tensor, "*k 1"]) -> Float[Tensor, "*k c"]:
    """Return the unbiased of biased variances over so many elements."""
    return var * (count / (count - 1.0).clamp(min=1.0))


def running_statistics(
    layer: _BatchNorm, dtype: torch.dtype
) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """Return the layer's running mean and variance in the type of the computation."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean.to(dtype), layer.running_var.to(dtype)


def move_running(
    layer: _BatchNorm,
    mean: Float[Tensor, "k c"],
    var: Float[Tensor, "k c"],
    is_counted: Bool[Tensor, "k 1"] | None = None,
) -> None:
    """Move a layer's buffers by the statistics of k batches, as if these came one by one.

    ``running = (1 - r_j) * running + r_j * batch_j`` for j = 1..k, in closed form:
    ``running * prod_i(1 - r_i) + sum_j batch_j * r_j * prod_{i>j}(1 - r_i)``. The rate r_j is the
    momentum, or one over the number of batches so far where that is None, as in torch.

    Args:
        layer: Has the momentum and the buffers; changed in place.
        mean: Means of the batches, the first first.
        var: Their unbiased variances.
        is_counted: False for a batch that is passed over; None for none of them.
    """
    if is_counted is None:
        is_counted = torch.ones_like(mean[:, :1], dtype=torch.bool)
    running_mean, running_var = layer.running_mean, layer.running_var
    number = layer.num_batches_tracked
    assert running_mean is not None
    assert running_var is not None
    assert number is not None
    dtype = running_mean.dtype
    if layer.momentum is None:
        numbers = number + is_counted.long().cumsum(0)
        rate = is_counted.to(dtype) / numbers.clamp(min=1).to(dtype)
    else:
        rate = is_counted.to(dtype) * layer.momentum
    # What is left of the start after all, and of each batch after those that follow it.
    left = (1.0 - rate).flip(0).cumprod(0).flip(0)
    weights = rate * torch.cat([left[1:], torch.ones_like(left[:1])])
    for running, statistic in ((running_mean, mean), (running_var, var)):
        moved = (weights * statistic.detach().to(dtype)).sum(0)
        running.copy_(running * left[0] + moved)
    number.add_(is_counted.sum())
