"""Running statistics computed anew for the weights as they are now ("precise" BatchNorm)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.func import functional_call

from normexp.measure._tracked import (
    Moments,
    find_tracked_layers,
    in_float64,
    kept_random_state,
)
from normexp.measure.batch_statistics import own_statistics

Estimator = Literal["population", "mean_of_batches"]
ESTIMATORS: tuple[Estimator, ...] = ("population", "mean_of_batches")


def reestimate_running_statistics(
    model: nn.Module,
    inputs: Shaped[Tensor, "n ..."],
    *,
    batch_size: int,
    estimator: Estimator = "population",
    num_samples: int | None = None,
) -> None:
    """Write new running statistics into every layer that keeps them, the weights as they are.

    One pass over the inputs in their order. Each layer's input is what the layers before it make
    with the statistics of the batch, as in training; so it depends on ``batch_size``, and is not
    the population of ``running_statistic_error``, where they use their running statistics.

    With m_b and v_b the mean and the biased variance of a channel over batch b of k_b elements,
    weights w_b = k_b / sum(k) and M = sum(w_b m_b), a layer gets ``running_mean = M`` and:

    - ``population``: ``running_var = sum(w_b v_b) + sum(w_b (m_b - M)^2)``, which is the biased
      variance over all elements;
    - ``mean_of_batches``: ``running_var = sum(w_b v_b k_b / (k_b - 1))``, the mean of unbiased
      variances. Where batches are small it leaves out how their means differ.

    k_b is samples times positions, so a smaller last batch counts for less. Sums are in float64.
    The layers in scope are those of ``batch_statistics``; with ghost_batch_norm a batch is one
    chunk, so ``batch_size=ghost_size`` gives the statistics of its chunks.

    The model runs in eval mode (no dropout). Beside running mean and variance nothing changes:
    weights, gradients, other buffers (``num_batches_tracked`` too), modes, torch's random state.

    Args:
        model: The model, called with a batch of inputs.
        inputs: Training samples on the model's device. Shape ``(n, ...)``.
        batch_size: Samples of a batch.
        estimator: ``population`` or ``mean_of_batches``.
        num_samples: How many of the inputs to use, the first ones; None for all.

    Raises:
        ValueError: If a size or the estimator is not possible, a batch has a single value a
            channel, or a layer keeps running statistics of another kind; the model is then as
            before.

    Source:
        Ioffe & Szegedy, ICML 2015, Algorithm 2 (mean_of_batches); Wu & Johnson, "Rethinking
        'Batch' in BatchNorm", arXiv 2105.07576, 2021, section 3 (population).
    """
    _check(len(inputs), batch_size, estimator, num_samples)
    layers = find_tracked_layers(model)
    if not layers:
        return
    moments = {path: Moments() for path in layers}
    batch_vars: dict[str, Tensor | float] = dict.fromkeys(layers, 0.0)

    def observe(path: str, elements: Tensor) -> None:
        block = in_float64(elements)
        moments[path].add(block)
        weighted = block.var(dim=1, correction=1) * block.shape[1]
        batch_vars[path] = batch_vars[path] + weighted

    used = inputs[:num_samples]
    # Copies for the forward pass: a layer that writes a buffer in eval mode changes nothing.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with (
        torch.no_grad(),
        kept_random_state(inputs.device),
        own_statistics(model, observe),
    ):
        for start in range(0, len(used), batch_size):
            functional_call(model, buffers, (used[start : start + batch_size],))
    with torch.no_grad():
        for path, module in layers.items():
            found = moments[path]
            if not found.count:
                continue  # never entered
            is_population = estimator == "population"
            sums = found.squares if is_population else batch_vars[path]
            _write(module, "running_mean", found.mean)
            _write(module, "running_var", sums / found.count)


@contextmanager
def reestimated_statistics(
    model: nn.Module,
    inputs: Shaped[Tensor, "n ..."],
    *,
    batch_size: int,
    estimator: Estimator = "population",
    num_samples: int | None = None,
) -> Iterator[None]:
    """Re-estimate the running statistics, and put the old ones back at the end.

    Args:
        model: As for ``reestimate_running_statistics``, like all that follows.
        inputs: Training samples.
        batch_size: Samples of a batch.
        estimator: ``population`` or ``mean_of_batches``.
        num_samples: How many of the inputs to use.

    Yields:
        Nothing; the model has the new statistics meanwhile.

    Raises:
        ValueError: As there.
    """
    kept = [
        (buffer, buffer.clone())
        for module in find_tracked_layers(model).values()
        for name in ("running_mean", "running_var")
        if isinstance(buffer := module._buffers.get(name), Tensor)
    ]
    reestimate_running_statistics(
        model, inputs, batch_size=batch_size, estimator=estimator, num_samples=num_samples
    )
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in kept:
                buffer.copy_(values)


def _check(num_inputs: int, batch_size: int, estimator: str, num_samples: int | None) -> None:
    """Raise unless the arguments make sense."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator {estimator!r} is none of {ESTIMATORS}")
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: 1 or more is needed")
    if num_inputs < 1:
        raise ValueError("inputs hold no sample")
    if num_samples is not None and not 1 <= num_samples <= num_inputs:
        raise ValueError(f"num_samples {num_samples}: 1 to {num_inputs} are there")


def _write(module: nn.Module, name: str, value: Tensor | float) -> None:
    """Write one statistic where the layer keeps it."""
    buffer = module._buffers.get(name)
    if buffer is not None:
        buffer.copy_(torch.as_tensor(value))
