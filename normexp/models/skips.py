"""What is learned of a skip: factors and shifts at the ends of residual branches.

They are modules of their own, so that a parameter's owner tells its role. Scalars may go on any
input; one number a channel needs to know where channels stand.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class SkipParameter(nn.Module):
    """A module whose parameters have the role "skip"; they keep what they are built with."""


class SkipGain(SkipParameter):
    """Multiplies with a learned number, or one a channel.

    Args:
        init: What it starts at.
        num_features: Channels C, for a number a channel; None for a scalar.
        dims: Number of position axes: 2 for images ``[N, C, H, W]``; otherwise channels are last.
    """

    def __init__(self, init: float, *, num_features: int | None = None, dims: int = 2) -> None:
        super().__init__()
        shape = () if num_features is None else (num_features,)
        self.weight = nn.Parameter(torch.full(shape, float(init)))
        self.is_spread = num_features is not None and dims == 2

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the input times the number, in the input's type."""
        # A scalar would leave the type as it is; under autocast one number a channel would not.
        return (x * (self.weight[:, None, None] if self.is_spread else self.weight)).to(x.dtype)


class SkipShift(SkipParameter):
    """Adds a learned scalar that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the input plus the scalar, in the input's type."""
        return x + self.bias
