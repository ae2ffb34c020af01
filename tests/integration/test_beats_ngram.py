"""A Transformer learns more of a language than the frequencies of what follows two characters."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from normexp.config.schema import (
    BudgetConfig,
    CellConfig,
    DataConfig,
    LrScalingConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    PlacementConfig,
    ScheduleConfig,
)
from normexp.data import IGNORED_TARGET, Split, load_dataset
from normexp.records import read_summary
from normexp.training.cell import train_cell
from normexp.training.check import check_cell

CONTEXT_LENGTH = 32


def stream_of(split: Split) -> NDArray[np.int64]:
    """Return the tokens of a split as they follow each other, from the end before the first on."""
    inputs, targets = split.inputs.numpy(), split.targets.numpy()
    return np.concatenate([inputs[0, :1], targets[targets != IGNORED_TARGET]])


def grams_of(stream: NDArray[np.int64], order: int, num_ids: int) -> NDArray[np.int64]:
    """Return a number for each token but the first: its own id, and digits for those before it."""
    padded = np.concatenate([np.repeat(stream[:1], max(order - 2, 0)), stream])
    num_predicted = len(stream) - 1
    number = np.zeros(num_predicted, dtype=np.int64)
    for before in reversed(range(order)):
        end = len(padded) - before
        number = number * num_ids + padded[end - num_predicted : end]
    return number


def count_in(train: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each number asked for occurs among those of the training split."""
    numbers, counts = np.unique(train, return_counts=True)
    places = np.searchsorted(numbers, asked).clip(max=len(numbers) - 1)
    return np.where(numbers[places] == asked, counts[places], 0)


def ngram_loss(
    train: NDArray[np.int64], held_out: NDArray[np.int64], order: int, num_ids: int
) -> float:
    """Return the mean of -log((count(gram) + 1) / (count(context) + ids)), in nats a token.

    Args:
        train: Stream that is counted.
        held_out: Stream of which each token but the first is predicted.
        order: Tokens of a gram: the predicted one and those before it.
        num_ids: Token ids; all but ``PAD_ID`` may come.
    """
    counted, asked = grams_of(train, order, num_ids), grams_of(held_out, order, num_ids)
    grams = count_in(counted, asked)
    contexts = count_in(counted // num_ids, asked // num_ids)
    return float(-np.log((grams + 1) / (contexts + num_ids - 1)).mean())


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngram_loss_is_that_of_counts_in_a_dictionary(order: int) -> None:
    rng = np.random.default_rng(order)
    train, held_out = rng.integers(1, 5, 60), rng.integers(1, 5, 20)
    pairs: list[list[tuple[tuple[int, ...], int]]] = [[], []]
    for found, stream in zip(pairs, (train.tolist(), held_out.tolist()), strict=True):
        padded = [stream[0]] * 2 + stream
        for place in range(3, len(padded)):
            found.append((tuple(padded[place - order + 1 : place]), padded[place]))
    grams, contexts = Counter(pairs[0]), Counter(context for context, _ in pairs[0])
    losses = []
    for context, token in pairs[1]:
        # Over all that may come, ids 1 to 4, the probabilities add up to one.
        total = sum(grams[context, other] + 1 for other in range(1, 5))
        assert total == contexts[context] + 4
        losses.append(-math.log((grams[context, token] + 1) / total))
    assert ngram_loss(train, held_out, order, 5) == pytest.approx(np.mean(losses), abs=1e-12)


def test_a_small_transformer_beats_the_3_gram_model(tmp_path: Path) -> None:
    params = {"context_length": CONTEXT_LENGTH}
    config = CellConfig(
        name="ngram",
        output_root=str(tmp_path),
        seeds=[0],
        data=DataConfig("python_docs", params),
        model=ModelConfig("transformer", {"depth": 2, "width": 64, "positions": "rotary"}),
        norm=NormConfig("rms_norm"),
        placement=PlacementConfig("pre"),
        optimizer=OptimizerConfig("adamw", 0.006, 0.01, ["weight"], {"beta2": 0.99}),
        schedule=ScheduleConfig("cosine", 0.1),
        lr_scaling=LrScalingConfig("none", 32),
        micro_batch_size=16,
        budget=BudgetConfig(updates=700),
        num_evaluations=1,
    )
    train_cell(config)
    summary = read_summary(check_cell(config).run_dir(config, 0))
    assert summary is not None
    loss = summary["metrics"]["val/loss"]

    data = load_dataset("python_docs", params)
    train, val = stream_of(data.train), stream_of(data.val)
    # Both are asked for the same tokens, each once.
    assert data.val.num_targets is not None
    assert len(val) - 1 == data.val.num_targets.sum()
    losses = [ngram_loss(train, val, order, data.num_classes) for order in (1, 2, 3)]
    print(f"nats a character: n-gram models of order 1 to 3 {losses}, Transformer {loss}")
    assert losses[0] > losses[1] > losses[2]
    # Some 0.3 nats better; the margin is for help topics of other versions of Python.
    assert loss < losses[2] - 0.1
