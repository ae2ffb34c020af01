"""Weight normalization: the length of each output's weight is a parameter of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms import no_norm
from normexp.norms._registry import NORMS, WeightCard, check_dims
from normexp.norms._weights import fan_in_axes, put_on_weight

DIMS = (0, 1, 2)


class WeightNorm(nn.Module):
    """Computes ``w_o = g_o * v_o / ||v_o||`` for each output o, and back.

    The names and shapes in a state dict are those of torch.nn.utils.parametrizations.weight_norm:
    ``parametrizations.weight.original0`` is g, ``original1`` is v. Half-precision weights are
    normalized by torch's kernel, with its norms in float32.
    """

    def forward(
        self, length: Float[Tensor, "o ..."], direction: Float[Tensor, "o ..."]
    ) -> Float[Tensor, "o ..."]:
        """Return the effective weight.

        Args:
            length: g, one number an output, shape ``[O, 1, ...]``.
            direction: v, shape of the weight.
        """
        # torch has no batching rule for its fused kernel: under vmap it would loop, and warn.
        if torch._C._are_functorch_transforms_active():
            return direction * (length / _norm_by_output(direction))
        return torch._weight_norm(direction, length, 0)

    def right_inverse(
        self, weight: Float[Tensor, "o ..."]
    ) -> tuple[Float[Tensor, "o ..."], Float[Tensor, "o ..."]]:
        """Return the length and direction that give a weight: its norm by output, and itself."""
        return _norm_by_output(weight), weight


def _norm_by_output(weight: Tensor) -> Tensor:
    """Return the Euclidean norm over each output's fan-in, with extent 1 along it."""
    norm: Tensor = torch.linalg.vector_norm(weight, dim=fan_in_axes(weight), keepdim=True)
    return norm


def parametrize_weight(module: nn.Module, **_: Any) -> nn.Module:
    """Put weight normalization on a layer's weight; the effective weight stays what it is.

    Args:
        module: A convolution or linear layer; changed in place.
        **_: There is no option.

    Returns:
        The module.

    Raises:
        ValueError: If the module is no such layer, or its weight is parametrized already.
    """
    return put_on_weight("weight_norm", module, WeightNorm())


CARD = replace(
    no_norm.CARD,
    formula="y = x; weight of the layer before: w_o = g_o * v_o / ||v_o||, o an output",
    source="Salimans & Kingma, NeurIPS 2016, equation 2 "
    "(as torch.nn.utils.parametrizations.weight_norm, dim=0)",
    dims=DIMS,
    statistic_sets=dict.fromkeys(DIMS, ()),
    kernel="none: returns its input; the weight by torch._weight_norm, fused",
    weight=WeightCard(
        formula="w_o = g_o * v_o / ||v_o||",
        is_centring=False,
        is_scale_invariant=True,
        divisor=None,
        eps_place=None,
        parameters={"original0": ("O",)},
        parametrize=parametrize_weight,
    ),
)


@NORMS.register("weight_norm", CARD)
def build_weight_norm(num_features: int, *, dims: int) -> nn.Module:
    """Build the identity: the norm acts on weights, ``w_o = g_o * v_o / ||v_o||``.

    ||v_o|| is over the fan-in of output o. There is no eps: a weight that is zero has no
    direction. The paper's initialization from a batch of data is not used: g starts at ||v||, so
    that the effective weight is the one that a model without this norm starts from.

    Args:
        num_features: Channels C; without effect.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, 0 for features
            ``[N, C]``.

    Returns:
        A module without parameters, for the norm's place in the network.

    Raises:
        UserError: If ``dims`` is none of these.

    Source:
        Salimans & Kingma, "Weight Normalization", NeurIPS 2016, section 2.
    """
    check_dims("weight_norm", dims, supported=CARD.dims, instead="images or features")
    return nn.Identity()
