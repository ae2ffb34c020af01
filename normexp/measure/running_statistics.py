"""How far running statistics stand from the statistics that they stand for.

Definition used throughout: a layer's **population** is everything that enters the layer when the
network, in eval mode, sees the whole training set once. It is thus what the layer really meets
at evaluation, where the layers before it use their own running statistics as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.func import functional_call

from normexp.measure._tracked import (
    Moments,
    elements_of,
    eval_mode,
    in_float64,
    kept_random_state,
)

# torch's own default, for a layer with running statistics that has no eps.
_DEFAULT_EPS = 1e-5


@dataclass(frozen=True)
class RunningStatisticError:
    """Distance of one layer's running statistics from its population.

    Attributes:
        path: Dotted path of the layer.
        mean_error: ``sqrt(mean_c((running_mean - mean)^2 / (var + eps)))``: by how many standard
            deviations the mean is off.
        var_ratio_error: ``mean_c(|log((running_var + eps) / (var + eps))|)``: 0.1 says that the
            variance is off by a factor of about 1.1, up or down.
        num_features: Channels that the two are means over.
    """

    path: str
    mean_error: float
    var_ratio_error: float
    num_features: int


def running_statistic_error(
    model: nn.Module, inputs: Shaped[Tensor, "n ..."], *, batch_size: int
) -> list[RunningStatisticError]:
    """Return the error of every layer with running statistics, in the order of the modules.

    Mean and biased variance of the population are exact (float64). The layer's own ``eps`` is
    added to both variances, as in the layer's formula, so that a dead channel (variance 0) gives
    a finite number. A layer that the forward pass never enters has no population and is left
    out; one that is entered several times has all of its inputs in it.

    The model is left as it was: modes, buffers, gradients and torch's random state.

    Args:
        model: The model, called with a batch of inputs.
        inputs: The whole training set, on the model's device. Shape ``(n, ...)``.
        batch_size: Samples in one forward pass; changes memory and speed only.

    Returns:
        One error a layer; empty when no layer has running statistics.

    Raises:
        ValueError: If a layer's input does not have its features where the layer expects them.
    """
    layers = {
        path: module
        for path, module in model.named_modules()
        if isinstance(getattr(module, "running_mean", None), Tensor)
        and isinstance(getattr(module, "running_var", None), Tensor)
    }
    if not layers:
        return []
    moments = {path: Moments() for path in layers}
    # The forward pass gets copies, so that even a layer that writes its buffers in eval mode
    # leaves the real ones alone.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(kept_random_state(inputs.device))
        stack.enter_context(eval_mode(model))
        for path, module in layers.items():
            hook = _recording_hook(path, moments[path])
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        for start in range(0, len(inputs), batch_size):
            functional_call(model, buffers, (inputs[start : start + batch_size],))
    return [_error_of(path, layers[path], moments[path]) for path in layers if moments[path].count]


def summarize(errors: Sequence[RunningStatisticError]) -> dict[str, float]:
    """Return the errors of a model as a few numbers: mean over layers, and the worst layer.

    Args:
        errors: One error a layer.

    Returns:
        ``running_statistic_mean_error``, ``running_statistic_var_ratio_error`` and the same with
        ``_max``; empty for a model without running statistics. One layer that is not finite
        makes its numbers not finite.
    """
    if not errors:
        return {}
    summary: dict[str, float] = {}
    for name in ("mean_error", "var_ratio_error"):
        values = torch.tensor([getattr(error, name) for error in errors], dtype=torch.float64)
        summary[f"running_statistic_{name}"] = float(values.mean())
        # Not max(): it would pass over a NaN, depending on where it stands.
        summary[f"running_statistic_{name}_max"] = float(values.amax())
    return summary


def check_finite_buffers(model: nn.Module) -> str | None:
    """Return the dotted name of the first buffer with a NaN or an infinity, or None.

    Args:
        model: The model, before an evaluation: one bad running variance makes every prediction
            the same while the training loss looks sound.
    """
    named = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    # All flags first and one read at the end: each read waits for the device.
    flags = [buffer.isfinite().all() for _, buffer in named]
    if not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
        return None
    return next(name for (name, _), flag in zip(named, flags, strict=True) if not flag)


def _recording_hook(
    path: str, moments: Moments
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Return a forward pre-hook that adds the layer's input to its moments."""

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        moments.add(in_float64(elements_of(path, module, args, kwargs)))

    return record


def _error_of(path: str, module: nn.Module, moments: Moments) -> RunningStatisticError:
    """Compare a layer's buffers with its population."""
    mean, squares = moments.mean, moments.squares
    assert isinstance(mean, Tensor)
    assert isinstance(squares, Tensor)
    eps = float(getattr(module, "eps", _DEFAULT_EPS))
    var = squares / moments.count + eps
    running_mean = _buffer(module, "running_mean").detach().to(mean.device, torch.float64)
    running_var = _buffer(module, "running_var").detach().to(mean.device, torch.float64) + eps
    return RunningStatisticError(
        path=path,
        mean_error=math.sqrt(float(((running_mean - mean).square() / var).mean())),
        var_ratio_error=float((running_var / var).log().abs().mean()),
        num_features=mean.numel(),
    )


def _buffer(module: nn.Module, name: str) -> Tensor:
    """Return a buffer that is known to be there."""
    buffer = getattr(module, name)
    assert isinstance(buffer, Tensor)
    return buffer
