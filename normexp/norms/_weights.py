"""What the norms of weights share: which layers they fit, and how they get on a weight."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import parametrize

from normexp.errors import UserError

# Layers whose weight has the outputs along its first axis: a transposed convolution has not.
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def fan_in_axes(weight: Tensor) -> tuple[int, ...]:
    """Return the axes of one output's fan-in: all but the first."""
    return tuple(range(1, weight.ndim))


def by_output(vector: Tensor, weight: Tensor) -> Tensor:
    """Return one number an output in a shape that broadcasts against the weight."""
    return vector.reshape(-1, *[1] * (weight.ndim - 1))


def put_on_weight(
    name: str, module: nn.Module, parametrization: nn.Module, *, min_fan_in: int = 1
) -> nn.Module:
    """Let a parametrization compute the weight of a layer.

    Args:
        name: The norm, for messages.
        module: A convolution or linear layer; changed in place.
        parametrization: What makes the effective weight of the raw one, and back.
        min_fan_in: Fewest products of one output that the norm can work with.

    Returns:
        The module.

    Raises:
        UserError: If an output of the layer has fewer products.
        ValueError: If the module is no such layer, or its weight is parametrized already.
    """
    if not isinstance(module, _LAYERS):
        raise ValueError(f"{name} needs a linear layer or a convolution, not {type(module)}")
    if parametrize.is_parametrized(module, "weight"):
        raise ValueError(f"the weight of {module} is parametrized already")
    fan_in = module.weight[0].numel()
    if fan_in < min_fan_in:
        raise UserError(
            "norm", name, f"{min_fan_in} or more products an output are needed, {module} has 1"
        )
    return parametrize.register_parametrization(module, "weight", parametrization)
