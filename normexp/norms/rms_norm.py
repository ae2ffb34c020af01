"""Root mean square normalization over the channels: a gain, no mean, no shift.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._rms import rms_normalize, rms_normalize_images

CARD = NormCard(
    formula="y_c = x_c / sqrt(mean(x^2) + eps) * weight_c over C at each position",
    source="Zhang & Sennrich, NeurIPS 2019, equation 4 (torch.nn.RMSNorm)",
    dims=(0, 1, 2),
    statistic_sets={0: (("channel",),), 1: (("channel",),), 2: (("channel",),)},
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
    kernel="native on CUDA (torch.nn.functional.rms_norm); on the CPU composite, backward through "
    "layer norm's fused kernel; images are permuted for it and come out with channels-last strides",
    kernel_cpu="composite",
    kernel_cuda="fused",
)


class RMSNorm(nn.RMSNorm):
    """torch's layer, with a stated eps and for images as well."""

    eps: float

    def __init__(self, num_features: int, *, dims: int, eps: float, affine: bool) -> None:
        super().__init__(num_features, eps=eps, elementwise_affine=affine)
        self.dims = dims

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the normalized input, each position over its channels."""
        if self.dims != 2:
            return rms_normalize(x, self.weight, self.eps)
        return rms_normalize_images(x, self.weight, self.eps)


@NORMS.register("rms_norm", CARD)
def build_rms_norm(
    num_features: int, *, dims: int, eps: float = 1e-6, affine: bool = True
) -> nn.Module:
    """Build ``y_c = x_c / sqrt(mean(x^2) + eps) * weight_c`` at each position.

    The mean of squares is over the C channels of one position of one sample: statistic sets of
    C elements. Multiplying the input by a positive number changes nothing but for eps; adding
    one does.

    Args:
        num_features: Channels C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``, 2 for images
            ``[N, C, H, W]``.
        eps: Added to the mean of squares, inside the square root. Stated, because torch's own
            default is the machine epsilon of the type and changes with the precision.
        affine: Whether to learn a gain (starts at 1) a channel. There is no shift.

    Returns:
        A module that keeps the input's shape, with the state-dict keys of ``torch.nn.RMSNorm``.
        For half-precision inputs the mean of squares is in float32, whose squares do not
        overflow.

    Raises:
        UserError: If ``dims`` is none of 0, 1 and 2.

    Source:
        Zhang & Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, equation 4.
    """
    check_dims("rms_norm", dims, supported=CARD.dims, instead="features, sequences or images")
    return RMSNorm(num_features, dims=dims, eps=eps, affine=affine)
