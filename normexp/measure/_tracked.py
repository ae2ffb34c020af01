"""Layers that keep running statistics: which they are, and what enters them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normexp.norms import NormRecord
from normexp.norms.frozen_batch_norm import FrozenBatchNorm

_PACKAGE = "normexp.norms."
# Norms of this package beside the batch norms of torch: in eval mode the running statistics
# stand exactly where the statistics of the batch stand in training.
_SUPPORTED = frozenset({"ghost_batch_norm", "batch_renorm", "evo_norm_b0", "switchable_norm"})
# Of torchvision and timm; named, so that timm need not be there.
_FROZEN_CLASSES = frozenset({"FrozenBatchNorm2d", "FrozenBatchNormAct2d"})
_REFUSED = {
    "power_norm": "its running statistic is a part of its training, not of evaluation alone",
    "instance_norm": "its running statistics stand for statistics of single samples",
}


class Moments:
    """Exact mean and variance of each channel, merged block by block in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, block: Float[Tensor, "features elements"]) -> None:
        """Merge a block, with the pairwise update of Chan, Golub and LeVeque (1979)."""
        size = block.shape[1]
        if size == 0:
            return
        mean = block.mean(dim=1)
        squares = (block - mean[:, None]).square().sum(dim=1)
        total = self.count + size
        delta = mean - self.mean
        self.mean = self.mean + delta * (size / total)
        self.squares = self.squares + squares + delta.square() * (self.count * size / total)
        self.count = total


def norm_name(module: nn.Module) -> str | None:
    """Return the name of the norm that a layer of this package is, None for others."""
    record = getattr(module, "norm_record", None)
    if isinstance(record, NormRecord):
        return record.name
    home = type(module).__module__
    return home.removeprefix(_PACKAGE) if home.startswith(_PACKAGE) else None


def has_statistics(module: nn.Module) -> bool:
    """Tell whether a layer keeps a running mean or a running variance."""
    names = ("running_mean", "running_var", "running_phi")
    return any(isinstance(getattr(module, name, None), Tensor) for name in names)


def is_frozen(module: nn.Module) -> bool:
    """Tell whether a layer is one whose running statistics are constants by intent."""
    return isinstance(module, FrozenBatchNorm) or type(module).__name__ in _FROZEN_CLASSES


def find_tracked_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose running statistics stand for those of a batch, by path.

    Frozen layers are none of them: their statistics are constants by intent.

    Raises:
        ValueError: If a layer keeps running statistics of another kind.
    """
    layers = {}
    for path, module in model.named_modules():
        if not has_statistics(module) or is_frozen(module):
            continue
        name = norm_name(module) or type(module).__name__
        if isinstance(module, _InstanceNorm):
            name = "instance_norm"
        if name in _REFUSED or not (name in _SUPPORTED or isinstance(module, _BatchNorm)):
            why = _REFUSED.get(name, "how it uses its running statistics is not known")
            raise ValueError(f"{path}: {name} is not supported: {why}")
        layers[path] = module
    return layers


def num_features_of(module: nn.Module) -> int:
    """Return the channels of a layer with running statistics."""
    for name in ("running_mean", "running_var"):
        buffer = getattr(module, name, None)
        if isinstance(buffer, Tensor):
            return buffer.numel()
    raise ValueError(f"{type(module).__name__} keeps no running statistics")


def channel_axis_of(module: nn.Module, x: Tensor) -> int:
    """Return the axis of the channels in a layer's input.

    It is the second, but for layers of this package on sequences, which have it last.
    """
    is_sequence = x.dim() == 3 and norm_name(module) is not None
    return 2 if is_sequence else 1


def elements_of(
    path: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Float[Tensor, "features elements"]:
    """Return what a call gives a layer to compute statistics from: valid elements by channel.

    Raises:
        ValueError: If the channels do not stand where the layer expects them.
    """
    x = args[0] if args else kwargs.get("x", kwargs.get("input"))
    if not isinstance(x, Tensor):
        raise ValueError(f"{path}: called without a tensor")
    num_features = num_features_of(module)
    axis = channel_axis_of(module, x) if x.dim() >= 2 else 0
    if x.dim() < 2 or x.shape[axis] != num_features:
        raise ValueError(
            f"{path}: input of shape {tuple(x.shape)}, but {num_features} features are "
            f"expected in axis {max(axis, 1)}"
        )
    mask = args[1] if len(args) > 1 else kwargs.get("mask")
    x = x.detach()
    if isinstance(mask, Tensor):
        return x[mask].transpose(0, 1)
    return x.movedim(axis, 0).reshape(num_features, -1)


def in_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU where the device has no such numbers (MPS)."""
    return x.to("cpu" if x.device.type == "mps" else x.device).to(torch.float64)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, then each back in the mode that it had itself."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore torch's random state at the end, in case a module draws in eval mode."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
