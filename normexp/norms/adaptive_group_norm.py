"""Adaptive group normalization: gain and shift come from a condition.

Legend: N samples, L positions of a sequence, C channels, H, W height and width, Z features of
the condition.
"""

from __future__ import annotations

from torch import nn

from normexp.norms._adaptive import MaskedAdaptiveNorm
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms.group_norm import build_group_norm

CARD = NormCard(
    formula="y_c = (1 + scale_c(z)) * (x_c - mean_g) / sqrt(var_g + eps) + shift_c(z), "
    "g the group of c",
    source="Dhariwal & Nichol, NeurIPS 2021, section 3 (torch.nn.GroupNorm and torch.nn.Linear)",
    dims=(0, 1, 2),
    statistic_sets={
        0: (("group",),),
        1: (("group", "position"),),
        2: (("group", "position"),),
    },
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
    single_value="raises at N=1, else zero",
    takes_mask=True,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.group_norm), then gain and shift as a composite",
    kernel_cpu="composite",
    kernel_cuda="composite",
    takes_condition=True,
)


@NORMS.register("adaptive_group_norm", CARD)
def build_adaptive_group_norm(
    num_features: int,
    *,
    dims: int,
    condition_features: int = 16,
    num_groups: int | None = None,
    channels_per_group: int | None = None,
    eps: float = 1e-5,
) -> nn.Module:
    """Build ``y_c = (1 + scale_c(z)) * (x_c - mean_g) / sqrt(var_g + eps) + shift_c(z)``.

    mean and var (biased) are those of group_norm, with its statistic sets and its mask. scale and
    shift are one linear layer of the condition z that starts at zero, so a fresh layer is
    group_norm without gain and shift. The paper writes the gain as y_s; here it is 1 + scale, so
    that zero is the plain norm.

    A condition goes in with every input, ``forward(x, condition, mask=None)`` with a condition
    ``[N, Z]``: for models of your own.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, 0 for features
            ``[N, C]``.
        condition_features: Features Z of the condition.
        num_groups: Number of groups, the same in every layer; 8 when neither is given.
        channels_per_group: Channels in a group, the same in every layer, instead of num_groups.
        eps: Added to the variance, inside the square root.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is none of these, the groups cannot be made, or
            ``condition_features`` is below 1.

    Source:
        Dhariwal & Nichol, "Diffusion Models Beat GANs on Image Synthesis", NeurIPS 2021, sec. 3.
    """
    check_dims(
        "adaptive_group_norm", dims, supported=CARD.dims, instead="images, sequences or features"
    )
    norm = build_group_norm(
        num_features,
        dims=dims,
        num_groups=num_groups,
        channels_per_group=channels_per_group,
        eps=eps,
        affine=False,
    )
    return MaskedAdaptiveNorm(norm, num_features, condition_features=condition_features, dims=dims)
