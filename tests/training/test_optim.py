"""Optimizers, schedules and parameter groups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from normexp.config.schema import (
    CellConfig,
    LrFactorsConfig,
    LrScalingConfig,
    OptimizerConfig,
    PlacementConfig,
)
from normexp.data import load_dataset
from normexp.errors import UserError
from normexp.norms import NORMS
from normexp.records import read_summary
from normexp.training.build import build_start
from normexp.training.cell import train_cell
from normexp.training.check import build_cell_model, check_cell
from normexp.training.optim import (
    ROLES,
    build_lr,
    build_optimizer,
    check_decay_roles,
    group_parameters,
    set_lr,
)

IMAGE_NORMS = [e.name for e in NORMS if 2 in e.card.dims and not e.card.takes_condition]


@pytest.mark.parametrize("norm", IMAGE_NORMS)
@pytest.mark.parametrize("decay_roles", [["weight"], ["weight", "norm"], []])
def test_every_parameter_is_in_one_group_and_decays_by_its_role(
    make_cell: Callable[..., CellConfig], norm: str, decay_roles: list[str]
) -> None:
    model = build_cell_model(make_cell(norm), load_dataset("digits", {}))
    groups = group_parameters(model, weight_decay=0.1, decay_roles=decay_roles)
    grouped = [id(parameter) for group in groups for parameter in group.parameters]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert len(set(grouped)) == len(grouped)
    for group in groups:
        assert group.weight_decay == (0.1 if group.role in decay_roles else 0.0)
    roles = {group.role for group in groups}
    assert ("norm" in roles) == (norm != "no_norm")


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer.decay_roles=norms: did you mean norm\?"):
        check_decay_roles(["weight", "norms"])


def test_cosine_with_warmup() -> None:
    lr = build_lr("cosine", peak_lr=2.0, warmup_fraction=0.2, num_updates=10, params={})
    # Two updates of warm-up reach the peak at the second; eight of cosine start there again.
    assert [lr(0), lr(1), lr(2)] == [1.0, 2.0, 2.0]
    assert lr(6) == pytest.approx(1.0)
    assert lr(9) == pytest.approx(1 + math.cos(math.pi * 7 / 8))


def test_cosine_ends_at_its_final_fraction() -> None:
    params = {"final_fraction": 0.25}
    lr = build_lr("cosine", peak_lr=4.0, warmup_fraction=0.0, num_updates=10**6, params=params)
    assert lr(10**6 - 1) == pytest.approx(1.0, abs=1e-9)
    assert lr(500_000) == pytest.approx((4.0 + 1.0) / 2)
    assert lr(0) == 4.0


def test_constant() -> None:
    lr = build_lr("constant", peak_lr=0.5, warmup_fraction=0.5, num_updates=4, params={})
    assert [lr(update) for update in range(4)] == [0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("rule", "expected"), [("none", 0.1), ("linear", 0.1 * 64 / 16), ("sqrt", 0.1 * 2.0)]
)
def test_the_rate_follows_the_effective_batch(
    make_cell: Callable[..., CellConfig], rule: str, expected: float
) -> None:
    config = make_cell(
        optimizer=OptimizerConfig("sgd", 0.1, 0.0),
        lr_scaling=LrScalingConfig(rule, 16),
        micro_batch_size=16,
        accumulation_steps=4,
    )
    assert config.scaled_lr == pytest.approx(expected, rel=1e-15)


def reference_sgd(w: float, grads: list[float], lr: float, decay: float, momentum: float) -> float:
    v = 0.0
    for g in grads:
        v = momentum * v + g + decay * w
        w -= lr * v
    return w


def reference_adamw(w: float, grads: list[float], lr: float, decay: float) -> float:
    m = v = 0.0
    for t, g in enumerate(grads, start=1):
        w -= lr * decay * w
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        w -= lr * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizers_follow_their_formulas(name: str) -> None:
    model = torch.nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(0.7)
    grads = [0.3, -0.2, 0.5]
    from normexp.training.optim import ParameterGroup

    groups = [ParameterGroup("weight", 0.01, (model.weight,))]
    optimizer = build_optimizer(name, groups, lr=0.1, params={})
    for g in grads:
        model.weight.grad = torch.full_like(model.weight, g)
        optimizer.step()
    expected = (
        reference_sgd(0.7, grads, 0.1, 0.01, 0.9)
        if name == "sgd"
        else reference_adamw(0.7, grads, 0.1, 0.01)
    )
    assert float(model.weight.detach()) == pytest.approx(expected, rel=1e-12)


def fixup(make_cell: Callable[..., CellConfig], **factors: float) -> CellConfig:
    return make_cell(
        norm="no_norm",
        placement=PlacementConfig("fixup"),
        optimizer=OptimizerConfig(
            "sgd", 0.05, 0.01, ["weight"], {"momentum": 0.0}, LrFactorsConfig(**factors)
        ),
    )


def test_the_factors_are_those_of_the_roles() -> None:
    assert [field.name for field in dataclasses.fields(LrFactorsConfig)] == list(ROLES)


def test_skips_are_a_group_that_does_not_decay_and_has_its_own_rate(
    make_cell: Callable[..., CellConfig],
) -> None:
    start = build_start(fixup(make_cell, skip=0.1), load_dataset("digits", {}), seed=0, lr=2.0)
    described = {group.role: group.describe() for group in start.groups}
    # 3 blocks of 5 scalars, two beside them; 10 weights; the classifier's bias.
    assert described["skip"]["num_parameters"] == 3 * 5 + 2
    assert {role: row["lr_factor"] for role, row in described.items()} == {
        "weight": 1.0,
        "bias": 1.0,
        "skip": 0.1,
    }
    assert {role: row["weight_decay"] for role, row in described.items()} == {
        "weight": 0.01,
        "bias": 0.0,
        "skip": 0.0,
    }
    assert [group["lr"] for group in start.optimizer.param_groups] == [2.0, 2.0, 2.0 * 0.1]
    set_lr(start.optimizer, 3.0)
    before = {
        role: [p.detach().clone() for p in g.parameters]
        for role, g in zip(described, start.groups, strict=True)
    }
    for parameter in start.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    start.optimizer.step()
    for group in start.groups:
        rate, decay = (0.3, 0.0) if group.role == "skip" else (3.0, group.weight_decay)
        for old, new in zip(before[group.role], group.parameters, strict=True):
            expected = old - rate * (1 + decay * old)
            torch.testing.assert_close(new.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_record_of_a_run_holds_the_factors(make_cell: Callable[..., CellConfig]) -> None:
    config = fixup(make_cell, skip=0.1, bias=2.0)
    train_cell(config)
    summary = read_summary(check_cell(config).run_dir(config, 0))
    assert summary is not None
    factors = {group["role"]: group["lr_factor"] for group in summary["parameter_groups"]}
    assert factors == {"weight": 1.0, "bias": 2.0, "skip": 0.1}


def test_training_uses_the_factors(make_cell: Callable[..., CellConfig]) -> None:
    seen = {}
    for factor in (1.0, 0.1):
        config = fixup(make_cell, skip=factor)
        train_cell(config)
        summary = read_summary(check_cell(config).run_dir(config, 0))
        assert summary is not None
        seen[factor] = summary["metrics"]["test/loss"]
    assert seen[1.0] != seen[0.1]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_factor_that_is_not_positive_is_refused(
    make_cell: Callable[..., CellConfig], value: float
) -> None:
    with pytest.raises(UserError, match=r"^optimizer\.lr_factors\.skip=.*: a number above 0"):
        check_cell(fixup(make_cell, skip=value))


def test_a_norm_of_weights_keeps_its_raw_weight_in_the_weights(
    make_cell: Callable[..., CellConfig],
) -> None:
    config = make_cell("weight_norm")
    model = build_cell_model(config, load_dataset("digits", {}))
    groups = group_parameters(model, weight_decay=0.1, decay_roles=["weight"])
    tensors = {group.role: len(group.parameters) for group in groups}
    # 9 convolutions and the classifier; a bias in each; 9 lengths.
    assert tensors == {"weight": 10, "bias": 10, "norm": 9}
