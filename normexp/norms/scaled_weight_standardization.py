"""Scaled weight standardization: weights that keep the variance of signals, without a norm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms import no_norm
from normexp.norms._registry import NORMS, WeightCard, check_dims
from normexp.norms._statistics import upcast
from normexp.norms._weights import by_output, fan_in_axes, put_on_weight

DIMS = (0, 1, 2)
# Of a unit normal z, relu(z) has the variance (1 - 1 / pi) / 2; the factor makes it 1 again.
ACTIVATION_GAINS = {"relu": math.sqrt(2 / (1 - 1 / math.pi)), "none": 1.0}


class ScaledWeightStandardization(nn.Module):
    """Computes ``a * gain_o * (w_o - mean_o) / sqrt(max(M * var_o, eps))`` for each output o.

    In a state dict the raw weight is ``parametrizations.weight.original`` and the gain
    ``parametrizations.weight.0.gain``. Half-precision weights are standardized in float32; the
    result is cast back.

    Args:
        num_outputs: Outputs O.
        activation_gain: a, a constant for the activation that comes before.
        eps: Lower bound of M times the variance.
        like: Tensor whose type and device the gain takes.
    """

    def __init__(
        self, num_outputs: int, *, activation_gain: float, eps: float, like: Tensor
    ) -> None:
        super().__init__()
        self.activation_gain = activation_gain
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(num_outputs, dtype=like.dtype, device=like.device))

    def forward(self, weight: Float[Tensor, "o ..."]) -> Float[Tensor, "o ..."]:
        """Return the effective weight of a raw one."""
        raw = upcast(weight)
        var, mean = torch.var_mean(raw, fan_in_axes(raw), correction=0, keepdim=True)
        fan_in = raw[0].numel()
        scale = by_output(upcast(self.gain), raw) * torch.rsqrt((fan_in * var).clamp(min=self.eps))
        return ((raw - mean) * (self.activation_gain * scale)).to(weight.dtype)

    def right_inverse(self, weight: Float[Tensor, "o ..."]) -> Float[Tensor, "o ..."]:
        """Return a weight as the raw one: what is assigned is standardized."""
        return weight


def parametrize_weight(
    module: nn.Module,
    *,
    weight_eps: float = 1e-4,
    activation_gain: Literal["relu", "none"] = "relu",
    **_: Any,
) -> nn.Module:
    """Put scaled weight standardization on a layer's weight, which becomes the raw weight.

    Args:
        module: A convolution or linear layer; changed in place.
        weight_eps: Lower bound of M times the variance.
        activation_gain: relu or none.
        **_: There is no other option.

    Returns:
        The module.

    Raises:
        UserError: If an output of the layer has a single product.
        ValueError: If the module is no such layer, or its weight is parametrized already.
    """
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise ValueError(f"scaled_weight_standardization needs a layer with a weight: {module}")
    standardization = ScaledWeightStandardization(
        len(weight), activation_gain=ACTIVATION_GAINS[activation_gain], eps=weight_eps, like=weight
    )
    return put_on_weight("scaled_weight_standardization", module, standardization, min_fan_in=2)


CARD = replace(
    no_norm.CARD,
    formula="y = x; weight of the layer before: a * gain_o * (w_o - mean_o) / "
    "sqrt(max(M * var_o, weight_eps)), o an output, M its fan-in",
    source="Brock et al., ICLR 2021, equation 4; Brock et al., ICML 2021, section 2 (own)",
    dims=DIMS,
    statistic_sets=dict.fromkeys(DIMS, ()),
    kernel="none: returns its input; the weight by a composite",
    weight=WeightCard(
        formula="a * gain_o * (w_o - mean_o) / sqrt(max(M * var_o, weight_eps))",
        is_centring=True,
        is_scale_invariant=True,
        # M times the variance is the plain sum of squares.
        divisor=None,
        eps_place="clamp",
        parameters={"gain": ("O",)},
        parametrize=parametrize_weight,
    ),
)


@NORMS.register("scaled_weight_standardization", CARD)
def build_scaled_weight_standardization(
    num_features: int,
    *,
    dims: int,
    weight_eps: float = 1e-4,
    activation_gain: Literal["relu", "none"] = "relu",
) -> nn.Module:
    """Build the identity: the norm acts on weights.

    ``a * gain_o * (w_o - mean_o) / sqrt(max(M * var_o, weight_eps))``, mean_o and var_o (biased)
    over the fan-in of output o, which has M elements; a = sqrt(2 / (1 - 1/pi)) for relu, else 1;
    gain_o is learned and starts at 1. So a layer behind a relu of unit normal signals gives
    signals of variance 1. The factor is on every layer, the stem's included. What NF-ResNets
    have beside it is apart: a learned scalar at the end of a branch is placement skip_init,
    adaptive gradient clipping is optimizer.adaptive_clip.

    Args:
        num_features: Channels C; without effect.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, 0 for features
            ``[N, C]``.
        weight_eps: Lower bound of M times the variance of a weight.
        activation_gain: The activation whose loss of variance a makes up for: relu or none.

    Returns:
        A module without parameters, for the norm's place in the network.

    Raises:
        UserError: If ``dims`` is none of these.

    Source:
        Brock, De & Smith, "Characterizing signal propagation to close the performance gap in
        unnormalized ResNets", ICLR 2021; Brock, De, Smith & Simonyan, "High-Performance
        Large-Scale Image Recognition Without Normalization", ICML 2021.
    """
    check_dims(
        "scaled_weight_standardization", dims, supported=CARD.dims, instead="images or features"
    )
    return nn.Identity()
