"""Adaptive layer normalization: gain and shift come from a condition.

Legend: N samples, L positions of a sequence, C channels, H, W height and width, Z features of
the condition.
"""

from __future__ import annotations

from torch import nn

from normexp.norms._adaptive import AdaptiveNorm
from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y = (1 + scale(z)) * (x - mean) / sqrt(var + eps) + shift(z) over the last axis",
    source="Peebles & Xie, ICCV 2023 (DiT), section 3.2 (torch.nn.LayerNorm and torch.nn.Linear)",
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
    parameters={"projection.weight": ("2C", "Z"), "projection.bias": ("2C",)},
    single_value="zero",
    takes_mask=False,
    keeps_channels_last=False,
    kernel="native (torch.nn.functional.layer_norm), then gain and shift as a composite",
    kernel_cpu="composite",
    kernel_cuda="composite",
    takes_condition=True,
)


@NORMS.register("adaptive_layer_norm", CARD)
def build_adaptive_layer_norm(
    num_features: int,
    *,
    dims: int,
    condition_features: int = 16,
    eps: float = 1e-5,
) -> nn.Module:
    """Build ``y = (1 + scale(z)) * (x - mean) / sqrt(var + eps) + shift(z)``.

    mean and var (biased) are over the C features of one sample or position: statistic sets of C
    elements. scale and shift are one linear layer of the condition z that starts at zero, so a
    fresh layer is layer_norm without gain and shift. DiT's adaLN-Zero has a gate on the residual
    branch besides, which belongs to the model and is not here.

    A condition goes in with every input, ``forward(x, condition)`` with a condition
    ``[N, Z]``: for models of your own.

    Args:
        num_features: Channels C.
        dims: 1 for sequences ``[N, L, C]``, 0 for features ``[N, C]``.
        condition_features: Features Z of the condition.
        eps: Added to the variance, inside the square root.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is none of these, or ``condition_features`` is below 1.

    Source:
        Peebles & Xie, "Scalable Diffusion Models with Transformers", ICCV 2023, section 3.2.
    """
    check_dims("adaptive_layer_norm", dims, supported=CARD.dims, instead="adaptive_group_norm")
    norm = nn.LayerNorm(num_features, eps=eps, elementwise_affine=False)
    return AdaptiveNorm(norm, num_features, condition_features=condition_features, dims=dims)
