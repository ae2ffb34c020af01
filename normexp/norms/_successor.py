"""The layer that takes an old norm's place, with what it has from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._recognize import OldNorm, record_of, tensors_of
from normexp.norms._registry import NORMS, NormCard
from normexp.norms._statistics import channel_axis
from normexp.norms.factory import NormFactory

_AFFINE = ("weight", "bias")
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Replacement:
    """What ``replace_norms`` did to one layer.

    Attributes:
        path: Dotted name of the layer in the module.
        other_paths: Its other names, where one layer stands at several.
        old_class: Class of the layer that stood there.
        old_kind: Which norm it was; what ``only`` takes.
        new_name: The norm that stands there now.
        num_features: Channels C.
        dims: Number of position axes of its input: 0 features, 1 sequences, 2 images.
        carried: Tensors that the new layer has from the old one.
    """

    path: str
    other_paths: tuple[str, ...]
    old_class: str
    old_kind: str
    new_name: str
    num_features: int
    dims: int
    carried: tuple[str, ...]

    @property
    def is_affine_carried(self) -> bool:
        """Whether gain or shift come from the old layer."""
        return any(name in self.carried for name in _AFFINE)


class AdaptedNorm(nn.Module):
    """A norm in the place of a layer of another layout, or of one that did more than normalize.

    Args:
        norm: The layer.
        channel_axis: Axis of the channels in the input.
        norm_axis: Axis where the norm wants them.
        drop: What the old layer did after normalizing, None for nothing.
        act: What it did then.
    """

    def __init__(
        self,
        norm: nn.Module,
        *,
        channel_axis: int,
        norm_axis: int,
        drop: nn.Module | None,
        act: nn.Module | None,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.channel_axis = channel_axis
        self.norm_axis = norm_axis
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.Identity() if act is None else act

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the normalized input in the input's layout, after dropout and activation."""
        y = self.norm(x.movedim(self.channel_axis, self.norm_axis))
        y = y.movedim(self.norm_axis, self.channel_axis)
        activated: Tensor = self.act(self.drop(y))
        return activated


def build_successor(
    root: nn.Module,
    norm: OldNorm,
    to: str,
    params: Mapping[str, Any],
    keep_affine: bool,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[nn.Module, Replacement]:
    """Return the new layer with what it has from the old one, and what was done."""
    dims, channel_axis, norm_axis, num_features = _resolve_layout(norm, shapes.get(norm.path))
    options = _complete_options(norm, to, params, keep_affine)
    try:
        layer = NormFactory(to, options)(num_features, role="block", dims=dims)
    except UserError as error:
        raise UserError(error.key, error.value, f"{error.expected} (layer {norm.path})") from None
    device, dtype = _device_and_dtype(root, norm)
    layer.to(device=device, dtype=dtype)
    carried = _carry(norm, layer, num_features, keep_affine)
    layer.train(norm.module.training)
    drop, act = (_part(norm, name) for name in ("drop", "act"))
    if channel_axis != norm_axis or drop is not None or act is not None:
        adapted = AdaptedNorm(
            layer, channel_axis=channel_axis, norm_axis=norm_axis, drop=drop, act=act
        )
        adapted.training = norm.module.training  # drop and act keep the modes that they have
        layer = adapted
    return layer, Replacement(
        path=norm.path,
        other_paths=norm.other_paths,
        old_class=type(norm.module).__name__,
        old_kind=norm.kind,
        new_name=to,
        num_features=num_features,
        dims=dims,
        carried=carried,
    )


def _resolve_layout(norm: OldNorm, shape: tuple[int, ...] | None) -> tuple[int, int, int, int]:
    """Return dims, the channels' axis, the axis where the new norm wants them, and their number."""
    if shape is None:
        assert norm.dims is not None
        dims = norm.dims
    else:
        dims = len(shape) - 2
    norm_axis = channel_axis(dims)
    axis = {"own": norm_axis, "second": 1, "last": dims + 1}[norm.layout]
    given = getattr(norm.module, "normalized_shape", ())
    if dims < 0 or (len(given) > 1 and (len(given), dims) not in {(2, 1), (3, 2)}):
        expected = "" if shape is None else f" of an input of shape {list(shape)}"
        raise ValueError(f"{norm.label}: normalizes over {list(given)}{expected}: no known layout")
    if norm.num_features is not None:
        return dims, axis, norm_axis, norm.num_features
    assert shape is not None
    return dims, axis, norm_axis, shape[axis]


def _complete_options(
    norm: OldNorm, to: str, params: Mapping[str, Any], keep_affine: bool
) -> dict[str, Any]:
    """Return the given options, with those that stay as in the old layer."""
    entry, layer, options = NORMS.get(to), norm.module, dict(params)
    allowed = entry.parameters()
    has_running = isinstance(getattr(layer, "running_mean", None), Tensor)
    kept = ["eps", "momentum"] if _keeps_statistics(norm.kind, has_running, entry.card) else []
    if norm.kind == to:
        kept = ["eps", "momentum"]
        if "channels_per_group" not in params:
            kept.append("num_groups")
    for name in kept:
        value = getattr(layer, name, None)
        if name in allowed and (value is not None or (name == "momentum" and has_running)):
            options.setdefault(name, value)
    has_affine = any(isinstance(getattr(layer, name, None), Tensor) for name in _AFFINE)
    if keep_affine and "affine" in allowed and not has_affine:
        options.setdefault("affine", False)
    return options


def _keeps_statistics(kind: str, has_running: bool, card: NormCard) -> bool:
    """Tell whether both layers average the statistics of batches."""
    return (
        has_running
        and kind != "instance_norm"
        and {"running_mean", "running_var"} <= set(card.state)
    )


def _carry(
    norm: OldNorm, layer: nn.Module, num_features: int, keep_affine: bool
) -> tuple[str, ...]:
    """Hand the old layer's tensors to the new one; return the names of those that fit."""
    old, carried = norm.module, []
    for name in _AFFINE:
        value, target = getattr(old, name, None), getattr(layer, name, None)
        if not isinstance(value, Tensor) or not isinstance(target, Tensor):
            continue
        is_trained = isinstance(value, nn.Parameter) and value.requires_grad
        if isinstance(target, nn.Parameter):
            target.requires_grad_(is_trained)
        if keep_affine and value.shape == target.shape == (num_features,):
            carried.append(name)
            if not isinstance(target, nn.Parameter):
                # A copy: an optimizer may still hold the parameter, with a gradient or a decay.
                layer._buffers[name] = value.detach().clone()
            elif isinstance(value, nn.Parameter):
                layer._parameters[name] = value
            else:
                layer._parameters[name] = nn.Parameter(value, requires_grad=False)
    has_running = isinstance(getattr(old, "running_mean", None), Tensor)
    if _keeps_statistics(norm.kind, has_running, NORMS.get(_name_of(layer)).card):
        for name in _RUNNING:
            value = getattr(old, name, None)
            if isinstance(value, Tensor) and isinstance(layer._buffers.get(name), Tensor):
                layer._buffers[name] = value
                carried.append(name)
    return tuple(carried)


def _name_of(layer: nn.Module) -> str:
    record = record_of(layer)
    assert record is not None, "built by a factory"
    return record.name


def _part(norm: OldNorm, name: str) -> nn.Module | None:
    """Return the dropout or activation of a foreign layer; None if it does nothing."""
    part = getattr(norm.module, name, None) if record_of(norm.module) is None else None
    return part if isinstance(part, nn.Module) and type(part) is not nn.Identity else None


def _device_and_dtype(root: nn.Module, norm: OldNorm) -> tuple[torch.device, torch.dtype]:
    """Return where a layer lives and in which type, from its nearest surroundings if it is bare."""
    parents = norm.path.split(".")[:-1]
    around = [".".join(parents[:depth]) for depth in range(len(parents), -1, -1)]
    for module in (norm.module, *map(root.get_submodule, around)):
        for tensor in tensors_of(module):
            if tensor.is_floating_point():
                return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.get_default_dtype()
