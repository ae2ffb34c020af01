"""Measurements of a model that a configuration asks for; the model stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor, nn

from normexp.data import Split
from normexp.measure import (
    fold_norms,
    gradient_norms,
    max_difference,
    running_statistic_error,
    summarize,
    summarize_gradients,
)
from normexp.training.objective import sum_losses
from normexp.training.windows import longest_texts

# Training samples, in their stored order, whose gradient is taken at the initial weights; more if
# whole micro-batches hold more, fewer if the training split does not have as many.
GRADIENT_SAMPLES = 64

# Training samples on which a folded model is compared with the model.
FOLDING_SAMPLES = 512
# Samples of the forward pass that finds what feeds what.
_TRACED_SAMPLES = 2


def run_initial_probes(
    names: Collection[str],
    model: nn.Module,
    train: Split,
    *,
    micro_batch_size: int,
    is_trimmed: bool,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what the probes of initial weights find.

    The gradient is that of the run's objective, the mean loss a sample or token, over the first
    ``GRADIENT_SAMPLES`` training samples as they are stored: without augmentation, in whole
    micro-batches, so that a norm over the batch sees as many samples as in training.

    Args:
        names: Which to run.
        model: The model at its initial weights.
        train: The training split, on any device.
        micro_batch_size: Samples in one forward pass; no more than the split has.
        is_trimmed: Whether a micro-batch of texts is cut to its longest text.

    Returns:
        (metrics of the run by name, reports in plain containers by probe).
    """
    if "initial_gradients" not in names:
        return {}, {}
    parameter = next(model.parameters())
    most = len(train) // micro_batch_size
    num_batches = min(-(-GRADIENT_SAMPLES // micro_batch_size), most)
    num_samples = num_batches * micro_batch_size
    split = Split(train.inputs[:num_samples], train.targets[:num_samples])
    num_targets = num_samples if split.num_targets is None else int(split.num_targets.sum())
    lengths = split.lengths if is_trimmed else None
    batches = []
    for start in range(0, num_samples, micro_batch_size):
        end = start + micro_batch_size
        inputs = split.inputs[start:end].to(parameter.device)
        if inputs.is_floating_point():
            inputs = inputs.to(parameter.dtype)
        if lengths is not None:
            inputs = inputs[:, : int(longest_texts(lengths, np.arange(start, end)))]
        batches.append((inputs, split.targets[start:end].to(parameter.device)))
    loss, norms = gradient_norms(model, batches, sum_losses, num_targets=num_targets)
    last_branch_weight = getattr(model, "last_branch_weight", None)
    report = {
        "num_samples": num_samples,
        "num_targets": num_targets,
        "loss": loss,
        "last_branch_weight": last_branch_weight,
        "parameters": [asdict(norm) for norm in norms],
    }
    return summarize_gradients(norms, last_branch_weight), {"initial_gradients": report}


def run_probes(
    names: Collection[str], model: nn.Module, train_inputs: Tensor, *, batch_size: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what the probes of the trained model find.

    Args:
        names: Which to run.
        model: The trained model.
        train_inputs: The training split, on the model's device.
        batch_size: Samples in one forward pass.

    Returns:
        (metrics of the run by name, reports in plain containers by probe).
    """
    metrics: dict[str, float] = {}
    reports: dict[str, Any] = {}
    if "running_statistics" in names:
        errors = running_statistic_error(model, train_inputs, batch_size=batch_size)
        metrics |= summarize(errors)
    if "folding" in names:
        found, reports["folding"] = _fold(model, train_inputs[:FOLDING_SAMPLES], batch_size)
        metrics |= found
    return metrics, reports


def _fold(
    model: nn.Module, inputs: Tensor, batch_size: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Fold a copy in float64, where only a fold that is wrong makes a difference."""
    wide = copy.deepcopy(model).double()
    if inputs.is_floating_point():  # token ids stay what they are
        inputs = inputs.double()
    folded, foldings = fold_norms(wide, inputs[:_TRACED_SAMPLES])
    num_folded = sum(folding.is_folded for folding in foldings)
    metrics = {
        "folding/max_difference": max_difference(wide, folded, inputs, batch_size=batch_size),
        "folding/num_folded": float(num_folded),
        "folding/num_not_folded": float(len(foldings) - num_folded),
    }
    return metrics, [asdict(folding) for folding in foldings]
