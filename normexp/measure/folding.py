"""Batch norms folded into the convolution or linear layer beside them: prediction without them."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from normexp.measure._affine import (
    affine_of,
    is_norm,
    scale_inputs,
    scale_outputs,
    why_not_affine,
)
from normexp.measure._dataflow import Flow, record_flow
from normexp.measure._tracked import channel_axis_of, eval_mode, kept_random_state
from normexp.norms import NormRecord

_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Folding:
    """What became of one norm layer.

    Attributes:
        path: Dotted path of the norm.
        into: Path of the layer that took it in; None if none did.
        is_folded: Whether the norm is gone.
        reason: How it was folded, or why not.
    """

    path: str
    into: str | None
    is_folded: bool
    reason: str


class _NotFoldable(Exception):
    """Says why in its message."""


def fold_norms(
    model: nn.Module, inputs: Shaped[Tensor, "n ..."]
) -> tuple[nn.Module, list[Folding]]:
    """Return a copy for prediction without the batch norms that a neighbour can take in.

    In eval mode a batch norm is ``s_c x_c + t_c`` with ``s = weight / sqrt(running_var + eps)``
    and ``t = bias - running_mean s``. It goes into the layer in front of it, if that layer is a
    (transposed) convolution or linear layer whose output goes into the norm and nowhere else:
    ``W_o <- s_o W_o``, ``b_o <- s_o b_o + t_o``. Else it goes into the layer behind it, if the
    norm's output goes into that layer and nowhere else, and no zeros are padded on there:
    ``W_oi <- W_oi s_i``, ``b_o <- b_o + sum_i W_oi t_i``. A layer without a bias gets one. New
    weights are computed in float64 and rounded to the type of the old.

    Who feeds whom is recorded in one forward pass of the model on ``inputs``, by the identity of
    the tensors. A model that branches on its input's values has to be checked on more.

    Args:
        model: Any module, called with a batch of inputs; not changed.
        inputs: A small batch of the kind that will be predicted.

    Returns:
        (the copy in eval mode, one Folding for each norm layer in the order of the modules).
        In the copy, ``nn.Identity`` stands where a folded norm stood.
    """
    folded = copy.deepcopy(model).eval()
    norms = {path: m for path, m in folded.named_modules() if is_norm(m)}
    layers: dict[str, nn.Module] = {
        path: m for path, m in folded.named_modules() if isinstance(m, _LINEAR + _TRANSPOSED)
    }
    outer = {p: m for p, m in norms.items() if not any(_holds(q, p) for q in norms)}
    watched = [*outer, *(p for p in layers if not any(_holds(q, p) for q in outer))]
    with kept_random_state(inputs.device):
        flow = record_flow(folded, watched, inputs)
    fold = _Fold(folded, flow, layers)
    foldings = [fold.one(path, module) for path, module in outer.items()]
    return folded, foldings + [_describe_parametrized(p, m) for p, m in _parametrized(folded)]


def max_difference(
    model: nn.Module,
    folded: nn.Module,
    inputs: Shaped[Tensor, "n ..."],
    *,
    batch_size: int,
) -> float:
    """Return the largest absolute difference between what two models predict in eval mode.

    For the difference by algebra alone, give both in float64; in float32 rounding is part of it.

    Args:
        model: The model.
        folded: Its folded copy.
        inputs: Samples, in the type of the models.
        batch_size: Samples in one forward pass.
    """
    worst = torch.zeros((), dtype=torch.float64)
    with torch.no_grad(), kept_random_state(inputs.device), eval_mode(model), eval_mode(folded):
        for batch in torch.split(inputs, batch_size):
            difference = (model(batch).double() - folded(batch).double()).abs().amax()
            # A NaN stays one.
            worst = torch.maximum(worst, difference.cpu())
    return float(worst)


class _Fold:
    """Folds the norms of one copy, one after the other."""

    def __init__(self, model: nn.Module, flow: Flow, layers: dict[str, nn.Module]) -> None:
        self.model = model
        self.flow = flow
        self.layers = layers
        named = model.named_parameters(remove_duplicate=False)
        self.parameter_uses = Counter(id(parameter) for _, parameter in named)
        self.module_uses = Counter(
            id(module) for _, module in model.named_modules(remove_duplicate=False)
        )
        self.feeders = {
            user: path for path in flow.outputs if (user := flow.only_user(path)) is not None
        }

    def one(self, path: str, norm: nn.Module) -> Folding:
        """Fold one norm, if it can be."""
        try:
            self._check_norm(path, norm)
            into = self._into_previous(path, norm) or self._into_next(path, norm)
        except _NotFoldable as why:
            return Folding(path, None, False, str(why))
        if into is None:
            reason = "no convolution or linear layer feeds it alone or takes its output alone"
            return Folding(path, None, False, reason)
        self._remove(path)
        return Folding(path, into[0], True, into[1])

    def _check_norm(self, path: str, norm: nn.Module) -> None:
        """Raise unless the norm is one affine map by channel, entered once."""
        reason = why_not_affine(norm)
        if reason is not None:
            raise _NotFoldable(reason)
        self._check_entered_once(path, norm)
        if path not in self.flow.inputs:
            raise _NotFoldable("it is called with more than its input")

    def _check_entered_once(self, path: str, module: nn.Module) -> None:
        calls = self.flow.calls[path]
        if calls == 0:
            raise _NotFoldable(f"{path or 'the model'} is not entered on the given inputs")
        if calls > 1:
            raise _NotFoldable(f"{path} is entered {calls} times in one forward pass")
        if not path or self.module_uses[id(module)] > 1:
            raise _NotFoldable(f"{path or 'the model itself'} stands at more than one place")
        if module._forward_hooks or module._forward_pre_hooks:
            raise _NotFoldable(f"{path} has forward hooks")
        if "forward" in vars(module):
            raise _NotFoldable(f"{path} has a forward of its own")

    def _check_layer(self, path: str) -> None:
        """Raise unless the weight of a layer may be changed."""
        layer = self.layers[path]
        self._check_entered_once(path, layer)
        if is_parametrized(layer):
            raise _NotFoldable(f"the weight of {path} is parametrized: bake it in first")
        if type(layer) not in _LINEAR + _TRANSPOSED:
            raise _NotFoldable(f"{path} is a {type(layer).__name__}, with a forward of its own")
        if any(self.parameter_uses[id(p)] > 1 for p in layer.parameters()):
            raise _NotFoldable(f"{path} shares its parameters with another layer")
        if path in self.flow.leaks:
            raise _NotFoldable(f"the parameters of {path} are used outside of it")

    def _into_previous(self, path: str, norm: nn.Module) -> tuple[str, str] | None:
        """Fold into the layer in front; None if there is none."""
        before = self.feeders.get(path)
        if before not in self.layers:
            return None
        self._check_layer(before)
        x = self.flow.inputs[path]
        layer = self.layers[before]
        if _axis_from_end(norm, x) != _channels_from_end(layer):
            raise _NotFoldable(f"its channels stand on another axis than those of {before}")
        scale_outputs(layer, *affine_of(norm))
        return before, "into the layer in front of it"

    def _into_next(self, path: str, norm: nn.Module) -> tuple[str, str] | None:
        """Fold into the layer behind; None if there is none."""
        after = self.flow.only_user(path)
        if after not in self.layers or after not in self.flow.inputs:
            return None
        self._check_layer(after)
        layer = self.layers[after]
        if isinstance(layer, _ConvTransposeNd):
            raise _NotFoldable(f"{after} is transposed: its borders add up fewer terms")
        if _pads_zeros(layer):
            raise _NotFoldable(f"{after} pads zeros, which the norm would have shifted")
        if _axis_from_end(norm, self.flow.inputs[path]) != _channels_from_end(layer):
            raise _NotFoldable(f"its channels stand on another axis than those of {after}")
        scale_inputs(layer, *affine_of(norm))
        return after, "into the layer behind it"

    def _remove(self, path: str) -> None:
        """Let the identity stand in the norm's place."""
        self.model.set_submodule(path, nn.Identity())


def _axis_from_end(norm: nn.Module, x: Tensor) -> int:
    """Return the axis of a norm's channels, counted from the end."""
    return channel_axis_of(norm, x) - x.dim()


def _channels_from_end(layer: nn.Module) -> int:
    """Return the axis of a layer's channels, counted from the end."""
    return -1 - len(layer.kernel_size) if isinstance(layer, _ConvNd) else -1


def _pads_zeros(layer: nn.Module) -> bool:
    """Tell whether a layer pads with zeros; copies of the input's own values do no harm."""
    if not isinstance(layer, _ConvNd) or layer.padding_mode != "zeros":
        return False
    if isinstance(layer.padding, str):
        return layer.padding != "valid" and any(size > 1 for size in layer.kernel_size)
    return any(layer.padding)


def _holds(outer: str, inner: str) -> bool:
    """Tell whether a path lies inside another."""
    return inner != outer and (not outer or inner.startswith(outer + "."))


def _parametrized(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers whose weight a norm acts on."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(vars(module).get("weight_norm_record"), NormRecord)
    ]


def _describe_parametrized(path: str, module: nn.Module) -> Folding:
    """Return the answer for a norm that acts on a weight."""
    name = vars(module)["weight_norm_record"].name
    return Folding(
        path, None, False, f"{name} acts on the weight: bake the parametrization instead"
    )
