"""Measurements of a trained model that a configuration asks for; the model stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from normexp.measure import fold_norms, max_difference, running_statistic_error, summarize

# Training samples on which a folded model is compared with the model.
FOLDING_SAMPLES = 512
# Samples of the forward pass that finds what feeds what.
_TRACED_SAMPLES = 2


def run_probes(
    names: Collection[str], model: nn.Module, train_inputs: Tensor, *, batch_size: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what the probes find.

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
    wide, inputs = copy.deepcopy(model).double(), inputs.double()
    folded, foldings = fold_norms(wide, inputs[:_TRACED_SAMPLES])
    num_folded = sum(folding.is_folded for folding in foldings)
    metrics = {
        "folding/max_difference": max_difference(wide, folded, inputs, batch_size=batch_size),
        "folding/num_folded": float(num_folded),
        "folding/num_not_folded": float(len(foldings) - num_folded),
    }
    return metrics, [asdict(folding) for folding in foldings]
