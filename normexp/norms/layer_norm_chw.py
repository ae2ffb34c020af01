"""Layer normalization of a whole sample: one mean and variance over all channels and positions.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import masked_mean_var, upcast, zero_invalid

CARD = NormCard(
    formula="y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c over C and all positions",
    source="Wu & He, ECCV 2018, section 3.1 (LN as GN with one group; torch.nn.GroupNorm(1, C))",
    dims=(1, 2),
    statistic_sets={1: (("channel", "position"),), 2: (("channel", "position"),)},
    is_centring=True,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=True,
    is_same_in_eval=True,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=(),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="raises at N=1, else zero",
    takes_mask=True,
    keeps_channels_last=True,
    kernel="native (images: torch.nn.functional.group_norm with one group; sequences: "
    "torch.nn.functional.layer_norm over L, C, composite with a mask)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class SequenceLayerNormChw(nn.GroupNorm):
    """The one-group norm of sequences ``[N, L, C]``, over their valid positions."""

    def forward(
        self, input: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "n l c"]:
        """Return the normalized sequences.

        Args:
            input: Sequences.
            mask: True where a position is valid; None if all are.

        Raises:
            ValueError: If the input is a single number, as torch's group norm does.
        """
        if input.numel() == 1:
            raise ValueError("a single number has no variance; give it more samples or positions")
        if mask is not None:
            return self._normalize_valid(input, mask)
        # Several times faster than group_norm, which wants the channels in front.
        shape = input.shape[1:]
        weight = None if self.weight is None else self.weight.expand(shape)
        bias = None if self.bias is None else self.bias.expand(shape)
        return F.layer_norm(input, shape, weight, bias, self.eps)

    def _normalize_valid(
        self, x: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"]
    ) -> Float[Tensor, "n l c"]:
        """Return the valid positions normalized among themselves, zeros at the others."""
        # Zeros instead of what stands at invalid positions, lest its NaN times a zero gradient
        # reach the statistics on the way back.
        wide = zero_invalid(upcast(x), mask)
        mean, var, _ = masked_mean_var(wide, mask, (1, 2))
        y = (wide - mean) * torch.rsqrt(var + self.eps)
        if self.affine:
            y = y * self.weight + self.bias
        return zero_invalid(y, mask).to(x.dtype)


@NORMS.register("layer_norm_chw", CARD)
def build_layer_norm_chw(
    num_features: int, *, dims: int, eps: float = 1e-5, affine: bool = True
) -> nn.Module:
    """Build ``y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c``.

    mean and var (biased) are over all elements of one sample: statistic sets of C*H*W (images)
    or C*L (sequences) elements, C times the valid positions under a mask. Gain and shift are one
    a channel, as in Wu & He's comparison, so on images this is ``torch.nn.GroupNorm(1, C)``;
    ``torch.nn.LayerNorm((C, H, W))`` has the same statistics but C*H*W gains and shifts.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.

    Returns:
        A module that keeps the input's shape; for sequences ``forward(x, mask=None)``. For
        half-precision inputs statistics, gain and shift are in float32, and the result is
        rounded once.

    Raises:
        UserError: If ``dims`` is neither 1 nor 2.

    Source:
        Wu & He, "Group Normalization", ECCV 2018, equation 5.
    """
    check_dims("layer_norm_chw", dims, supported=CARD.dims, instead="layer_norm")
    layer = nn.GroupNorm if dims == 2 else SequenceLayerNormChw
    return layer(1, num_features, eps=eps, affine=affine)
