"""An update of texts is the mean over its valid targets, whatever it is cut into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.core.optimizer import LightningOptimizer
from small_texts import LABELS, LANGUAGE, SIZES, TASKS, draw_labelled
from torch import Tensor, nn

from normexp.config.schema import BudgetConfig, CellConfig, DataConfig, OptimizerConfig
from normexp.data import (
    DATASETS,
    IGNORED_TARGET,
    PAD_ID,
    Dataset,
    DatasetCard,
    Split,
    TextBytes,
    TokenTask,
)
from normexp.data.batches import IndexStream, UpdatePlan
from normexp.models import build_model, initialize
from normexp.norms import NormFactory
from normexp.records import read_history, read_summary
from normexp.training import cell as cell_module
from normexp.training.cell import train_cell
from normexp.training.check import check_cell
from normexp.training.optim import build_optimizer, group_parameters
from normexp.training.solo import SoloModule
from normexp.training.windows import WindowSource

MakeCell = Callable[..., CellConfig]
NUM_TRAIN, LENGTH, VOCABULARY = 12, 9, 11
# Two updates of six texts, of other numbers of targets each.
CUTS = [(6, 1), (3, 2), (2, 3), (1, 6)]


def build_transformer(task: TokenTask, num_outputs: int, norm: str = "layer_norm") -> nn.Module:
    model = build_model(
        "transformer",
        {"depth": 1, "width": 8, "num_heads": 2, "mlp_ratio": 2},
        input_shape=(LENGTH,),
        num_classes=num_outputs,
        norm=NormFactory(norm),
        placement="pre",
        tokens=task,
    )
    initialize(model, seed=1)
    return model.double()


class NotingOptimizer(LightningOptimizer):
    """Notes the gradients of each update in place of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer)
        self.model = model
        self.gradients: list[dict[str, Tensor]] = []

    def step(self, *_: Any, **__: Any) -> None:
        named = self.model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def take_updates(
    model: nn.Module, data: Dataset, plan: UpdatePlan, window_updates: int
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Return gradients of each update and the mean losses of windows, at the initial weights."""
    groups = group_parameters(model, weight_decay=0.0, decay_roles=[])
    optimizer = build_optimizer("sgd", groups, lr=0.1, params={"momentum": 0.0})
    module = SoloModule(model, plan=plan, optimizer=optimizer, lr=lambda _: 0.1)
    noting = NotingOptimizer(optimizer, model)
    module.recorder = mock.Mock()
    source = WindowSource(module, IndexStream(plan, 3), data, {}, window_updates)
    with (
        mock.patch.object(module, "optimizers", return_value=noting),
        mock.patch.object(module, "manual_backward", lambda loss: loss.backward()),
    ):
        for window in source:
            module.training_step(window, 0)
    losses = [call.args[1]["loss"] for call in module.recorder.record.call_args_list]
    return noting.gradients, losses


def take_by_hand(
    model: nn.Module, data: Dataset, indices: np.ndarray
) -> tuple[dict[str, Tensor], float]:
    """Return gradients and loss of one update: text by text, each at its own length."""
    assert data.tokens is not None
    losses = []
    for index in indices:
        inputs, targets = data.train.inputs[index], data.train.targets[index]
        length = max(1, int((inputs != PAD_ID).sum()))
        logits = model(inputs[None, :length]).squeeze(0).log_softmax(-1)
        if not data.tokens.is_language_modeling:
            losses.append(-logits[targets])
            continue
        asked = [position for position in range(LENGTH) if targets[position] != IGNORED_TARGET]
        losses += [-logits[position, targets[position]] for position in asked]
    model.zero_grad()
    if not losses:
        return {}, 0.0
    mean = torch.stack(losses).sum() / len(losses)
    mean.backward()
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}, mean.item()


def draw_split(draw: st.DrawFn, task: TokenTask) -> Split:
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, VOCABULARY, (NUM_TRAIN, LENGTH))
    counts = draw(st.lists(st.integers(0, LENGTH), min_size=NUM_TRAIN, max_size=NUM_TRAIN))
    beyond = np.arange(LENGTH) >= np.array(counts)[:, None]
    if task.is_language_modeling:
        # As many targets a text as drawn, at the end: none in some, all in others.
        targets = np.where(
            beyond[:, ::-1], IGNORED_TARGET, rng.integers(0, VOCABULARY, beyond.shape)
        )
        return Split(torch.from_numpy(inputs), torch.from_numpy(targets))
    inputs[beyond] = PAD_ID
    return Split(torch.from_numpy(inputs), torch.from_numpy(rng.integers(0, 3, NUM_TRAIN)))


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(source=st.data())
def test_an_update_is_the_mean_over_its_targets_however_it_is_cut(
    task: str, source: st.DataObject
) -> None:
    is_language = task == LANGUAGE
    tokens = TokenTask(VOCABULARY, is_language, has_padding=not is_language)
    split = source.draw(st.composite(draw_split)(tokens))
    is_trimmed = not is_language and source.draw(st.booleans())
    micro, steps = source.draw(st.sampled_from(CUTS))
    num_outputs = VOCABULARY if is_language else 3
    data = Dataset(
        "drawn", split, split, split, num_outputs, "", tokens=tokens, is_trimmed=is_trimmed
    )
    plan = UpdatePlan(NUM_TRAIN, micro, steps, NUM_TRAIN, 1)
    model = build_transformer(tokens, num_outputs)
    gradients, losses = take_updates(model, data, plan, source.draw(st.integers(1, 2)))
    by_hand = [take_by_hand(model, data, row) for row in IndexStream(plan, 3).indices(0, 2)]
    assert np.mean(losses) == pytest.approx(np.mean([loss for _, loss in by_hand]), rel=1e-12)
    for found, (expected, _) in zip(gradients, by_hand, strict=True):
        for name, gradient in found.items():
            wanted = expected.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
        assert expected.keys() <= found.keys()


@pytest.mark.parametrize("window_updates", [1, 2, 5])
def test_the_size_of_a_window_does_not_reach_an_update(window_updates: int) -> None:
    # Five updates of texts of very different lengths, cut in windows of 1, 2 + 2 + 1, or all.
    labelled = draw_labelled("train")
    lengths = np.array([min(len(text), LENGTH) for text in labelled.texts])
    inputs = np.where(np.arange(LENGTH) < lengths[:, None], 3, PAD_ID)
    split = Split(torch.from_numpy(inputs), torch.tensor(labelled.labels))
    tokens = TokenTask(VOCABULARY, False, has_padding=True)
    data = Dataset("drawn", split, split, split, 3, "", tokens=tokens, is_trimmed=True)
    plan = UpdatePlan(len(split), 4, 2, 40, 1)
    gradients, losses = take_updates(build_transformer(tokens, 3), data, plan, window_updates)
    alone, _ = take_updates(build_transformer(tokens, 3), data, plan, 1)
    assert len(gradients) == 5
    assert len(losses) == math.ceil(5 / window_updates)
    for one, other in zip(gradients, alone, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[[CellConfig], tuple[nn.Module, dict]]:
    """Return a function that trains a cell and returns its model and its summary."""
    modules: list[SoloModule] = []
    real = cell_module._Run._prepare

    def prepare(run: Any) -> tuple[SoloModule, int]:
        prepared = real(run)
        modules.append(prepared[0])
        return prepared

    monkeypatch.setattr(cell_module._Run, "_prepare", prepare)

    def train(config: CellConfig) -> tuple[nn.Module, dict]:
        train_cell(config)
        summary = read_summary(check_cell(config).run_dir(config, config.seeds[0]))
        assert summary is not None
        assert summary["status"] == "completed", summary["reason"]
        return modules[-1].model, summary

    return train


SGD = OptimizerConfig("sgd", 0.05, 0.01, ["weight"], {"momentum": 0.9})


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm", "layer_norm_chw"])
def test_trimming_and_the_length_of_padding_change_nothing(
    make_text_cell: MakeCell, trained: Callable[..., Any], norm: str
) -> None:
    """Loss, weights and running statistics after 12 updates; float64 leaves rounding alone."""
    states, metrics = [], []
    for params in (
        {"padding": "batch"},
        {"padding": "longest"},
        {"padding": "longest", "padding_share": 0.7},
    ):
        # Embedded positions are initialised by the shape of their table; rotated ones have none.
        config = make_text_cell(
            LABELS,
            norm,
            data=DataConfig(LABELS, params),
            model_params={"positions": "rotary"},
            optimizer=SGD,
            precision="64-true",
        )
        model, summary = trained(config)
        states.append(model.state_dict())
        metrics.append(summary["metrics"])
    for state, values in zip(states[1:], metrics[1:], strict=True):
        for name, tensor in states[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
        assert values == pytest.approx(metrics[0], rel=1e-10)
    assert any("running_var" in name for name in states[0]) == (norm == "batch_norm")


def register(name: str, split: Split, tokens: TokenTask, num_classes: int, **facts: Any) -> None:
    card = DatasetCard(description="made", source="here", is_text=True)

    def build() -> Dataset:
        return Dataset(name, split, split, split, num_classes, name, tokens=tokens, **facts)

    DATASETS.register(name, card)(build)


def test_updates_without_a_target_have_the_loss_zero_and_change_nothing(
    make_text_cell: MakeCell, trained: Callable[..., Any]
) -> None:
    inputs = torch.full((8, 5), 3)
    split = Split(inputs, torch.full((8, 5), IGNORED_TARGET), TextBytes(40.0, 0.0))
    register("nothing_asked", split, TokenTask(6, True, False), 6)
    optimizer = OptimizerConfig("sgd", 0.5, 0.0, ["weight"], {"momentum": 0.9})
    config = make_text_cell("nothing_asked", optimizer=optimizer)
    model, summary = trained(config)
    start = cell_module.build_start(
        config, cell_module.load_dataset("nothing_asked", {}), seed=0, lr=0.1
    )
    for name, tensor in start.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    history = read_history(check_cell(config).run_dir(config, 0))
    assert (history.query("metric == 'loss'")["value"] == 0.0).all()
    # e^0; and no bit a byte where no byte was predicted.
    assert summary["metrics"]["test/perplexity"] == 1.0
    assert summary["metrics"]["test/bits_per_byte"] == 0.0
    assert summary["totals"]["targets"] == 0
    assert summary["totals"]["tokens"] == 12 * 8 * 5


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm", "layer_norm_chw"])
def test_texts_that_are_all_empty_train_the_bias_of_the_head_alone(
    make_text_cell: MakeCell, trained: Callable[..., Any], norm: str
) -> None:
    inputs = torch.full((8, 4), PAD_ID)
    split = Split(inputs, torch.tensor([0, 1, 1, 1, 1, 1, 1, 2]))
    register("all_empty", split, TokenTask(6, False, True), 3, is_trimmed=True)
    optimizer = OptimizerConfig("sgd", 0.5, 0.0, ["weight"], {"momentum": 0.0})
    config = make_text_cell("all_empty", norm, optimizer=optimizer)
    model, summary = trained(config)
    start = cell_module.build_start(
        config, cell_module.load_dataset("all_empty", {}), seed=0, lr=0.1
    )
    for name, tensor in start.model.state_dict().items():
        is_same = torch.equal(model.state_dict()[name], tensor)
        assert is_same == (name != "head.bias"), name
    assert summary["metrics"]["test/accuracy"] == 0.75
    assert summary["totals"]["tokens"] == 0
    # One position a text is left, so that there is something to call the model with.
    assert summary["totals"]["padded_share"] == 1.0


@pytest.fixture
def given_to_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """Return (valid positions, positions, targets) of every micro-batch that was trained on."""
    seen: list[tuple[int, int, int]] = []
    real = SoloModule.training_step

    def step(module: SoloModule, window: Any, batch_idx: int) -> None:
        targets = window.targets.flatten(0, 1)

        def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            (inputs,) = arguments
            asked = targets[note.count] != IGNORED_TARGET
            note.count += 1
            seen.append((int((inputs != PAD_ID).sum()), inputs.numel(), int(asked.sum())))

        note.count = 0
        handle = module.model.register_forward_pre_hook(note)
        real(module, window, batch_idx)
        handle.remove()

    monkeypatch.setattr(SoloModule, "training_step", step)
    return seen


@pytest.mark.parametrize(
    ("task", "params"), [(LANGUAGE, {}), (LABELS, {}), (LABELS, {"padding": "longest"})]
)
def test_totals_are_what_the_model_was_given(
    make_text_cell: MakeCell,
    trained: Callable[..., Any],
    given_to_models: list[tuple[int, int, int]],
    task: str,
    params: dict[str, Any],
) -> None:
    found = []
    for seed in (0, 1):
        given_to_models.clear()
        config = make_text_cell(
            task, data=DataConfig(task, params), seeds=[seed], budget=BudgetConfig(updates=7)
        )
        config.trainer.window_updates = 3
        _, summary = trained(config)
        assert len(given_to_models) == 14
        tokens, positions, targets = map(sum, zip(*given_to_models, strict=True))
        totals = summary["totals"]
        assert (totals["tokens"], totals["targets"]) == (tokens, targets)
        assert totals["padded_share"] == pytest.approx(1.0 - tokens / positions, abs=1e-15)
        found.append(tokens)
    # Of 44 texts an epoch leaves out four, others in each seed; blocks are all of one length.
    assert (found[0] == found[1]) == (task == LANGUAGE)
    if task == LABELS:
        assert targets == 7 * 8
        assert SIZES["train"] % 8 == 4


def test_images_have_no_tokens(make_cell: MakeCell, trained: Callable[..., Any]) -> None:
    totals = trained(make_cell(budget=BudgetConfig(updates=2)))[1]["totals"]
    assert [totals[name] for name in ("tokens", "targets", "padded_share")] == [None] * 3


def test_windows_change_no_number_of_a_run(
    make_text_cell: MakeCell, trained: Callable[..., Any], tmp_path: Path
) -> None:
    states, metrics = [], []
    for window_updates in (1, 5, 50):
        root = str(tmp_path / str(window_updates))
        config = make_text_cell(LABELS, "batch_norm", output_root=root)
        config.trainer.window_updates = window_updates
        model, summary = trained(config)
        states.append(model.state_dict())
        metrics.append(summary["metrics"])
    for state, values in zip(states[1:], metrics[1:], strict=True):
        assert all(torch.equal(state[name], states[0][name]) for name in state)
        # The mean over windows of means is another sum of the same losses.
        assert values == pytest.approx(metrics[0], rel=1e-14)
        assert values["test/loss"] == metrics[0]["test/loss"]
