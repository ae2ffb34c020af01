"""What every norm layer of a model will see: its input, and how many values share a statistic."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._registry import NORMS
from normexp.norms.factory import NormRecord


@dataclass(frozen=True)
class NormLayer:
    """One norm layer of a model, with the input that training will give it.

    Attributes:
        path: Dotted name of the module.
        name: The norm.
        role: The layer's place in the model.
        input_shape: Its input in one micro-step, the micro-batch first.
        statistic_axes: The axes that one statistic is computed over.
        statistic_set_size: M, the number of elements that share a statistic; None where there
            is no statistic.
        params: Every option with its value in this layer.
    """

    path: str
    name: str
    role: str
    input_shape: tuple[int, ...]
    statistic_axes: tuple[str, ...]
    statistic_set_size: int | None
    params: dict[str, Any]


def describe_norm_layers(
    model: nn.Module, input_shape: tuple[int, ...], micro_batch_size: int
) -> list[NormLayer]:
    """Return the norm layers of a model in the order of the forward pass.

    A copy on the meta device is run in training mode, its norm layers replaced by the identity:
    nothing is computed, the model and its buffers stay untouched, and layers that cannot work
    (one value in a statistic set) are listed instead of raising.

    Args:
        model: A model whose norm layers a NormFactory built.
        input_shape: Shape of one sample, such as ``(C, H, W)``.
        micro_batch_size: Samples in one forward pass.
    """
    ghost = copy.deepcopy(model).to("meta").train()
    found: dict[str, NormLayer] = {}
    for path, module in ghost.named_modules():
        record = getattr(module, "norm_record", None)
        if isinstance(record, NormRecord):
            vars(module)["forward"] = _Spy(path, record, found)
    dtype = next((p.dtype for p in ghost.parameters()), torch.float32)
    with torch.no_grad():
        ghost(torch.empty(micro_batch_size, *input_shape, dtype=dtype, device="meta"))
    return list(found.values())


@dataclass(frozen=True)
class _Spy:
    """Stands in for a norm layer's forward: notes the input and hands it on."""

    path: str
    record: NormRecord
    found: dict[str, NormLayer]

    def __call__(self, x: Tensor) -> Tensor:
        record, shape = self.record, tuple(x.shape)
        axes = NORMS.get(record.name).card.statistic_axes[1 if x.ndim == 2 else 2]
        self.found[self.path] = NormLayer(
            path=self.path,
            name=record.name,
            role=record.role,
            input_shape=shape,
            statistic_axes=axes,
            statistic_set_size=compute_statistic_set_size(axes, shape, record.params),
            params=record.params,
        )
        return x


def compute_statistic_set_size(
    axes: Iterable[str], shape: tuple[int, ...], params: dict[str, Any]
) -> int | None:
    """Return M, the number of elements that share one statistic.

    Args:
        axes: The card's statistic axes: batch, channel, group, position.
        shape: The layer's input, ``(N, C)`` or ``(N, C, H, W)``.
        params: The layer's resolved options; ``num_groups`` is needed for the axis group.

    Returns:
        The product of the axes' extents; None without axes.

    Examples:
        >>> compute_statistic_set_size(("batch", "position"), (2, 64, 2, 2), {})
        8
        >>> compute_statistic_set_size(("group",), (2, 64), {"num_groups": 8})
        8
    """
    axes = tuple(axes)
    if not axes:
        return None
    extents = {"batch": shape[0], "channel": shape[1], "position": math.prod(shape[2:])}
    if "group" in axes:
        extents["group"] = shape[1] // int(params["num_groups"])
    return math.prod(extents[axis] for axis in axes)


_REMEDIES = {
    "batch": "raise micro_batch_size",
    "position": "use larger images or fewer stages",
    "group": "use fewer groups",
    "channel": "use more channels",
}


def check_statistic_sets(layers: Iterable[NormLayer]) -> None:
    """Raise if a layer would compute a statistic over a single value.

    The mean of a single value is the value itself and its variance is zero, so such a layer
    would hand on its shift (or, without a mean, the sign) whatever its input.

    Args:
        layers: The norm layers of a model.

    Raises:
        UserError: For the first layer with M = 1, with its path and shape and what would help.
    """
    for layer in layers:
        if layer.statistic_set_size == 1:
            axes = " x ".join(layer.statistic_axes)
            remedies = " or ".join(_REMEDIES[axis] for axis in layer.statistic_axes)
            raise UserError(
                "norm",
                layer.name,
                f"layer {layer.path} would normalize over a single value ({axes} "
                f"of its input {list(layer.input_shape)}); 2 or more are needed: {remedies}",
            )
