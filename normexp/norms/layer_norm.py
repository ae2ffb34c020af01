"""Layer normalization over the last axis: one mean and variance a sample and position.

Three things are called "layer norm". They are three norms here, told apart by what one statistic
is over:

- ``layer_norm``: the last axis, as torch's layer and every Transformer means it. The features of
  a sample or of a token; in images the last axis is the width, which nobody wants: refused there.
- ``layer_norm_channel``: the channels of one position, as ConvNeXt means it. On features and
  sequences the same as ``layer_norm`` but for eps, on images each pixel by itself.
- ``layer_norm_chw``: all channels and positions of a sample, as Wu & He mean it. The positions
  mix.
"""

from __future__ import annotations

from torch import nn

from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis",
    source="Ba, Kiros & Hinton, arXiv:1607.06450, equation 3 (torch.nn.LayerNorm)",
    dims=(0, 1),
    statistic_sets={0: (("channel",),), 1: (("channel",),)},
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
    keeps_channels_last=False,
    kernel="native (torch.nn.functional.layer_norm)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


@NORMS.register("layer_norm", CARD)
def build_layer_norm(
    num_features: int, *, dims: int, eps: float = 1e-5, affine: bool = True
) -> nn.Module:
    """Build ``y = (x - mean) / sqrt(var + eps) * weight + bias`` over the last axis.

    mean and var (biased) are over the C features of one sample or token: statistic sets of C
    elements. No token sees another, so padding has no influence and no mask is needed. A single
    feature comes out as its shift whatever the input, two as plus and minus one.

    Args:
        num_features: Features C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a feature.

    Returns:
        A module that keeps the input's shape. For half-precision inputs the statistics, gain and
        shift are applied in float32 within the kernel, and the result is rounded once.

    Raises:
        UserError: If ``dims`` is neither 0 nor 1.

    Source:
        Ba, Kiros & Hinton, "Layer Normalization", arXiv:1607.06450, 2016, equation 3.
    """
    check_dims(
        "layer_norm",
        dims,
        supported=CARD.dims,
        instead="layer_norm_channel (each pixel over C) or layer_norm_chw (over C, H, W)",
    )
    return nn.LayerNorm(num_features, eps=eps, elementwise_affine=affine)
