"""Division by the Euclidean norm over the channels, with one gain for all (ScaleNorm).

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import channel_axis, upcast

CARD = NormCard(
    formula="y = weight * x / max(||x||_2, eps) over C at each position",
    source="Nguyen & Salazar, IWSLT 2019, ScaleNorm (torch.nn.functional.normalize)",
    dims=(0, 1, 2),
    statistic_sets={0: (("channel",),), 1: (("channel",),), 2: (("channel",),)},
    is_centring=False,
    # The sum of squares is not divided.
    divisor=None,
    eps_place="clamp",
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    is_shift_invariant=False,
    is_scale_invariant=True,
    state=(),
    parameters={"weight": ()},
    single_value="sign",
    takes_mask=False,
    keeps_channels_last=True,
    kernel="native parts (torch.nn.functional.normalize and a product)",
    kernel_cpu="composite",
    kernel_cuda="composite",
)


class ScaleNorm(nn.Module):
    """Puts every position on a sphere around zero; the one gain is its radius.

    Args:
        num_features: Channels C.
        dims: Number of position axes of the input.
        eps: Lower bound of the norm.
        affine: Whether the gain is learned; else it stays at sqrt(C).
    """

    def __init__(self, num_features: int, *, dims: int, eps: float, affine: bool) -> None:
        super().__init__()
        self.num_features = num_features
        self.dims = dims
        self.eps = eps
        self.initial_gain = math.sqrt(num_features)
        self.weight = nn.Parameter(torch.tensor(self.initial_gain)) if affine else None

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the normalized input, rounded to its type at the end."""
        # normalize takes 0 for the derivative of the norm at a zero row, where the square root
        # of a sum of squares would give NaN; below eps the bound is constant anyway.
        y = F.normalize(upcast(x), dim=channel_axis(self.dims), eps=self.eps)
        y = y * (self.initial_gain if self.weight is None else self.weight)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"


@NORMS.register("scale_norm", CARD)
def build_scale_norm(
    num_features: int, *, dims: int, eps: float = 1e-5, affine: bool = True
) -> nn.Module:
    """Build ``y = weight * x / max(||x||_2, eps)`` at each position.

    The Euclidean norm is over the C channels of one position of one sample: statistic sets of C
    elements. It is rms_norm with one gain for all channels, weight/sqrt(C), but for eps. Rows
    shorter than eps are multiplied by weight/eps, so a zero row gives zero.

    Args:
        num_features: Channels C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``, 2 for images
            ``[N, C, H, W]``.
        eps: Lower bound of the norm.
        affine: Whether to learn the gain (one number, starts at sqrt(C)); else it stays there.

    Returns:
        A module that keeps the input's shape. For half-precision inputs everything is in
        float32, and the result is rounded once.

    Raises:
        UserError: If ``dims`` is none of 0, 1 and 2.

    Source:
        Nguyen & Salazar, "Transformers without Tears", IWSLT 2019, ScaleNorm; the bound is that of
        the authors' code.
    """
    check_dims("scale_norm", dims, supported=CARD.dims, instead="features, sequences or images")
    return ScaleNorm(num_features, dims=dims, eps=eps, affine=affine)
