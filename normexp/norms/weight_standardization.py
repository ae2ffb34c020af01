"""Weight standardization: weights with mean 0 and deviation 1 an output, before group norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms import group_norm
from normexp.norms._registry import NORMS, WeightCard
from normexp.norms._statistics import upcast
from normexp.norms._weights import fan_in_axes, put_on_weight


class WeightStandardization(nn.Module):
    """Computes ``(w_o - mean_o) / (std_o + eps)`` for each output o.

    In a state dict the raw weight is ``parametrizations.weight.original``. Half-precision weights
    are standardized in float32; the result is cast back.

    Args:
        eps: Added to the deviation.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, weight: Float[Tensor, "o ..."]) -> Float[Tensor, "o ..."]:
        """Return the effective weight of a raw one."""
        raw = upcast(weight)
        std, mean = torch.std_mean(raw, fan_in_axes(raw), correction=1, keepdim=True)
        return ((raw - mean) / (std + self.eps)).to(weight.dtype)

    def right_inverse(self, weight: Float[Tensor, "o ..."]) -> Float[Tensor, "o ..."]:
        """Return a weight as the raw one: what is assigned is standardized."""
        return weight


def parametrize_weight(module: nn.Module, *, weight_eps: float = 1e-5, **_: Any) -> nn.Module:
    """Put weight standardization on a layer's weight, which becomes the raw weight.

    Args:
        module: A convolution or linear layer; changed in place.
        weight_eps: Added to the deviation.
        **_: Options of the group norm at the norm's place.

    Returns:
        The module.

    Raises:
        UserError: If an output of the layer has a single product.
        ValueError: If the module is no such layer, or its weight is parametrized already.
    """
    standardization = WeightStandardization(weight_eps)
    return put_on_weight("weight_standardization", module, standardization, min_fan_in=2)


CARD = replace(
    group_norm.CARD,
    formula=f"{group_norm.CARD.formula}; weight of the layer before: (w_o - mean_o) / "
    "(std_o + weight_eps), o an output",
    source="Qiao et al., arXiv:1903.10520, equation 5 (own; group norm by torch.nn.GroupNorm)",
    kernel=f"{group_norm.CARD.kernel}; the weight by a composite",
    weight=WeightCard(
        formula="(w_o - mean_o) / (std_o + weight_eps), std_o with M - 1",
        is_centring=True,
        is_scale_invariant=True,
        divisor="M-1",
        eps_place="outside_sqrt",
        parameters={},
        parametrize=parametrize_weight,
    ),
)


@NORMS.register("weight_standardization", CARD)
def build_weight_standardization(
    num_features: int,
    *,
    dims: int,
    num_groups: int | None = None,
    channels_per_group: int | None = None,
    weight_eps: float = 1e-5,
    eps: float = 1e-5,
    affine: bool = True,
) -> nn.Module:
    """Build the group norm that goes with ``(w_o - mean_o) / (std_o + weight_eps)``.

    mean_o and std_o are over the fan-in of output o, which has M elements, with M - 1 in the
    variance and weight_eps outside of the root, as in the authors' code; other implementations
    divide by M or put eps inside. The raw weight starts as the weight of any other norm does.

    Args:
        num_features: Channels C.
        dims: As for group_norm.
        num_groups: Number of groups, the same in every layer; 8 when neither is given.
        channels_per_group: Channels in a group, the same in every layer, instead of num_groups.
        weight_eps: Added to the deviation of a weight.
        eps: Added to the variance of the group norm, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.

    Returns:
        The group norm, for the norm's place in the network.

    Raises:
        UserError: If group norm is not defined for such inputs, both or bad group numbers are
            given, or the channels cannot be divided so.

    Source:
        Qiao, Wang, Liu, Shen & Yuille, "Micro-Batch Training with Batch-Channel Normalization and
        Weight Standardization", arXiv:1903.10520, section 3.
    """
    layer: nn.Module = group_norm.build_group_norm(
        num_features,
        dims=dims,
        num_groups=num_groups,
        channels_per_group=channels_per_group,
        eps=eps,
        affine=affine,
    )
    return layer
