"""Norm layers of anybody's module: what they are, and where the channels of their input stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

from normexp.norms.factory import NormRecord

# Channels stand in axis 1, in the last axis, or as in this package: last in sequences, else axis 1.
Layout = Literal["second", "last", "own"]


@dataclass(frozen=True)
class OldNorm:
    """A norm layer found in a module.

    Attributes:
        path: Dotted name of the module, the first where it stands at several.
        other_paths: Its other names.
        module: The layer.
        kind: Which norm it is, as the name of a registered one where there is such a one.
        layout: Where the channels of its input stand.
        dims: Number of position axes of its input; None where the class leaves it open.
        num_features: Channels; None where the layer does not know them.
    """

    path: str
    other_paths: tuple[str, ...]
    module: nn.Module
    kind: str
    layout: Layout
    dims: int | None
    num_features: int | None

    @property
    def label(self) -> str:
        """The layer in an error message."""
        return f"{self.path} ({type(self.module).__name__})".lstrip()


_Row = tuple[str, Layout, int | None]

_TORCH: dict[type[nn.Module], _Row] = {
    nn.BatchNorm1d: ("batch_norm", "second", None),
    nn.BatchNorm2d: ("batch_norm", "second", 2),
    nn.BatchNorm3d: ("batch_norm", "second", 3),
    nn.SyncBatchNorm: ("sync_batch_norm", "second", None),
    nn.GroupNorm: ("group_norm", "second", None),
    nn.LayerNorm: ("layer_norm", "last", None),
    nn.RMSNorm: ("rms_norm", "last", None),
    nn.InstanceNorm1d: ("instance_norm", "second", 1),
    nn.InstanceNorm2d: ("instance_norm", "second", 2),
    nn.InstanceNorm3d: ("instance_norm", "second", 3),
}

# Classes with a forward of their own; told by name, since neither library need be installed.
_TORCHVISION: dict[str, _Row] = {
    "FrozenBatchNorm2d": ("frozen_batch_norm", "second", 2),
    "LayerNorm2d": ("layer_norm_channel", "second", 2),
}
_TIMM: dict[str, _Row] = {
    "BatchNormAct2d": ("batch_norm", "second", 2),
    "SyncBatchNormAct": ("sync_batch_norm", "second", None),
    "FrozenBatchNormAct2d": ("frozen_batch_norm", "second", 2),
    "GroupNorm": ("group_norm", "second", None),
    "GroupNorm1": ("group_norm", "second", None),
    "GroupNormAct": ("group_norm", "second", None),
    "GroupNorm1Act": ("group_norm", "second", None),
    "LayerNorm": ("layer_norm", "last", None),
    "LayerNormFp32": ("layer_norm", "last", None),
    "LayerNormAct": ("layer_norm", "last", None),
    "LayerNormActFp32": ("layer_norm", "last", None),
    "LayerNorm2d": ("layer_norm_channel", "second", 2),
    "LayerNorm2dFp32": ("layer_norm_channel", "second", 2),
    "LayerNormExp2d": ("layer_norm_channel", "second", 2),
    "LayerNormAct2d": ("layer_norm_channel", "second", 2),
    "LayerNormAct2dFp32": ("layer_norm_channel", "second", 2),
    "RmsNorm": ("rms_norm", "last", None),
    "RmsNormFp32": ("rms_norm", "last", None),
    "RmsNormAct": ("rms_norm", "last", None),
    "RmsNormActFp32": ("rms_norm", "last", None),
    "RmsNorm2d": ("rms_norm", "second", 2),
    "RmsNorm2dFp32": ("rms_norm", "second", 2),
    "RmsNormAct2d": ("rms_norm", "second", 2),
    "RmsNormAct2dFp32": ("rms_norm", "second", 2),
}
FOREIGN_KINDS = frozenset(row[0] for row in (*_TORCH.values(), *_TORCHVISION.values()))

_TORCH_BASES: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# They divide by a sum over neighbouring channels, and have neither state nor gain.
_LOCAL_RESPONSE = (nn.LocalResponseNorm, nn.CrossMapLRN2d)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Selects = Callable[[str, nn.Module, str | None], bool]


def find_norms(root: nn.Module, selects: Selects) -> tuple[list[OldNorm], list[str]]:
    """Return the norm layers of a module, and what looks like one but is none that is known.

    What stands inside a norm layer is part of it. Containers are told from norms of other make by
    the norms that they contain.

    Args:
        root: The module.
        selects: Tells from path, module and kind (None if unknown) whether a layer is meant.

    Returns:
        (known layers in the order of the module, labels of the unknown ones).
    """
    paths: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    rows: dict[int, _Row | None] = {}
    inside: str | None = None  # prefix of all names inside the last norm layer
    for path, module in root.named_modules(remove_duplicate=False):
        if inside is not None and path.startswith(inside):
            continue
        key = id(module)
        if key not in rows:
            rows[key] = _look_up(module)
        if rows[key] is not None:
            inside = f"{path}." if path else ""
        paths.setdefault(key, []).append(path)
        modules[key] = module
    known, unknown = [], []
    for key, module in modules.items():
        row = rows[key]
        if row is None:
            guess = _guess_kind(module)
            is_meant = any(selects(path, module, guess) for path in paths[key])
            if is_meant and _looks_like_norm(module):
                unknown.append(f"{paths[key][0]} ({type(module).__name__})")
        elif any(selects(path, module, row[0]) for path in paths[key]):
            known.append(_describe(module, paths[key], row))
    return known, unknown


def find_own_ways(layer: nn.Module) -> str | None:
    """Return what another layer in this one's place would not have; None if nothing."""
    if any(getattr(layer, name, None) for name in _HOOKS) or "forward" in vars(layer):
        return "it has hooks, which would be lost; remove them first"
    if is_parametrized(layer):
        return "its parameters are parametrized; remove the parametrization first"
    return None


def find_holder(root: nn.Module, layers: Mapping[int, str]) -> tuple[str, str] | None:
    """Return which layer also stands where no replacement reaches it, such as a list, and where.

    Args:
        root: The module.
        layers: Labels of its layers by ``id``.
    """
    for path, part in root.named_modules():
        for name, value in vars(part).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            held = list(value.values()) if isinstance(value, dict) else value
            for item in held if isinstance(held, list | tuple) else [held]:
                if id(item) in layers:
                    return layers[id(item)], f"{path}.{name}".lstrip(".")
    return None


def record_of(module: nn.Module) -> NormRecord | None:
    """Return what a factory has written on a layer that it built."""
    record = getattr(module, "norm_record", None)
    return record if isinstance(record, NormRecord) else None


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def cuda_devices_of(module: nn.Module) -> list[int]:
    """Return the CUDA devices that a module lives on, whose random states it could change."""
    devices = {tensor.device for tensor in tensors_of(module) if tensor.is_cuda}
    return sorted(device.index for device in devices)


def _look_up(module: nn.Module) -> _Row | None:
    """Return kind, layout and dims of a norm layer; None for any other module."""
    record = record_of(module)
    if record is not None:
        dims = getattr(module, "dims", None)
        if dims is None and isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d):
            dims = 2
        return record.name, "own", dims
    cls = type(module)
    if cls.__module__.startswith("timm.layers."):
        return _TIMM.get(cls.__name__) or _by_class(module)
    if cls.__module__ in ("torchvision.ops.misc", "torchvision.models.convnext"):
        return _TORCHVISION.get(cls.__name__) or _by_class(module)
    return _by_class(module)


def _by_class(module: nn.Module) -> _Row | None:
    """Return the row of torch's class, unless a subclass computes something else."""
    for base, row in _TORCH.items():
        if isinstance(module, base) and type(module).forward is base.forward:
            return row
    return None


def _guess_kind(module: nn.Module) -> str | None:
    """Return the kind of the torch class that an unknown class is derived from."""
    return next((row[0] for base, row in _TORCH.items() if isinstance(module, base)), None)


def _looks_like_norm(module: nn.Module) -> bool:
    """Tell whether a module of no known class is a norm, by its ancestors and its name."""
    if isinstance(module, _TORCH_BASES):
        return True
    return _has_norm_name(module) and not any(
        _has_norm_name(part) or _look_up(part) is not None for part in _parts(module)
    )


def _has_norm_name(module: nn.Module) -> bool:
    if isinstance(module, _LOCAL_RESPONSE) or type(module).__module__.startswith("torch.nn.utils"):
        return False
    # "normalize" is what is done to the pixels of an image; NormFreeBlock is timm's, without norms.
    return re.search(r"norm(?!al|_?free)", type(module).__name__, re.IGNORECASE) is not None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if part is not module)


def _describe(module: nn.Module, paths: list[str], row: _Row) -> OldNorm:
    kind, layout, dims = row
    shape = getattr(module, "normalized_shape", None)
    if layout == "last" and shape is not None and len(shape) == 3:
        layout, dims = "second", 2  # over C, H and W of images
    return OldNorm(paths[0], tuple(paths[1:]), module, kind, layout, dims, _num_features(module))


def _num_features(module: nn.Module) -> int | None:
    """Return the channels of a norm layer, from whichever attribute holds them."""
    for name in ("num_features", "num_channels"):
        if isinstance(getattr(module, name, None), int):
            return int(getattr(module, name))
    shape = getattr(module, "normalized_shape", None)
    if shape is not None:
        return int(shape[0] if len(shape) == 3 else shape[-1])
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 1:
        return len(weight)
    return None
