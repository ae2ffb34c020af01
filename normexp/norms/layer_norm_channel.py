"""Layer normalization of every position over its channels, as in ConvNeXt.

Legend: N samples, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c over C at each position",
    source="Liu et al., CVPR 2022 (ConvNeXt), section 2.6 (torch.nn.functional.layer_norm)",
    dims=(0, 1, 2),
    statistic_sets={0: (("channel",),), 1: (("channel",),), 2: (("channel",),)},
    is_centring=True,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=(),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="zero",
    takes_mask=False,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.layer_norm on the permuted tensor; the output of images "
    "has channels-last strides)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class LayerNormChannel(nn.Module):
    """Layer norm of every pixel over its channels, ``[N, C, H, W]``."""

    def __init__(self, num_features: int, *, eps: float, affine: bool) -> None:
        super().__init__()
        self.shape = (num_features,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """Return the normalized images."""
        pixels = x.permute(0, 2, 3, 1)
        y = F.layer_norm(pixels, self.shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return f"{self.shape[0]}, eps={self.eps}, affine={self.weight is not None}"


@NORMS.register("layer_norm_channel", CARD)
def build_layer_norm_channel(
    num_features: int, *, dims: int, eps: float = 1e-6, affine: bool = True
) -> nn.Module:
    """Build ``y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c`` at each position.

    mean and var (biased) are over the C channels of one position of one sample: statistic sets
    of C elements. On features and sequences it is layer_norm with another eps.

    Args:
        num_features: Channels C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``, 2 for images
            ``[N, C, H, W]``.
        eps: Added to the variance, inside the square root; ConvNeXt's default.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.

    Returns:
        A module that keeps the input's shape. For half-precision inputs the statistics, gain and
        shift are applied in float32 within the kernel, and the result is rounded once.

    Raises:
        UserError: If ``dims`` is none of 0, 1 and 2.

    Source:
        Liu et al., "A ConvNet for the 2020s", CVPR 2022, section 2.6.
    """
    check_dims(
        "layer_norm_channel", dims, supported=CARD.dims, instead="features, sequences or images"
    )
    if dims != 2:
        return nn.LayerNorm(num_features, eps=eps, elementwise_affine=affine)
    return LayerNormChannel(num_features, eps=eps, affine=affine)
