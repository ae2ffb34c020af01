"""Adaptive instance normalization: gain and shift come from a condition.

Legend: N samples, L positions of a sequence, C channels, H, W height and width, Z features of
the condition.
"""

from __future__ import annotations

from torch import nn

from normexp.norms._adaptive import MaskedAdaptiveNorm
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms.instance_norm import build_instance_norm

CARD = NormCard(
    formula="y_nc = (1 + scale_c(z_n)) * (x_nc - mean_nc) / sqrt(var_nc + eps) + shift_c(z_n)",
    source="after Huang & Belongie, ICCV 2017, equation 8 (torch.nn.InstanceNorm2d, "
    "InstanceNorm1d and torch.nn.Linear)",
    dims=(1, 2),
    statistic_sets={1: (("position",),), 2: (("position",),)},
    is_centring=True,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=True,
    is_same_in_eval=True,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=(),
    parameters={"projection.weight": ("2C", "Z"), "projection.bias": ("2C",)},
    single_value="raises",
    takes_mask=True,
    keeps_channels_last=False,
    kernel="native (torch.nn.functional.instance_norm), then gain and shift as a composite",
    kernel_cpu="composite",
    kernel_cuda="composite",
    takes_condition=True,
)


@NORMS.register("adaptive_instance_norm", CARD)
def build_adaptive_instance_norm(
    num_features: int,
    *,
    dims: int,
    condition_features: int = 16,
    eps: float = 1e-5,
) -> nn.Module:
    """Build ``y_nc = (1 + scale_c(z_n)) * (x_nc - mean_nc) / sqrt(var_nc + eps) + shift_c(z_n)``.

    mean and var (biased) are those of instance_norm, with its statistic sets and its mask. scale
    and shift are one linear layer of the condition z that starts at zero, so a fresh layer is
    instance_norm without gain and shift. Huang & Belongie learn nothing here: their gain and shift
    are the standard deviation and mean of a style image's features. A learned map of a
    condition in their place is what StyleGAN calls by this name.

    A condition goes in with every input, ``forward(x, condition, mask=None)`` with a condition
    ``[N, Z]``: for models of your own.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``.
        condition_features: Features Z of the condition.
        eps: Added to the variance, inside the square root.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is none of these, or ``condition_features`` is below 1.

    Source:
        Huang & Belongie, "Arbitrary Style Transfer in Real-time with Adaptive Instance
        Normalization", ICCV 2017, equation 8; Karras, Laine & Aila, "A Style-Based Generator
        Architecture for Generative Adversarial Networks", CVPR 2019, equation 1.
    """
    check_dims("adaptive_instance_norm", dims, supported=CARD.dims, instead="adaptive_layer_norm")
    norm = build_instance_norm(num_features, dims=dims, eps=eps, affine=False)
    return MaskedAdaptiveNorm(norm, num_features, condition_features=condition_features, dims=dims)
