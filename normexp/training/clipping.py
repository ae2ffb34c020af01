"""Adaptive gradient clipping: gradients that are large beside their weights are made smaller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models import parameter_roles

# A weight of zeros can still leave zero: its norm counts as this much (Brock et al. 2021).
MIN_WEIGHT_NORM = 1e-3
CLIPPED_ROLES = ("weight", "bias")
# What makes the logits of a model: the first of these that it has. A Transformer without a head
# takes the weights of its embedding for one.
_OUTPUT_NAMES = ("classifier", "head", "token_embedding")


class AdaptiveClip:
    """Clips gradients unit by unit: ``G_i <- G_i min(1, limit max(||W_i||, 1e-3) / ||G_i||)``.

    A unit i is one output of a weight: a row of a linear layer, a filter of a convolution, with
    its fan-in. What has at most one axis longer than 1 (biases, gains, shifts, scalars) is one unit
    as a whole, as in the authors' code.

    Args:
        parameters: What is clipped; those without a gradient are left out.
        limit: Largest ratio of a gradient's norm to its weight's.

    Source:
        Brock, De, Smith & Simonyan, "High-Performance Large-Scale Image Recognition Without
        Normalization", ICML 2021, section 4.
    """

    def __init__(self, parameters: Sequence[Tensor], limit: float) -> None:
        self.parameters = tuple(parameters)
        self.limit = limit

    @torch.no_grad()
    def __call__(self) -> None:
        """Clip the gradients that the parameters have now, in place."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            largest = compute_unit_norms(parameter).clamp_(min=MIN_WEIGHT_NORM).mul_(self.limit)
            # A gradient of zero gives an infinite ratio, and is multiplied with 1.
            ratio = largest.div_(compute_unit_norms(parameter.grad))
            parameter.grad.mul_(ratio.clamp_(max=1.0))


def compute_unit_norms(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*reduced"]:
    """Return the Euclidean norm of every unit of a parameter or gradient.

    Args:
        x: A weight ``[O, fan-in ...]``, or what has at most one axis longer than 1.

    Returns:
        One norm an output, ``[O, 1, ...]``; a single one without axes for the latter.
    """
    is_one_unit = sum(extent > 1 for extent in x.shape) <= 1
    axes = None if is_one_unit else tuple(range(1, x.ndim))
    norms: Tensor = torch.linalg.vector_norm(x, dim=axes, keepdim=not is_one_unit)
    return norms


def build_adaptive_clip(model: nn.Module, limit: float) -> AdaptiveClip:
    """Return what clips the gradients of a model.

    Parameters of the roles weight and bias are clipped, but for those of the module that makes the
    logits, the model's ``classifier`` or ``head``: its weight and its bias. The authors' code also
    clips gains and the learned factors of skips, and of the classifier only the weight is free.
    Here norms and skips are left out: a factor that starts at 0 could move by limit * 1e-3 times
    the rate an update, which in a short budget keeps its branch shut.

    Args:
        model: A model with the attribute ``classifier`` or ``head``, or with ``token_embedding``
            where the logits are products with the embeddings.
        limit: Largest ratio of a gradient's norm to its weight's.

    Raises:
        UserError: If the model has no such module.
    """
    modules = (getattr(model, name, None) for name in _OUTPUT_NAMES)
    classifier = next((found for found in modules if isinstance(found, nn.Module)), None)
    if classifier is None:
        raise UserError(
            "optimizer.adaptive_clip",
            limit,
            f"{type(model).__name__} has no module classifier, which would not be clipped; null",
        )
    spared = {id(parameter) for parameter in classifier.parameters()}
    roles = parameter_roles(model)
    clipped = [
        parameter
        for name, parameter in model.named_parameters()
        if roles[name] in CLIPPED_ROLES and id(parameter) not in spared
    ]
    return AdaptiveClip(clipped, limit)
