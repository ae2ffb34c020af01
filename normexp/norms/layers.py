"""What every norm layer of a model will see: its input, and how many values share a statistic."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._registry import NORMS, Axis, StatisticSet
from normexp.norms.factory import NormRecord


@dataclass(frozen=True)
class NormLayer:
    """One norm layer of a model, with the input that training will give it.

    Attributes:
        path: Dotted name of the module.
        name: The norm.
        role: The layer's place in the model.
        input_shape: Its input in one micro-step, the micro-batch first.
        statistic_sets: The axes that each of its statistics is computed over.
        statistic_set_sizes: M, the number of elements that share a statistic, for each of them.
        params: Every option with its value in this layer.
        problem: Why the layer cannot work on this input; None if it can.
        key: Where the configuration chooses the norm.
    """

    path: str
    name: str
    role: str
    input_shape: tuple[int, ...]
    statistic_sets: tuple[StatisticSet, ...]
    statistic_set_sizes: tuple[int, ...]
    params: dict[str, Any]
    problem: str | None = None
    key: str = "norm"

    @property
    def statistic_set_size(self) -> int | None:
        """M of the smallest statistic set; None where there is no statistic."""
        return min(self.statistic_set_sizes, default=None)


def describe_norm_layers(
    model: nn.Module, input_shape: tuple[int, ...], micro_batch_size: int
) -> list[NormLayer]:
    """Return the norm layers of a model in the order of the forward pass.

    A copy on the meta device is run in training mode, and hands the input of each norm layer on as
    its output: nothing is computed, the model and its buffers stay untouched, and layers that
    cannot work (one value in a statistic set, a forward pass that raises) are listed with their
    problem instead of raising.

    Args:
        model: A model whose norm layers a NormFactory built.
        input_shape: Shape of one sample, such as ``(C, H, W)``; of a model with an
            ``input_dtype``, a sample is of that type.
        micro_batch_size: Samples in one forward pass.
    """
    ghost = copy.deepcopy(model).to("meta").train()
    found: dict[str, NormLayer] = {}
    for path, module in ghost.named_modules():
        record = getattr(module, "norm_record", None)
        if isinstance(record, NormRecord):
            vars(module)["forward"] = _Spy(path, module, record, found)
    dtype = getattr(model, "input_dtype", None)
    if dtype is None:
        dtype = next((p.dtype for p in ghost.parameters()), torch.float32)
    with torch.no_grad():
        ghost(torch.empty(micro_batch_size, *input_shape, dtype=dtype, device="meta"))
    return list(found.values())


@dataclass(frozen=True)
class _Spy:
    """Stands in for a norm layer's forward: notes the input and hands it on."""

    path: str
    module: nn.Module
    record: NormRecord
    found: dict[str, NormLayer]

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        record, shape = self.record, tuple(x.shape)
        declared = NORMS.get(record.name).card.statistic_sets[x.ndim - 2]
        sets = getattr(self.module, "statistic_sets", declared)
        find_problem = getattr(self.module, "find_problem", None)
        self.found[self.path] = NormLayer(
            path=self.path,
            name=record.name,
            role=record.role,
            input_shape=shape,
            statistic_sets=sets,
            statistic_set_sizes=tuple(
                compute_statistic_set_size(axes, shape, record.params) for axes in sets
            ),
            params=record.params,
            problem=find_problem(shape) if find_problem is not None else None,
            key=record.key,
        )
        if self._has_many_values():
            self._try_out(x, mask)
        return x

    def _has_many_values(self) -> bool:
        """Tell whether every statistic has two values or more; what raises else is known."""
        layer = self.found[self.path]
        return layer.problem is None and all(size > 1 for size in layer.statistic_set_sizes)

    def _try_out(self, x: Tensor, mask: Tensor | None) -> None:
        """Note what the layer's own forward pass raises, as one of a user's plugin may."""
        arguments = (x,) if mask is None else (x, mask)
        try:
            y = type(self.module).forward(self.module, *arguments)
            fault = None if y.shape == x.shape else f"returns the shape {list(y.shape)}"
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            if re.search(r"\bmeta\b", text, re.IGNORECASE):
                return  # it reads a number or lacks a form here, where there are shapes alone
            fault = f"raises {type(error).__name__}: {text}"
        if fault is not None:
            problem = f"on an input of {list(x.shape)} it {fault}"
            self.found[self.path] = replace(self.found[self.path], problem=problem)


def compute_statistic_set_size(
    axes: StatisticSet, shape: tuple[int, ...], params: dict[str, Any]
) -> int:
    """Return M, the number of elements that share one statistic.

    Args:
        axes: One of the card's statistic sets.
        shape: The layer's input, ``(N, C)``, ``(N, L, C)`` or ``(N, C, H, W)``.
        params: The layer's resolved options; ``num_groups``, ``ghost_size`` and ``fraction``
            tell the extents of group, ghost and part.

    Returns:
        The product of the axes' extents.

    Examples:
        >>> compute_statistic_set_size(("batch", "position"), (2, 64, 2, 2), {})
        8
        >>> compute_statistic_set_size(("group",), (2, 64), {"num_groups": 8})
        8
        >>> compute_statistic_set_size(("channel", "position"), (2, 5, 16), {})
        80
    """
    num_samples = shape[0]
    num_channels, positions = (shape[2], shape[1:2]) if len(shape) == 3 else (shape[1], shape[2:])
    extents: dict[Axis, Callable[[], int]] = {
        "batch": lambda: num_samples,
        "ghost": lambda: min(num_samples, int(params["ghost_size"])),
        "channel": lambda: num_channels,
        "group": lambda: num_channels // int(params["num_groups"]),
        "part": lambda: int(num_channels * params["fraction"]),
        "position": lambda: math.prod(positions),
    }
    return math.prod(extents[axis]() for axis in axes)


_REMEDIES: dict[Axis, str] = {
    "batch": "raise micro_batch_size",
    "ghost": "raise ghost_size",
    "position": "use larger images or fewer stages",
    "group": "use fewer groups",
    "channel": "use more channels",
    "part": "use a larger fraction",
}


def check_statistic_sets(layers: Iterable[NormLayer]) -> None:
    """Raise if a layer cannot work on its input, or would compute a statistic over one value.

    The mean of a single value is the value itself and its variance is zero, so such a layer
    would hand on its shift (or, without a mean, the sign) whatever its input.

    Args:
        layers: The norm layers of a model.

    Raises:
        UserError: For the first such layer, with its path and shape and what would help.
    """
    for layer in layers:
        if layer.problem is not None:
            raise UserError(layer.key, layer.name, f"layer {layer.path}: {layer.problem}")
        for axes, size in zip(layer.statistic_sets, layer.statistic_set_sizes, strict=True):
            if size == 1:
                remedies = " or ".join(_REMEDIES[axis] for axis in axes)
                if len(layer.input_shape) == 3:
                    remedies = remedies.replace(_REMEDIES["position"], "use longer texts")
                raise UserError(
                    layer.key,
                    layer.name,
                    f"layer {layer.path} would normalize over a single value "
                    f"({' x '.join(axes)} of its input {list(layer.input_shape)}); "
                    f"2 or more are needed: {remedies}",
                )
