"""Division by the root mean square over the last axis, with a gain."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def rms_normalize(
    x: Float[Tensor, "*batch c"], weight: Float[Tensor, " c"] | None, eps: float
) -> Float[Tensor, "*batch c"]:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    Args:
        x: Any input; statistics are in float32 for half-precision types.
        weight: One gain a channel; None for none.
        eps: Added to the mean of squares, inside the square root.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
