"""What a run's ``summary.json`` holds, whoever writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from normexp.norms import NormLayer
from normexp.records import SCHEMA_VERSION, Status
from normexp.training.check import CellFacts
from normexp.training.totals import TextTotals


def build_summary(
    facts: CellFacts,
    *,
    run_id: str,
    seed: int,
    status: Status,
    reason: str | None,
    metrics: Mapping[str, float],
    updates: int,
    texts: TextTotals,
    wall_s: float | None = None,
    resumed_from_update: int | None = None,
    parameter_groups: Sequence[Mapping[str, Any]] = (),
    probes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the summary of a run that has ended.

    Args:
        facts: The run's cell.
        run_id: The run's id.
        seed: The run's seed.
        status: How it ended.
        reason: Why, in one line, unless it completed.
        metrics: ``<split>/<quantity>`` to the last value.
        updates: Updates done.
        texts: What they consumed of texts.
        wall_s: Seconds that it took, if known.
        resumed_from_update: Updates that the last attempt found done.
        parameter_groups: The optimizer's groups.
        probes: What probes found beside their metrics, by probe.
    """
    plan = facts.plan
    samples = updates * plan.effective_batch_size
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "cell": facts.cell,
        "seed": seed,
        "status": status,
        "reason": reason,
        "metrics": dict(metrics),
        "totals": {
            "samples": samples,
            "updates": updates,
            "planned_updates": plan.num_updates,
            "micro_steps": updates * plan.accumulation_steps,
            "epochs": samples / plan.num_train,
            "dropped_samples": plan.dropped_samples,
            "dropped_samples_per_epoch": plan.dropped_per_epoch,
            "effective_batch_size": plan.effective_batch_size,
            **asdict(texts),
            "wall_s": wall_s,
            "resumed_from_update": resumed_from_update,
        },
        "model": {
            "num_parameters": facts.num_parameters,
            "min_statistic_set": facts.min_statistic_set,
            "is_leaking": facts.is_leaking,
            "norm_layers": [_describe_layer(layer) for layer in facts.norm_layers],
        },
        "parameter_groups": [dict(group) for group in parameter_groups],
        "probes": dict(probes or {}),
    }


def _describe_layer(layer: NormLayer) -> dict[str, Any]:
    """Return a norm layer as plain containers."""
    return {
        "path": layer.path,
        "name": layer.name,
        "role": layer.role,
        "input_shape": list(layer.input_shape),
        "statistic_sets": [list(axes) for axes in layer.statistic_sets],
        "statistic_set_size": layer.statistic_set_size,
        "params": dict(layer.params),
    }
