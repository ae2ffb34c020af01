"""Adaptive gradient clipping: its formula, what it spares, and where it stands in an update."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.clipping import adaptive_clip
from torch import nn

from normexp.config.schema import CellConfig, ModelConfig, OptimizerConfig, PlacementConfig
from normexp.data import load_dataset
from normexp.errors import UserError
from normexp.models import parameter_roles
from normexp.records import read_history
from normexp.training import check, clipping, cost
from normexp.training.build import build_start
from normexp.training.cell import train_cell
from normexp.training.clipping import AdaptiveClip, build_adaptive_clip, compute_unit_norms

MakeCell = Callable[..., CellConfig]
# Convolution, one filter, one product a filter, linear layers, gains or biases, a scalar.
SHAPES = [(4, 2, 3, 3), (1, 3, 3, 3), (5, 1, 1, 1), (3, 7), (3, 1), (6,), (1,), ()]


def with_optimizer(**options: object) -> OptimizerConfig:
    return OptimizerConfig("sgd", 0.05, 5e-4, ["weight"], {"momentum": 0.9}, **options)


@given(
    shape=st.sampled_from(SHAPES),
    weight_scale=st.sampled_from([0.0, 1e-5, 1.0]),
    gradient_scale=st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 1e8]),
    limit=st.sampled_from([1e-4, 0.01, 0.16]),
    seed=st.integers(0, 5),
)
def test_matches_the_formula(
    shape: tuple[int, ...], weight_scale: float, gradient_scale: float, limit: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Units of one weight differ in size, so that some are clipped and some are not.
    sizes = np.exp(rng.normal(0.0, 3.0, (*shape[:1], *[1] * (len(shape) - 1))))
    weight = np.asarray(rng.normal(size=shape) * weight_scale)
    gradient = np.asarray(rng.normal(size=shape) * sizes * gradient_scale)
    parameter = nn.Parameter(torch.from_numpy(weight.copy()))
    parameter.grad = torch.from_numpy(gradient.copy())
    AdaptiveClip([parameter], limit)()
    expected = adaptive_clip(weight, gradient, limit)
    np.testing.assert_allclose(parameter.grad, expected, rtol=1e-12, atol=0)
    np.testing.assert_array_equal(parameter.detach(), weight)


@pytest.mark.parametrize(
    ("shape", "norms_shape"),
    [((4, 2, 3, 3), (4, 1, 1, 1)), ((3, 7), (3, 1)), ((5, 1, 1, 1), ()), ((6,), ()), ((), ())],
)
def test_units_are_outputs_or_the_whole(
    shape: tuple[int, ...], norms_shape: tuple[int, ...]
) -> None:
    assert compute_unit_norms(torch.ones(shape)).shape == norms_shape


def test_what_is_within_the_limit_keeps_its_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 5, 3, 3, generator=generator))
    gradient = torch.randn(8, 5, 3, 3, generator=generator)
    parameter.grad = gradient.clone()
    AdaptiveClip([parameter], 1e6)()
    assert torch.equal(parameter.grad, gradient)


def test_a_parameter_without_gradient_is_left_out() -> None:
    parameter = nn.Parameter(torch.ones(3))
    AdaptiveClip([parameter], 0.01)()
    assert parameter.grad is None


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    for bad in (float("nan"), float("inf")):
        parameter = nn.Parameter(torch.ones(2, 2))
        parameter.grad = torch.tensor([[bad, 1.0], [1.0, 1.0]])
        AdaptiveClip([parameter], 0.01)()
        assert not parameter.grad[0].isfinite().all()
        assert parameter.grad[1].isfinite().all()


@pytest.mark.parametrize(
    ("model", "norm", "placement"),
    [
        ("cifar_resnet", "batch_norm", "layer_scale"),
        ("cifar_resnet", "no_norm", "fixup"),
        ("cifar_resnet", "scaled_weight_standardization", "skip_init"),
        ("mlp", "group_norm", "res_post"),
    ],
)
def test_weights_and_biases_but_the_classifiers_are_clipped(
    make_cell: MakeCell, model: str, norm: str, placement: str
) -> None:
    params = {"depth": 8, "width": 8} if model == "cifar_resnet" else {}
    config = make_cell(norm, model=ModelConfig(model, params), placement=PlacementConfig(placement))
    built = check.build_cell_model(config, load_dataset("digits", {}))
    clipped = {id(parameter) for parameter in build_adaptive_clip(built, 0.01).parameters}
    roles = parameter_roles(built)
    for name, parameter in built.named_parameters():
        is_spared = roles[name] in ("norm", "skip") or name.startswith("classifier.")
        assert (id(parameter) in clipped) == (not is_spared), name


def test_a_model_without_classifier_is_refused_before_training(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_cell(optimizer=with_optimizer(adaptive_clip=0.01))
    check.check_cell(config)

    def build(config: CellConfig, data: object) -> nn.Module:
        model = check_model(config, data)
        model.last = model._modules.pop("classifier")
        model.forward = lambda x: x
        return model

    check_model = check.build_cell_model
    monkeypatch.setattr(check, "build_cell_model", build)
    with pytest.raises(UserError, match=r"^optimizer\.adaptive_clip=0\.01: CifarResNet has no mod"):
        check.check_cell(config)


@pytest.mark.parametrize("value", [0.0, -0.01, float("nan"), float("inf")])
def test_a_limit_that_is_not_positive_is_refused(make_cell: MakeCell, value: float) -> None:
    config = make_cell(optimizer=with_optimizer(adaptive_clip=value))
    with pytest.raises(UserError, match=r"^optimizer\.adaptive_clip=.*: a number above 0"):
        check.check_cell(config)


def losses(config: CellConfig) -> np.ndarray:
    """Return all rows' values of a fresh run."""
    train_cell(config)
    history = read_history(check.check_cell(config).run_dir(config, 0))
    return history["value"].to_numpy()


def test_a_limit_out_of_reach_changes_no_bit(make_cell: MakeCell) -> None:
    off = losses(make_cell())
    np.testing.assert_array_equal(
        losses(make_cell(optimizer=with_optimizer(adaptive_clip=1e9))), off
    )
    assert (losses(make_cell(optimizer=with_optimizer(adaptive_clip=0.01))) != off).any()


def test_the_gradient_of_the_whole_update_is_clipped(make_cell: MakeCell) -> None:
    def train(micro: int, steps: int, limit: float | None) -> np.ndarray:
        return losses(
            make_cell(
                optimizer=with_optimizer(adaptive_clip=limit),
                micro_batch_size=micro,
                accumulation_steps=steps,
                precision="64-true",
            )
        )

    whole = train(8, 1, 0.01)
    np.testing.assert_allclose(train(2, 4, 0.01), whole, rtol=1e-9)
    assert np.abs(train(8, 1, None) - whole).max() > 1e-3


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_trains_in_every_precision(make_cell: MakeCell, precision: str) -> None:
    config = make_cell(
        norm="scaled_weight_standardization",
        optimizer=with_optimizer(adaptive_clip=0.05),
        precision=precision,
    )
    assert np.isfinite(losses(config)).all()


@pytest.mark.parametrize("limit", [None, 0.02])
def test_the_cost_pass_takes_the_same_update(make_cell: MakeCell, limit: float | None) -> None:
    config = make_cell(optimizer=with_optimizer(adaptive_clip=limit), precision="64-true")
    config.trainer.accelerator = "cpu"
    subject = cost._build_subject(config)
    reference = build_start(config, load_dataset("digits", {}), seed=0, lr=1e-6)
    subject.optimizer.param_groups[0]["lr"] = 1.0
    before = [p.detach().clone() for p in subject.model.parameters()]
    subject.update()

    logits = reference.model(subject.inputs)
    nn.functional.cross_entropy(logits, subject.targets).backward()
    decayed = {id(p) for p in reference.groups[0].parameters}
    assert reference.groups[0].role == "weight"
    for (name, p), old, new in zip(
        reference.model.named_parameters(), before, subject.model.parameters(), strict=True
    ):
        if id(p) not in decayed:
            continue
        gradient = p.grad.numpy()
        if limit is not None and not name.startswith("classifier"):
            gradient = adaptive_clip(old.numpy(), gradient, limit)
        step = gradient + 5e-4 * old.numpy()
        np.testing.assert_allclose((old - new.detach()).numpy(), step, rtol=1e-6, atol=1e-12)


def test_cells_with_and_without_are_measured_apart(make_cell: MakeCell) -> None:
    keys = [
        cost.cost_key(make_cell(optimizer=with_optimizer(adaptive_clip=limit)))
        for limit in (None, 0.01, 0.02)
    ]
    assert keys[0] == cost.cost_key(make_cell())
    assert keys[0] != keys[1] == keys[2]


def test_zero_weights_can_leave_zero() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    AdaptiveClip([parameter], 0.1)()
    most = 0.1 * clipping.MIN_WEIGHT_NORM
    torch.testing.assert_close(
        parameter.grad, torch.tensor([[0.6 * most, 0.8 * most, 0.0], [0.0, 0.0, 0.0]])
    )


def test_a_normalized_weight_is_clipped_as_its_raw_one(make_cell: MakeCell) -> None:
    config = make_cell(norm="weight_norm")
    model = check.build_cell_model(config, load_dataset("digits", {}))
    names = {id(p): name for name, p in model.named_parameters()}
    clipped = {names[id(p)] for p in build_adaptive_clip(model, 0.01).parameters}
    assert "stem.conv.parametrizations.weight.original1" in clipped
