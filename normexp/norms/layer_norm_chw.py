"""Layer normalization of a whole image: one mean and variance a sample, over C, H and W."""

from __future__ import annotations

from torch import nn

from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c over C, H, W",
    source="Wu & He, ECCV 2018, section 3.1 (LN as GN with one group; torch.nn.GroupNorm(1, C))",
    dims=(2,),
    statistic_sets={2: (("channel", "position"),)},
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
    takes_mask=False,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.group_norm with one group)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


@NORMS.register("layer_norm_chw", CARD)
def build_layer_norm_chw(
    num_features: int, *, dims: int, eps: float = 1e-5, affine: bool = True
) -> nn.Module:
    """Build ``y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c`` over C, H and W.

    mean and var (biased) are over all C*H*W elements of one sample. Gain and shift are one a
    channel, as in Wu & He's comparison, so this is ``torch.nn.GroupNorm(1, C)``;
    ``torch.nn.LayerNorm((C, H, W))`` has the same statistics but C*H*W gains and shifts.

    Args:
        num_features: Channels C.
        dims: 2, images ``[N, C, H, W]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is not 2.

    Source:
        Wu & He, "Group Normalization", ECCV 2018, equation 5.
    """
    check_dims("layer_norm_chw", dims, supported=CARD.dims, instead="layer_norm")
    return nn.GroupNorm(1, num_features, eps=eps, affine=affine)
