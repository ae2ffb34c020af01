"""Root mean square normalization over the channels: a gain, no mean, no shift.

Legend: N samples, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y_chw = x_chw / sqrt(mean(x^2)_hw + eps) * weight_c over C",
    source="Zhang & Sennrich, NeurIPS 2019, equation 4 (torch.nn.functional.rms_norm)",
    dims=(0, 2),
    statistic_sets={0: (("channel",),), 2: (("channel",),)},
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
    single_value="sign",
    takes_mask=False,
    keeps_channels_last=True,
    # A hand-written composite was 3 to 10% faster between two convolutions on the CPU (torch
    # 2.14), where the native function is one as well; on CUDA the native one is fused.
    kernel="native (torch.nn.functional.rms_norm on the permuted tensor: fused on CUDA, composite "
    "on CPU; the output of images has channels-last strides)",
    kernel_cpu="composite",
    kernel_cuda="fused",
)


class RmsNormChannel(nn.Module):
    """RMS norm of every pixel over its channels, ``[N, C, H, W]``."""

    def __init__(self, num_features: int, *, eps: float, affine: bool) -> None:
        super().__init__()
        self.shape = (num_features,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """Return the normalized images."""
        y = F.rms_norm(x.permute(0, 2, 3, 1), self.shape, self.weight, self.eps)
        return y.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return f"{self.shape[0]}, eps={self.eps}, affine={self.weight is not None}"


@NORMS.register("rms_norm_channel", CARD)
def build_rms_norm_channel(
    num_features: int, *, dims: int, eps: float = 1e-6, affine: bool = True
) -> nn.Module:
    """Build ``y_chw = x_chw / sqrt(mean(x^2)_hw + eps) * weight_c``.

    The mean of squares is over the C channels of one pixel of one sample, in float32 also for
    half-precision inputs. Features ``[N, C]`` are one pixel.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 0 for features ``[N, C]``.
        eps: Added to the mean of squares, inside the square root. Stated, because torch's own
            default is the machine epsilon of the type and changes with the precision.
        affine: Whether to learn a gain (starts at 1) a channel. There is no shift.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is neither 0 nor 2.

    Source:
        Zhang & Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, equation 4.
    """
    check_dims("rms_norm_channel", dims, supported=CARD.dims, instead="images or features")
    if dims == 0:
        return nn.RMSNorm(num_features, eps=eps, elementwise_affine=affine)
    return RmsNormChannel(num_features, eps=eps, affine=affine)
