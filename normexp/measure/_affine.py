"""Norms that are one constant affine map a channel in eval mode, and layers that take one in."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from normexp.measure._tracked import has_statistics, is_frozen, norm_name
from normexp.norms import NORMS, NormCard

# y = (x - running_mean) / sqrt(running_var + eps) * weight + bias in eval mode, and no more.
_AFFINE_IN_EVAL = frozenset(
    {"batch_norm", "sync_batch_norm", "ghost_batch_norm", "batch_renorm", "frozen_batch_norm"}
)
_OTHER_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module is a norm layer, of any library."""
    name = norm_name(module)
    if name is not None:
        return name != "no_norm" and name in NORMS
    return isinstance(module, (_NormBase, *_OTHER_NORMS)) or has_statistics(module)


def why_not_affine(norm: nn.Module) -> str | None:
    """Return why a norm is no constant affine map by channel in eval mode, None if it is."""
    name = norm_name(norm)
    label = name or type(norm).__name__
    card = NORMS.get(name).card if name is not None else None
    if card is not None and card.weight is not None:
        return f"{label} acts on the weight: bake the parametrization instead"
    is_affine = name in _AFFINE_IN_EVAL if name else _is_plain_batch_norm(norm)
    if is_affine:
        if isinstance(getattr(norm, "running_var", None), Tensor):
            return None
        return f"{label} without running statistics uses those of each batch"
    return _explain(label, norm, card)


def _explain(label: str, norm: nn.Module, card: NormCard | None) -> str:
    """Return why a norm that is not a batch norm cannot be folded."""
    if card is not None and card.includes_activation:
        return f"{label} is not linear: it brings its own activation"
    if card is not None and not any(card.statistic_sets.values()):
        return f"{label} is not linear in its input"
    if card is None and has_statistics(norm) and not isinstance(norm, _InstanceNorm):
        return f"{label} has a forward of its own, not known to be a batch norm and no more"
    return f"{label} computes its statistics from each input"


def _is_plain_batch_norm(norm: nn.Module) -> bool:
    """Tell whether a foreign layer computes what torch's batch norm does."""
    if is_frozen(norm):
        return type(norm).__name__ == "FrozenBatchNorm2d"
    forwards = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return isinstance(norm, _BatchNorm) and type(norm).forward in forwards


def affine_of(norm: nn.Module) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """Return scale and shift of a batch norm in eval mode, in float64."""
    mean, var = norm.running_mean, norm.running_var
    assert isinstance(mean, Tensor)
    assert isinstance(var, Tensor)
    eps = norm.eps
    assert isinstance(eps, float)
    scale = (var.double() + eps).rsqrt()
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if isinstance(weight, Tensor):
        scale = scale * weight.detach().double()
    shift = -mean.double() * scale
    if isinstance(bias, Tensor):
        shift = shift + bias.detach().double()
    return scale, shift


def scale_outputs(layer: nn.Module, scale: Float[Tensor, " c"], shift: Float[Tensor, " c"]) -> None:
    """Let a convolution or linear layer give ``scale * y + shift`` where it gave ``y``, in place.

    Args:
        layer: The layer, transposed or not.
        scale: One factor an output channel, float64.
        shift: Added to each output channel, float64.
    """
    wide = _weight_of(layer).detach().double()
    ones = [1] * (wide.dim() - 2)
    if isinstance(layer, _ConvTransposeNd):
        # [I, O/groups, ...], the inputs of a group side by side.
        by_group = wide.reshape(layer.groups, -1, *wide.shape[1:])
        wide = (by_group * scale.reshape(layer.groups, 1, -1, *ones)).reshape(wide.shape)
    else:
        wide = wide * scale.reshape(-1, 1, *ones)
    _set(layer, wide, _bias_of(layer) * scale + shift)


def scale_inputs(layer: nn.Module, scale: Float[Tensor, " c"], shift: Float[Tensor, " c"]) -> None:
    """Let a layer take ``x`` where it took ``scale * x + shift``, in place.

    Args:
        layer: A linear layer or a convolution that pads no zeros, not transposed.
        scale: One factor an input channel, float64.
        shift: Added to each input channel, float64.
    """
    wide = _weight_of(layer).detach().double()
    groups = layer.groups if isinstance(layer, _ConvNd) else 1
    by_group = wide.reshape(groups, -1, *wide.shape[1:])  # [groups, O/groups, I/groups, ...]
    shape = (groups, 1, -1, *[1] * (wide.dim() - 2))
    added = (by_group * shift.reshape(shape)).reshape(len(wide), -1).sum(dim=1)
    scaled = (by_group * scale.reshape(shape)).reshape(wide.shape)
    _set(layer, scaled, _bias_of(layer) + added)


def _weight_of(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _bias_of(layer: nn.Module) -> Tensor:
    """Return a layer's bias in float64, zero where it has none."""
    bias = layer.bias
    if isinstance(bias, Tensor):
        return bias.detach().double()
    return torch.zeros((), dtype=torch.float64)


def _set(layer: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """Give a layer new values; a bias where it had none."""
    old = _weight_of(layer)
    bias = bias.to(old.dtype)
    with torch.no_grad():
        old.copy_(weight)
        if isinstance(layer.bias, Tensor):
            layer.bias.copy_(bias)
    if layer.bias is None:
        layer.bias = nn.Parameter(bias, requires_grad=old.requires_grad)
