"""Metrics of texts: against sums by hand, and the same whatever batches texts are put into."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_texts import (
    LABELS,
    LANGUAGE,
    LONGEST,
    build_small_labels,
    build_small_language,
    draw_documents,
)
from torch import nn

from normexp.config.schema import BudgetConfig, CellConfig, DataConfig, OptimizerConfig
from normexp.data import IGNORED_TARGET, Dataset, Split, TextBytes
from normexp.models import build_model, initialize
from normexp.norms import NormFactory
from normexp.records import read_history, read_summary
from normexp.training.cell import train_cell
from normexp.training.check import check_cell
from normexp.training.objective import EvaluationSums, sum_losses
from normexp.training.windows import EvaluationSource

MakeCell = Callable[..., CellConfig]
CPU = torch.device("cpu")


class Host:
    """Stands for the module that an evaluation asks for tensors."""

    update = evaluation = 0
    device = CPU

    def split_on_device(self, split: Split) -> Split:
        return split


def build_transformer(data: Dataset, norm: str = "layer_norm") -> nn.Module:
    model = build_model(
        "transformer",
        {"depth": 1, "width": 8, "num_heads": 2, "mlp_ratio": 2, "positions": "rotary"},
        input_shape=data.input_shape,
        num_classes=data.num_classes,
        norm=NormFactory(norm),
        placement="pre",
        tokens=data.tokens,
    )
    initialize(model, seed=2)
    return model.double().eval()


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset, batch_size: int, **options: Any) -> dict[str, float]:
    sums = EvaluationSums(CPU, data.val.text_bytes)
    source = EvaluationSource(Host(), data.val, batch_size, is_trimmed=data.is_trimmed, **options)
    for inputs, targets in source:
        sums.add(model(inputs)[-len(targets) :], targets)
    return sums.means()


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm", "layer_norm_chw"])
def test_metrics_do_not_depend_on_batches_nor_on_the_length_of_padding(norm: str) -> None:
    datasets = [
        build_small_labels(),
        build_small_labels(padding="longest"),
        build_small_labels(padding="longest", padding_share=0.9),
    ]
    assert [data.input_shape[0] for data in datasets] == [LONGEST, LONGEST, 10 * LONGEST]
    model = build_transformer(datasets[0], norm)
    # Rotation is by position alone, so that the weights fit every length.
    models = [build_transformer(data, norm) for data in datasets]
    for other in models:
        other.load_state_dict(model.state_dict())
    reference = evaluate(model, datasets[0], 21)
    assert reference["loss"] > 0.5
    for data, other in zip(datasets, models, strict=True):
        for batch_size in (1, 4, 64):
            found = evaluate(other, data, batch_size)
            assert found["loss"] == pytest.approx(reference["loss"], rel=1e-12)
            assert found["accuracy"] == reference["accuracy"]


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_metrics_of_a_language_model_do_not_depend_on_batches(batch_size: int) -> None:
    data = build_small_language(context_length=8)
    # Else a mean of the means of batches would do as well.
    assert data.val.num_targets is not None
    assert len(set(data.val.num_targets)) > 1
    assert len(data.val) % 4 == 1
    model = build_transformer(data)
    reference = evaluate(model, data, len(data.val))
    assert evaluate(model, data, batch_size) == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize("task", [LANGUAGE, LABELS])
def test_the_key_of_the_batch_size_does_not_change_a_run(
    make_text_cell: MakeCell, task: str
) -> None:
    found = []
    for size in (2, 512):
        config = make_text_cell(task, budget=BudgetConfig(updates=4), precision="64-true")
        config.name = f"size{size}"
        config.trainer.eval_batch_size = size
        train_cell(config)
        history = read_history(check_cell(config).run_dir(config, 0))
        found.append(history.drop(columns="wall_s"))
    keys = ["update", "split", "metric"]
    assert found[0][keys].values.tolist() == found[1][keys].values.tolist()
    assert found[0]["value"].tolist() == pytest.approx(found[1]["value"].tolist(), rel=1e-12)


def count_bytes(tokenizer: str, documents: list[str], known: set[str] | None) -> int:
    """Return the bytes of documents with one for each end, as a user would count them."""
    if tokenizer != "words":
        kept = [c for text in documents for c in text if known is None or c in known]
        return len("".join(kept).encode()) + len(documents)
    words = [word for text in documents for word in re.findall(r"\w+|[^\w\s]", text)]
    kept = [word for word in words if known is None or word in known]
    return sum(len(word.encode()) + 1 for word in kept) + len(documents)


@pytest.mark.parametrize(
    ("tokenizer", "max_vocabulary"),
    [("bytes", None), ("characters", None), ("characters", 6), ("words", None), ("words", 40)],
)
def test_perplexity_and_bits_a_byte_by_hand(tokenizer: str, max_vocabulary: int | None) -> None:
    data = build_small_language(tokenizer=tokenizer, max_vocabulary=max_vocabulary)
    assert data.tokens is not None
    known = None
    if tokenizer != "bytes":
        symbols = re.findall(
            r"\w+|[^\w\s]" if tokenizer == "words" else r"(?s).",
            "\n".join(draw_documents()["train"]),
        )
        symbols = [symbol for symbol in symbols if symbol != "\n"]
        counts = sorted(set(symbols), key=lambda symbol: (-symbols.count(symbol), symbol))
        known = set(counts[: None if max_vocabulary is None else max_vocabulary - 3])
    num_bytes = count_bytes(tokenizer, draw_documents()["val"], None)
    num_unknown_bytes = num_bytes - count_bytes(tokenizer, draw_documents()["val"], known)
    model = build_transformer(data)
    found = evaluate(model, data, 5)

    nats, right, count = 0.0, 0, 0
    with torch.no_grad():
        for inputs, targets in zip(data.val.inputs, data.val.targets, strict=True):
            probabilities = model(inputs[None])[0].softmax(-1)
            for row, target in zip(probabilities, targets.tolist(), strict=True):
                if target == IGNORED_TARGET:
                    continue
                loss = -math.log(row[target])
                count += 1
                nats += loss
                right += int(row.argmax()) == target
    assert (num_unknown_bytes > 0) == (max_vocabulary is not None or tokenizer == "words")
    assert found["loss"] == pytest.approx(nats / count, rel=1e-12)
    assert found["accuracy"] == pytest.approx(right / count, rel=1e-15)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-12)
    # What is unknown is spelled at 8 bits a byte.
    bits = nats / math.log(2) + 8 * num_unknown_bytes
    assert found["bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-12)


def test_a_uniform_model_of_bytes_needs_log2_of_its_vocabulary_a_byte() -> None:
    data = build_small_language(tokenizer="bytes")
    sums = EvaluationSums(CPU, data.val.text_bytes)
    sums.add(torch.zeros(*data.val.targets.shape, 259), data.val.targets)
    means = sums.means()
    assert means["perplexity"] == pytest.approx(259, rel=1e-6)
    # Every byte is one token, and so is every end.
    assert means["bits_per_byte"] == pytest.approx(math.log2(259), rel=1e-6)


logits_and_targets = st.integers(0, 2**32 - 1).map(
    lambda seed: (
        np.random.default_rng(seed).normal(0, 3, (9, 4, 5)),
        np.random.default_rng([seed, 1]).choice([IGNORED_TARGET, 0, 1, 2, 3, 4], (9, 4)),
    )
)


@given(logits_and_targets, st.integers(1, 9))
def test_sums_do_not_depend_on_batches(arrays: Any, size: int) -> None:
    logits, targets = map(torch.from_numpy, arrays)
    parts = EvaluationSums(CPU, TextBytes(total=50.0, unknown=3.0))
    for start in range(0, 9, size):
        parts.add(logits[start : start + size], targets[start : start + size])
    asked = targets != IGNORED_TARGET
    nats = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    found, count = parts.means(), int(asked.sum())
    assert count > 0
    assert found["loss"] == pytest.approx(float(nats[asked].mean()), rel=1e-12)
    assert float(sum_losses(logits, targets)) == pytest.approx(float(nats[asked].sum()), rel=1e-12)
    right = (logits.argmax(-1) == targets) & asked
    assert found["accuracy"] == pytest.approx(int(right.sum()) / count, rel=1e-15)
    bits = float(nats[asked].sum()) / math.log(2) + 8 * 3
    assert found["bits_per_byte"] == pytest.approx(bits / 50, rel=1e-12)


def test_a_smaller_vocabulary_is_no_better_code() -> None:
    # A model of single tokens' frequencies, fitted to the very text: the shortest code there is.
    needed = []
    for max_vocabulary in (None, 12, 8, 5, 4):
        data = build_small_language(max_vocabulary=max_vocabulary)
        targets = data.val.targets[data.val.targets != IGNORED_TARGET]
        counts = torch.bincount(targets, minlength=data.num_classes).double()
        sums = EvaluationSums(CPU, data.val.text_bytes)
        sums.add((counts / counts.sum()).log().clamp(min=-1e9).expand(len(targets), -1), targets)
        needed.append(sums.means()["bits_per_byte"])
    assert needed == sorted(needed)
    assert needed[-1] > needed[0] + 1.0


def test_nothing_asked_is_no_loss() -> None:
    targets = torch.full((2, 3), IGNORED_TARGET)
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = sum_losses(logits, targets)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert (logits.grad == 0.0).all()
    sums = EvaluationSums(CPU, TextBytes(total=4.0, unknown=0.0))
    sums.add(logits.detach(), targets)
    nothing = {"loss": 0.0, "accuracy": 0.0, "perplexity": 1.0, "bits_per_byte": 0.0}
    assert sums.means() == nothing
    assert EvaluationSums(CPU).means() == {"loss": 0.0, "accuracy": 0.0}


@pytest.mark.parametrize(
    ("losses", "mean", "perplexity"),
    [
        ([700.0, 718.0], 709.0, math.exp(709.0)),
        ([720.0], 720.0, math.inf),
        ([1.7e308, 1.7e308], math.inf, math.inf),
        ([1.0, math.nan], math.nan, math.nan),
    ],
)
def test_perplexity_beyond_the_largest_number(
    losses: list[float], mean: float, perplexity: float
) -> None:
    sums = EvaluationSums(CPU, TextBytes(1.0, 0.0))
    for loss in losses:
        sums.add(torch.tensor([[loss, 0.0]], dtype=torch.float64), torch.tensor([1]))
    means = sums.means()
    assert means["loss"] == pytest.approx(mean, rel=1e-15, nan_ok=True)
    assert means["perplexity"] == pytest.approx(perplexity, rel=1e-12, nan_ok=True)


def test_an_infinite_perplexity_is_a_row_and_no_divergence(make_text_cell: MakeCell) -> None:
    # One step of a rate far too large: losses of thousands of nats, and finite.
    optimizer = OptimizerConfig("sgd", 1e4, 0.0, ["weight"], {"momentum": 0.0})
    budget = BudgetConfig(updates=1)
    config = make_text_cell(LANGUAGE, optimizer=optimizer, budget=budget, num_evaluations=1)
    train_cell(config)
    folder = check_cell(config).run_dir(config, 0)
    summary = read_summary(folder)
    assert summary is not None
    assert (summary["status"], summary["reason"]) == ("completed", None)
    assert 710.0 < summary["metrics"]["val/loss"] < math.inf
    assert summary["metrics"]["val/perplexity"] == math.inf
    rows = read_history(folder).query("metric == 'perplexity'")["value"].tolist()
    assert rows == [math.inf, math.inf]  # val and test
    # The file is JSON for every reader.
    json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)


def test_a_loss_that_is_no_number_is_a_divergence(
    make_text_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EvaluationSums.add

    def poison(sums: EvaluationSums, logits: torch.Tensor, targets: torch.Tensor) -> None:
        real(sums, torch.full_like(logits, math.nan), targets)

    monkeypatch.setattr(EvaluationSums, "add", poison)
    config = make_text_cell(LANGUAGE)
    train_cell(config)
    folder = check_cell(config).run_dir(config, 0)
    summary = read_summary(folder)
    assert summary is not None
    assert (summary["status"], summary["reason"]) == ("diverged", "val loss is nan at update 6")
    assert math.isnan(read_history(folder).query("metric == 'perplexity'")["value"].item())
    # What was consumed until then is told of every run.
    assert summary["totals"]["tokens"] == 6 * 8 * 7


def test_padding_of_a_run_is_a_choice_of_the_data(make_text_cell: MakeCell) -> None:
    params = {"padding": "longest", "padding_share": 0.5}
    facts = check_cell(make_text_cell(LABELS, data=DataConfig(LABELS, params)))
    assert facts.input_shape == (2 * LONGEST,)
    assert check_cell(make_text_cell(LABELS)).input_shape == (LONGEST,)
