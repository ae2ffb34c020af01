"""What stands around training, on a Transformer: probes, evaluation, freezing, clipping, cost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_texts import LABELS, LANGUAGE, LONGEST, TASKS
from torch import Tensor, nn

from normexp.config.schema import (
    BudgetConfig,
    CellConfig,
    DataConfig,
    EvaluationConfig,
    LrFactorsConfig,
    NormConfig,
    OptimizerConfig,
    PlacementConfig,
    RoleNormConfig,
    RolesConfig,
)
from normexp.data import PAD_ID, Dataset, load_dataset
from normexp.errors import UserError
from normexp.measure import batch_statistics, reestimate_running_statistics, running_statistic_error
from normexp.models import parameter_roles
from normexp.norms.freezing import freeze_norms
from normexp.norms.replace import replace_norms
from normexp.records import read_summary
from normexp.training import cell as cell_module
from normexp.training import cost
from normexp.training.build import build_start
from normexp.training.cell import train_cell
from normexp.training.check import check_cell
from normexp.training.clipping import build_adaptive_clip, compute_unit_norms
from normexp.training.resolve import resolve_cell

MakeCell = Callable[..., CellConfig]
NORMS = ["blocks.0.attention.norm_before", "blocks.0.mlp.norm_before", "final_norm"]
SHORT = BudgetConfig(updates=4)


@pytest.fixture
def train(
    make_text_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[nn.Module, dict[str, Any]]]:
    """Return a function that trains a cell and returns its model in eval mode and its summary."""
    models: list[nn.Module] = []
    real = cell_module._Run._prepare

    def prepare(run: Any) -> Any:
        prepared = real(run)
        models.append(prepared[0].model)
        return prepared

    monkeypatch.setattr(cell_module._Run, "_prepare", prepare)

    def run(task: str, norm: str | NormConfig, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
        settings = {"budget": SHORT, "num_evaluations": 1, "allow_leak": True, **changes}
        config = resolve_cell(make_text_cell(task, norm, **settings))
        train_cell(config)
        summary = read_summary(check_cell(config).run_dir(config, 0))
        assert summary is not None
        assert summary["status"] == "completed", summary["reason"]
        return models[-1].eval(), summary

    return run


def valid_inputs_of(model: nn.Module, path: str, inputs: Tensor) -> Tensor:
    """Return what enters a layer at valid positions: text by text, each without its padding."""
    seen: list[Tensor] = []
    alone = copy.deepcopy(model).eval()
    alone.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for text in inputs:
            length = int((text != PAD_ID).sum())
            if length:
                alone(text[None, :length])
    return torch.cat([x.flatten(0, 1) for x in seen])


def test_the_population_of_a_masked_norm_is_of_valid_positions(train: Callable[..., Any]) -> None:
    model, summary = train(LABELS, "batch_norm", probes=["running_statistics"], precision="64-true")
    inputs = load_dataset(LABELS, {}).train.inputs
    # The padding outweighs the texts, so that it would show.
    assert (inputs == PAD_ID).sum() > 2 * (inputs != PAD_ID).sum()
    found = {error.path: error for error in running_statistic_error(model, inputs, batch_size=7)}
    assert list(found) == NORMS
    for path, error in found.items():
        x = valid_inputs_of(model, path, inputs)
        assert len(x) == (inputs != PAD_ID).sum()
        layer: Any = model.get_submodule(path)
        var = x.var(0, correction=0) + layer.eps
        mean_error = ((layer.running_mean - x.mean(0)).square() / var).mean().sqrt()
        assert error.mean_error == pytest.approx(float(mean_error), rel=1e-10)
        ratio = ((layer.running_var + layer.eps) / var).log().abs().mean()
        assert error.var_ratio_error == pytest.approx(float(ratio), rel=1e-10)
    worst = max(error.mean_error for error in found.values())
    metric = summary["metrics"]["running_statistic_mean_error_max"]
    assert metric == pytest.approx(worst, rel=1e-10)


def test_folding_into_the_layers_behind(train: Callable[..., Any]) -> None:
    # A language model's blocks have no padding, so its norms are called without a mask.
    _, summary = train(LANGUAGE, "batch_norm", probes=["folding"])
    found = {entry["path"]: entry for entry in summary["probes"]["folding"]}
    assert [found[path]["into"] for path in NORMS] == [None, "blocks.0.mlp.branch.up", "head"]
    # Queries, keys and values each take its output.
    assert found[NORMS[0]]["reason"].startswith("no convolution or linear layer")
    assert 0 < summary["metrics"]["folding/max_difference"] < 1e-12
    assert summary["metrics"]["folding/num_folded"] == 2


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        ("batch_norm", "it is called with more than its input"),
        ("layer_norm", "layer_norm computes its statistics from each input"),
    ],
)
def test_what_is_not_foldable_says_why(train: Callable[..., Any], norm: str, reason: str) -> None:
    _, summary = train(LABELS, norm, probes=["folding"])
    assert {entry["reason"] for entry in summary["probes"]["folding"]} == {reason}
    assert summary["metrics"]["folding/num_folded"] == 0
    assert summary["metrics"]["folding/max_difference"] == 0


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), targets))


@pytest.mark.parametrize("padding", ["batch", "longest"])
@pytest.mark.parametrize("statistics", ["reestimated", "batch"])
def test_statistics_of_an_evaluation_are_of_valid_positions(
    train: Callable[..., Any], statistics: str, padding: str
) -> None:
    evaluation = EvaluationConfig(statistics, "population", None, 13)
    data = DataConfig(LABELS, {"padding": padding})
    model, summary = train(
        LABELS, "batch_norm", evaluation=evaluation, precision="64-true", data=data
    )
    loaded = load_dataset(LABELS, data.params)
    test = loaded.test
    assert len(test) == 13  # one batch
    if statistics == "batch":
        with batch_statistics(model):
            expected = loss_of(model, test.inputs, test.targets)
        # In training a layer takes the statistics of the batch too.
        by_training = loss_of(copy.deepcopy(model).train(), test.inputs, test.targets)
        assert expected == pytest.approx(by_training, rel=1e-12)
    else:
        model = copy.deepcopy(model)
        reestimate_running_statistics(model, loaded.train.inputs, batch_size=13)
        expected = loss_of(model, test.inputs, test.targets)
        # What enters the first norm depends on no other norm, nor on batches.
        x = valid_inputs_of(model, NORMS[0], loaded.train.inputs)
        layer: Any = model.get_submodule(NORMS[0])
        torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=1e-12, atol=1e-12)
        var = x.var(0, correction=0)
        torch.testing.assert_close(layer.running_var, var, rtol=1e-12, atol=1e-12)
    assert summary["metrics"]["test/loss"] == pytest.approx(expected, rel=1e-12)


def test_batches_of_an_evaluation_need_two_valid_positions(make_text_cell: MakeCell) -> None:
    # Each sixth text is empty, the first one too.
    reestimated = EvaluationConfig("reestimated", "population", None, 1)
    with pytest.raises(UserError, match=r"number 0 of the training split .* have 0 tokens"):
        check_cell(make_text_cell(LABELS, "batch_norm", evaluation=reestimated))
    batch = EvaluationConfig("batch", None, None, 1)
    with pytest.raises(UserError, match=r"number 0 of the validation split .* have 0 tokens"):
        check_cell(make_text_cell(LABELS, "batch_norm", evaluation=batch))
    # 44 texts in batches of 6: none is empty all over.
    reestimated.batch_size = 6
    check_cell(make_text_cell(LABELS, "batch_norm", evaluation=reestimated))
    # Without a mask the padding counts.
    check_cell(
        make_text_cell(
            LABELS,
            "batch_norm",
            evaluation=batch,
            data=DataConfig(LABELS, {"padding": "longest"}),
            model_params={"mask_norms": False},
        )
    )


def test_frozen_norms_keep_the_logits_and_see_no_padding(train: Callable[..., Any]) -> None:
    model, _ = train(LABELS, "batch_norm", precision="64-true")
    inputs = load_dataset(LABELS, {}).val.inputs
    mask = inputs != PAD_ID
    before = model(inputs)
    assert freeze_norms(model) == NORMS
    model.train()  # which sets nothing free
    torch.testing.assert_close(model(inputs), before, rtol=1e-12, atol=1e-12)
    other = torch.where(mask, inputs, 5)
    assert torch.equal(model(other, mask), model(inputs, mask))


def test_replaced_norms_are_those_of_a_model_built_with_them(
    make_text_cell: MakeCell,
) -> None:
    data = load_dataset(LABELS, {})
    models = [
        build_start(make_text_cell(LABELS, norm), data, seed=0, lr=0.1).model.eval()
        for norm in ("batch_norm", "layer_norm")
    ]
    replaced = replace_norms(models[0], "layer_norm", example=data.val.inputs[:4])
    assert [entry.path for entry in replaced] == NORMS
    assert torch.equal(models[0](data.val.inputs), models[1](data.val.inputs))


@pytest.mark.parametrize(
    ("task", "tie", "spared"),
    [
        (LABELS, False, {"head.weight", "head.bias"}),
        (LANGUAGE, False, {"head.weight"}),
        (LANGUAGE, True, {"token_embedding.weight"}),
    ],
)
def test_adaptive_clipping_spares_what_makes_the_logits(
    make_text_cell: MakeCell, train: Callable[..., Any], task: str, tie: bool, spared: set[str]
) -> None:
    optimizer = OptimizerConfig("sgd", 0.05, 0.0, [], {"momentum": 0.9}, adaptive_clip=1e-3)
    changes = {"optimizer": optimizer, "model_params": {"tie_embeddings": tie}}
    train(task, "layer_norm", **changes)
    config = make_text_cell(task, **changes)
    data = load_dataset(task, {})
    model = build_start(config, data, seed=0, lr=0.1).model
    model(data.train.inputs[:8]).square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    build_adaptive_clip(model, 1e-3)()
    roles = parameter_roles(model)
    for name, parameter in model.named_parameters():
        if name in spared or roles[name] == "norm":
            assert torch.equal(parameter.grad, gradients[name]), name
        else:
            largest = 1e-3 * compute_unit_norms(parameter).clamp(min=1e-3)
            assert (compute_unit_norms(parameter.grad) <= largest * (1 + 1e-5)).all(), name
    assert not torch.equal(
        model.position_embedding.weight.grad, gradients["position_embedding.weight"]
    )


def test_parameters_by_role(train: Callable[..., Any]) -> None:
    optimizer = OptimizerConfig(
        "adamw", 0.01, 0.1, ["weight", "skip"], {}, LrFactorsConfig(norm=0.5, skip=4.0)
    )
    placement = PlacementConfig("rezero_pre")
    _, summary = train(LABELS, "layer_norm", optimizer=optimizer, placement=placement)
    groups = {group["role"]: group for group in summary["parameter_groups"]}
    assert {role: group["weight_decay"] for role, group in groups.items()} == {
        "weight": 0.1,
        "bias": 0.0,
        "norm": 0.0,
        "skip": 0.1,
    }
    # Two factors of skips, gain and shift of three norms of 8 channels, six biases and the head's.
    assert groups["skip"]["num_parameters"] == 2
    assert groups["norm"]["num_parameters"] == 3 * 2 * 8
    assert groups["bias"]["num_parameters"] == 4 * 8 + 16 + 8 + 3
    assert summary["model"]["num_parameters"] == sum(g["num_parameters"] for g in groups.values())
    factors = {role: group["lr_factor"] for role, group in groups.items()}
    assert factors == {"weight": 1.0, "bias": 1.0, "norm": 0.5, "skip": 4.0}


@pytest.mark.parametrize(
    ("norm", "placement"),
    [("weight_norm", "none"), ("weight_norm", "pre"), ("weight_standardization", "pre")],
)
def test_norms_of_weights(train: Callable[..., Any], norm: str, placement: str) -> None:
    # A group of one channel would be centred over what the model takes the mean over.
    params = {"num_groups": 2} if norm == "weight_standardization" else {}
    model, summary = train(LABELS, NormConfig(norm, params), placement=PlacementConfig(placement))
    paths = [path for path, m in model.named_modules() if hasattr(m, "weight_norm_record")]
    assert paths == [
        *(f"blocks.0.attention.branch.{name}" for name in ("query", "key", "value", "out")),
        "blocks.0.mlp.branch.up",
        "blocks.0.mlp.branch.down",
    ]
    assert torch.isfinite(torch.tensor(summary["metrics"]["test/loss"]))


def test_roles_have_norms_of_their_own(train: Callable[..., Any]) -> None:
    roles = RolesConfig(
        qk=RoleNormConfig("rms_norm"),
        mlp=RoleNormConfig("batch_norm"),
        final=RoleNormConfig("scale_norm"),
    )
    _, summary = train(LABELS, NormConfig("layer_norm", {}, roles))
    found = {(layer["role"], layer["name"]) for layer in summary["model"]["norm_layers"]}
    assert found == {
        ("attention", "layer_norm"),
        ("qk", "rms_norm"),
        ("mlp", "batch_norm"),
        ("final", "scale_norm"),
    }


@pytest.mark.parametrize("task", TASKS)
def test_precisions(train: Callable[..., Any], task: str) -> None:
    metrics = {}
    for precision in ("32-true", "64-true", "bf16-mixed"):
        model, summary = train(task, "rms_norm", precision=precision)
        expected = torch.float64 if precision == "64-true" else torch.float32
        assert {p.dtype for p in model.parameters()} == {expected}
        metrics[precision] = summary["metrics"]["val/loss"]
    assert metrics["32-true"] == pytest.approx(metrics["64-true"], rel=1e-5)
    # Seven bits of a number's fraction are kept: 2^-8 an operation, and some of it averages out.
    assert metrics["bf16-mixed"] == pytest.approx(metrics["64-true"], rel=2e-2)
    assert metrics["bf16-mixed"] != pytest.approx(metrics["64-true"], rel=1e-6)


def test_a_leak_is_allowed_where_there_is_one(make_text_cell: MakeCell) -> None:
    def resolved(task: str, norm: str) -> CellConfig:
        return resolve_cell(make_text_cell(task, norm, allow_leak=True))

    assert resolved(LANGUAGE, "batch_norm").allow_leak is True
    assert check_cell(resolved(LANGUAGE, "batch_norm")).is_leaking
    plain = resolve_cell(make_text_cell(LANGUAGE, "layer_norm"))
    for task, norm in ((LANGUAGE, "layer_norm"), (LABELS, "batch_norm")):
        assert resolved(task, norm).allow_leak is False
        assert not check_cell(resolved(task, norm)).is_leaking
    # So one computation is one cell.
    assert check_cell(resolved(LANGUAGE, "layer_norm")).cell == check_cell(plain).cell


def build_cost_cell(make_text_cell: MakeCell, task: str, norm: str, **changes: Any) -> CellConfig:
    config = make_text_cell(task, norm, allow_leak=True, **changes)
    return resolve_cell(config)


def test_cost_of_a_transformer(make_text_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "ROUNDS", 2)
    monkeypatch.setattr(cost, "MIN_WINDOW_S", 1e-4)
    cells = [
        build_cost_cell(make_text_cell, task, norm)
        for task, norm in (
            (LANGUAGE, "layer_norm"),
            (LABELS, "batch_norm"),
            (LANGUAGE, "batch_norm"),
        )
    ]
    records = cost.measure_costs(cells)
    data: list[Dataset] = [load_dataset(task, {}) for task in (LANGUAGE, LABELS, LANGUAGE)]
    for record, dataset in zip(records, data, strict=True):
        positions = dataset.input_shape[0]
        assert record["conditions"]["num_positions"] == positions
        # Embeddings; four square layers and two of the feed-forward network, with biases; three
        # norms; the head, which has a bias where texts are classified.
        assert dataset.tokens is not None
        embedded = (dataset.tokens.vocabulary_size + positions) * 8
        block = 4 * (8 * 8 + 8) + (8 * 16 + 16) + (16 * 8 + 8)
        head = 8 * dataset.num_classes
        head += 0 if dataset.tokens.is_language_modeling else dataset.num_classes
        parameters = embedded + block + 3 * 2 * 8 + head
        assert record["num_parameters"] == parameters
        assert record["memory"]["parameter_bytes"] == 4 * parameters
        assert record["memory"]["gradient_bytes"] == 4 * parameters
        assert record["memory"]["saved_for_backward_bytes"] > 4 * positions * 8 * 4
        timing = record["timing"]
        assert 0 < timing["forward_ms"]["median"] < timing["update_ms"]["median"]
        assert timing["prediction_ms"]["median"] > 0
    # Texts with all their padding; a mask takes the fused kernel away.
    assert records[1]["conditions"]["num_positions"] == LONGEST
    assert [record["norm_kernel"] for record in records] == ["fused", "composite", "fused"]


def test_the_timed_loss_is_the_mean_over_targets(make_text_cell: MakeCell) -> None:
    subject = cost._build_subject(build_cost_cell(make_text_cell, LANGUAGE, "layer_norm"))
    with torch.no_grad():
        logits = subject.model(subject.inputs)
    mean = nn.functional.cross_entropy(logits.flatten(0, 1), subject.targets.flatten())
    # Of two micro-batches.
    assert subject.forward().item() == pytest.approx(float(mean) / 2, rel=1e-6)


def test_costs_of_texts_of_other_shapes_are_measured_apart(make_text_cell: MakeCell) -> None:
    def key(**params: Any) -> str:
        return cost.cost_key(make_text_cell(LABELS, data=DataConfig(LABELS, params)))

    assert key(tokenizer="characters") == key(tokenizer="characters")
    assert key(tokenizer="characters") != key(tokenizer="bytes")
    assert key(padding_share=0.0) != key(padding_share=0.5)
