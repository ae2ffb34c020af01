"""Rules across the fields of one cell that need no data and no model."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from normexp.config.metrics import TARGET_METRICS
from normexp.config.schema import CellConfig, EvaluationConfig
from normexp.errors import UserError, choices_hint

LR_SCALING_RULES = ("none", "linear", "sqrt")
PRECISIONS = ("32-true", "64-true", "bf16-mixed")
ACCELERATORS = ("auto", "cpu", "gpu")
PROBES = ("running_statistics", "folding", "initial_gradients")
EVALUATION_STATISTICS = ("running", "reestimated", "batch")
ESTIMATORS = ("population", "mean_of_batches")


def check_fields(config: CellConfig) -> None:
    """Raise on the first value that cannot be right, whatever the data and model are.

    Args:
        config: A composed cell.

    Raises:
        UserError: With key, value and what would be right.
    """
    _check_choice("lr_scaling.rule", config.lr_scaling.rule, LR_SCALING_RULES)
    _check_choice("precision", config.precision, PRECISIONS)
    _check_choice("trainer.accelerator", config.trainer.accelerator, ACCELERATORS)
    for probe in config.probes:
        _check_choice("probes", probe, PROBES)
    _check_evaluation(config.evaluation)
    _check_target(config.experiment.plain_target())
    for key, count in {
        "micro_batch_size": config.micro_batch_size,
        "accumulation_steps": config.accumulation_steps,
        "num_evaluations": config.num_evaluations,
        "lr_scaling.base_batch_size": config.lr_scaling.base_batch_size,
        "trainer.num_threads": config.trainer.num_threads,
        "trainer.window_updates": config.trainer.window_updates,
        "trainer.eval_batch_size": config.trainer.eval_batch_size,
    }.items():
        if count < 1:
            raise UserError(key, count, "1 or more is needed")
    if config.data.augment.crop_padding < 0:
        raise UserError("data.augment.crop_padding", config.data.augment.crop_padding, "0 or more")
    _check_numbers(config)
    _check_name(config.name)
    _check_seeds(config.seeds)
    _check_budget(config)


def budget_samples(config: CellConfig, num_train: int) -> int:
    """Return the budget in samples.

    Args:
        config: A composed cell whose budget has exactly one entry.
        num_train: Samples of the training split: the length of an epoch.
    """
    budget = config.budget
    if budget.samples is not None:
        return budget.samples
    if budget.updates is not None:
        return budget.updates * config.effective_batch_size
    assert budget.epochs is not None
    # As written: 1.1 epochs of 55,000 are 60,500 samples, which binary fractions miss by one.
    return math.ceil(Fraction(str(budget.epochs)) * num_train)


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(key, value, choices_hint(value, choices))


def _check_numbers(config: CellConfig) -> None:
    optimizer, schedule = config.optimizer, config.schedule
    if not (math.isfinite(optimizer.lr) and optimizer.lr > 0):
        raise UserError("optimizer.lr", optimizer.lr, "a number above 0 is needed")
    if not (math.isfinite(optimizer.weight_decay) and optimizer.weight_decay >= 0):
        raise UserError("optimizer.weight_decay", optimizer.weight_decay, "0 or more is needed")
    positive = {f"lr_factors.{k}": v for k, v in dataclasses.asdict(optimizer.lr_factors).items()}
    if optimizer.adaptive_clip is not None:
        positive["adaptive_clip"] = optimizer.adaptive_clip
    for key, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"optimizer.{key}", value, "a number above 0 is needed")
    if not 0 <= schedule.warmup_fraction < 1:
        raise UserError(
            "schedule.warmup_fraction", schedule.warmup_fraction, "a share in [0, 1) is needed"
        )
    if not config.trainer.checkpoint_interval_s > 0:
        interval = config.trainer.checkpoint_interval_s
        raise UserError("trainer.checkpoint_interval_s", interval, "a number above 0 is needed")


def _check_evaluation(evaluation: EvaluationConfig) -> None:
    _check_choice("evaluation.statistics", evaluation.statistics, EVALUATION_STATISTICS)
    if evaluation.estimator is not None:
        _check_choice("evaluation.estimator", evaluation.estimator, ESTIMATORS)
    elif evaluation.statistics == "reestimated":
        raise UserError("evaluation.estimator", "null", f"one of {', '.join(ESTIMATORS)}")
    sizes = {"num_samples": evaluation.num_samples, "batch_size": evaluation.batch_size}
    for key, size in sizes.items():
        if size is not None and size < 1:
            raise UserError(f"evaluation.{key}", size, "1 or more is needed")


def _check_target(target: Mapping[str, Any] | None) -> None:
    if target is None:
        return
    metric, value = target["metric"], target["value"]
    key = "experiment.target.value"
    if metric is None:
        choices = f"a target needs a metric; {choices_hint('', TARGET_METRICS)}"
        raise UserError("experiment.target.metric", "null", choices)
    _check_choice("experiment.target.metric", metric, tuple(TARGET_METRICS))
    if value is None:
        raise UserError(key, "null", f"a target needs the value of {metric} to reach")
    if not (math.isfinite(value) and value > 0):
        raise UserError(key, value, "a number above 0 is needed")
    if metric == "val/accuracy" and value > 1:
        raise UserError(key, value, "accuracies are fractions: a number in (0, 1] is needed")


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError("name", name, "a folder name of letters, digits, '.', '_' and '-'")


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds:
        raise UserError("seeds", "[]", "at least one seed is needed, as in seeds=[0,1,2]")
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise UserError("seeds", list(seeds), f"{seed} is outside of 0..2^63-1")
    if len(set(seeds)) != len(seeds):
        raise UserError("seeds", list(seeds), "a seed twice is no second sample; name each once")


def _check_budget(config: CellConfig) -> None:
    budget = config.budget
    amounts = {"epochs": budget.epochs, "samples": budget.samples, "updates": budget.updates}
    given = {unit: amount for unit, amount in amounts.items() if amount is not None}
    if len(given) != 1:
        shown = ", ".join(f"{unit}: {amount}" for unit, amount in given.items()) or "nothing"
        expected = "set exactly one of epochs, samples, updates and null the others"
        raise UserError("budget", f"{{{shown}}}", f"{expected}, as in budget.epochs=null")
    unit, amount = next(iter(given.items()))
    if not (math.isfinite(amount) and amount > 0):
        raise UserError(f"budget.{unit}", amount, "a number above 0 is needed")
