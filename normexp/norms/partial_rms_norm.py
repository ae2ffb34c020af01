"""Root mean square normalization with the root mean square of the first channels alone (pRMSNorm).

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import channel_axis, scale_shift, upcast

CARD = NormCard(
    formula="y_c = x_c / sqrt(mean(x^2) + eps) * weight_c, the mean over the first "
    "int(C*fraction) channels of each position",
    source="Zhang & Sennrich, NeurIPS 2019, partial RMSNorm (pRMSNorm)",
    dims=(0, 1, 2),
    statistic_sets={0: (("part",),), 1: (("part",),), 2: (("part",),)},
    is_centring=False,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    is_shift_invariant=False,
    is_scale_invariant=True,
    state=(),
    parameters={"weight": ("C",)},
    # The first channel comes out as its sign, the others as their ratio to it.
    single_value="finite",
    takes_mask=False,
    keeps_channels_last=True,
    kernel="own: a reduction over the part and elementwise operations",
    kernel_cpu="composite",
    kernel_cuda="composite",
)


class PartialRmsNorm(nn.Module):
    """Divides all channels of a position by the root mean square of the first few.

    Args:
        num_features: Channels C.
        dims: Number of position axes of the input.
        part_size: Channels that the root mean square is over.
        eps: Added to the mean of squares.
        affine: Whether there is a gain.
    """

    def __init__(
        self, num_features: int, *, dims: int, part_size: int, eps: float, affine: bool
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.dims = dims
        self.part_size = part_size
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the normalized input, rounded to its type at the end."""
        axis = channel_axis(self.dims)
        wide = upcast(x)
        mean_square = wide.narrow(axis, 0, self.part_size).square().mean(axis, keepdim=True)
        y = wide * torch.rsqrt(mean_square + self.eps)
        y = scale_shift(y, self.weight, None, self.dims)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return (
            f"{self.num_features}, part_size={self.part_size}, eps={self.eps}, "
            f"affine={self.weight is not None}"
        )


@NORMS.register("partial_rms_norm", CARD)
def build_partial_rms_norm(
    num_features: int,
    *,
    dims: int,
    fraction: float = 0.125,
    eps: float = 1e-6,
    affine: bool = True,
) -> nn.Module:
    """Build ``y_c = x_c / sqrt(mean(x^2) + eps) * weight_c``, the mean over the first channels.

    The mean of squares is over the first int(C*fraction) channels of one position of one sample:
    statistic sets of so many elements. With ``fraction=1`` it is rms_norm. An output depends on
    the first channels and on its own; where the first are near zero and the others are not, the
    others are amplified, up to 1/sqrt(eps).

    Args:
        num_features: Channels C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``, 2 for images
            ``[N, C, H, W]``.
        fraction: Part of the channels that the root mean square is over, in (0, 1]; the paper
            has 0.125 for CIFAR-10 and 0.0625 for translation.
        eps: Added to the mean of squares, inside the square root.
        affine: Whether to learn a gain (starts at 1) a channel. There is no shift.

    Returns:
        A module that keeps the input's shape. For half-precision inputs everything is in
        float32, and the result is rounded once.

    Raises:
        UserError: If ``dims`` is none of 0, 1 and 2, ``fraction`` is outside of (0, 1], or it
            leaves no channel.

    Source:
        Zhang & Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, pRMSNorm.
    """
    check_dims(
        "partial_rms_norm", dims, supported=CARD.dims, instead="features, sequences or images"
    )
    key = "norm.params.fraction"
    if not 0 < fraction <= 1:
        raise UserError(key, fraction, "a number above 0 and up to 1 is needed")
    part_size = int(num_features * fraction)
    if part_size < 1:
        raise UserError(
            key,
            fraction,
            f"leaves none of the {num_features} channels of a layer; "
            f"the smallest fraction that leaves one is {_smallest_fraction(num_features)}",
        )
    return PartialRmsNorm(num_features, dims=dims, part_size=part_size, eps=eps, affine=affine)


def _smallest_fraction(num_features: int) -> float:
    """Return the smallest number whose product with the channels is not below 1."""
    fraction = 1.0 / num_features
    # 49 * (1 / 49) is below 1 in floating point.
    return fraction if num_features * fraction >= 1 else math.nextafter(fraction, 1.0)
