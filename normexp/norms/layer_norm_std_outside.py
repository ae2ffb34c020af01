"""Layer normalization as in some tutorials: unbiased deviation, eps outside of the root.

Kept to show what the two small departures from layer norm do; nobody needs it otherwise.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import channel_axis, scale_shift, upcast

CARD = NormCard(
    formula="y_c = (x_c - mean) / (std + eps) * weight_c + bias_c over C at each position, std "
    "the unbiased one",
    source="as in some tutorials, such as The Annotated Transformer (Rush, 2018), LayerNorm",
    dims=(0, 1, 2),
    statistic_sets={0: (("channel",),), 1: (("channel",),), 2: (("channel",),)},
    is_centring=True,
    divisor="M-1",
    eps_place="outside_sqrt",
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=(),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="raises",
    takes_mask=False,
    keeps_channels_last=True,
    kernel="own: torch.std_mean and elementwise operations",
    kernel_cpu="composite",
    kernel_cuda="composite",
)


class LayerNormStdOutside(nn.Module):
    """Centres every position over its channels and divides by its unbiased deviation plus eps.

    Args:
        num_features: Channels C, 2 or more.
        dims: Number of position axes of the input.
        eps: Added to the deviation.
        affine: Whether there are gain and shift.
    """

    def __init__(self, num_features: int, *, dims: int, eps: float, affine: bool) -> None:
        super().__init__()
        self.num_features = num_features
        self.dims = dims
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the normalized input, rounded to its type at the end."""
        wide = upcast(x)
        # At a constant row torch takes 0 for the derivative of its std, where var().sqrt() would
        # hand on infinity times zero. That is exact: what it is multiplied by is zero there.
        std, mean = torch.std_mean(wide, channel_axis(self.dims), correction=1, keepdim=True)
        y = (wide - mean) / (std + self.eps)
        y = scale_shift(y, self.weight, self.bias, self.dims)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"


@NORMS.register("layer_norm_std_outside", CARD)
def build_layer_norm_std_outside(
    num_features: int, *, dims: int, eps: float = 1e-5, affine: bool = True
) -> nn.Module:
    """Build ``y_c = (x_c - mean) / (std + eps) * weight_c + bias_c`` at each position.

    mean and std are over the C channels of one position of one sample, std with divisor C-1:
    statistic sets of C elements. Where std is well above eps this is layer norm times
    sqrt((C-1)/C). Where it is below, a row is divided by about eps, where layer norm divides by
    sqrt(eps): noise comes out up to 1/sqrt(eps) times larger than layer norm's.

    Args:
        num_features: Channels C, 2 or more.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``, 2 for images
            ``[N, C, H, W]``.
        eps: Added to the deviation, outside of the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.

    Returns:
        A module that keeps the input's shape. For half-precision inputs everything is in
        float32, and the result is rounded once.

    Raises:
        UserError: If ``dims`` is none of 0, 1 and 2, or there is one channel, whose unbiased
            deviation is 0/0.

    Source:
        A form met in tutorials; no paper defines it. Compare Ba, Kiros & Hinton,
        arXiv:1607.06450, equation 3.
    """
    check_dims(
        "layer_norm_std_outside", dims, supported=CARD.dims, instead="features, sequences or images"
    )
    if num_features < 2:
        expected = "the unbiased deviation of 1 channel is undefined; 2 or more are needed"
        raise UserError("norm", "layer_norm_std_outside", expected)
    return LayerNormStdOutside(num_features, dims=dims, eps=eps, affine=affine)
