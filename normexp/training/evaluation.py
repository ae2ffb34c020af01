"""Which statistics the batch norms of a model use while it is evaluated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from normexp.config.schema import CellConfig, EvaluationConfig
from normexp.data import Dataset
from normexp.errors import UserError
from normexp.measure import batch_statistics, find_tracked_layers, reestimated_statistics
from normexp.norms import NormLayer, count_channels, describe_norm_layers
from normexp.training.positions import gets_mask


def evaluation_statistics(
    evaluation: EvaluationConfig, model: nn.Module, train_inputs: Tensor
) -> AbstractContextManager[None]:
    """Return the context of an evaluation; whatever it does to the model ends with it.

    Args:
        evaluation: ``running`` changes nothing. ``reestimated``: running statistics are computed
            anew on the first ``num_samples`` training samples in their stored order, without
            augmentation, in batches of ``batch_size``. ``batch``: every batch's own.
        model: The model in training.
        train_inputs: The training split, on the model's device.
    """
    if evaluation.statistics == "running":
        return nullcontext()
    if evaluation.statistics == "batch":
        return _of_batches(model)
    assert evaluation.batch_size is not None
    return reestimated_statistics(
        model,
        train_inputs,
        batch_size=evaluation.batch_size,
        estimator="population" if evaluation.estimator == "population" else "mean_of_batches",
        num_samples=evaluation.num_samples,
    )


@contextmanager
def _of_batches(model: nn.Module) -> Iterator[None]:
    with batch_statistics(model):
        yield


def complete_evaluation(evaluation: EvaluationConfig, model: nn.Module) -> None:
    """Write an evaluation in its one spelling, in place: what has no effect becomes null.

    A model without a layer that normalizes by running statistics, such as one of group_norm, is
    evaluated in one way: ``running``.

    Args:
        evaluation: As configured.
        model: The cell's model, on any device.

    Raises:
        UserError: If a layer keeps running statistics of another kind.
    """
    if evaluation.statistics != "running" and not _tracked(evaluation, model):
        evaluation.statistics = "running"
    if evaluation.statistics != "reestimated":
        evaluation.estimator = evaluation.num_samples = None
    if evaluation.statistics == "running":
        evaluation.batch_size = None


def check_evaluation(config: CellConfig, data: Dataset, model: nn.Module) -> None:
    """Raise unless the evaluations can be carried out as configured.

    Args:
        config: A cell whose fields are checked.
        data: Its data set.
        model: Its model, on the meta device.

    Raises:
        UserError: If a layer cannot do it, or a batch does not fit the data.
    """
    evaluation = config.evaluation
    if evaluation.statistics == "running":
        return
    paths = _tracked(evaluation, model)
    if not paths:
        return
    size, key = evaluation.batch_size, "evaluation.batch_size"
    if size is None:
        raise UserError(key, "null", f"statistics={evaluation.statistics} needs a number")
    if evaluation.statistics == "batch":
        for split, samples in (("validation", data.val), ("test", data.test)):
            if size > len(samples):
                has = f"the {split} split of {data.name} has {len(samples)} samples"
                raise UserError(key, size, f"{has}; {len(samples)} or fewer")
        sizes = [size]  # the last batch is filled up
    else:
        num_used = evaluation.num_samples or len(data.train)
        if num_used > len(data.train):
            has = f"the training split of {data.name} has {len(data.train)} samples"
            raise UserError("evaluation.num_samples", num_used, f"{has}; that or fewer, or null")
        if size > num_used:
            raise UserError(key, size, f"{num_used} training samples are used; that or fewer")
        sizes = [size, *([num_used % size] if num_used % size else [])]
    for batch in sizes:
        for layer in describe_norm_layers(model, data.input_shape, batch):
            if layer.path in paths and _elements(layer) < 2:
                raise UserError(
                    key,
                    size,
                    f"in a batch of {batch} layer {layer.path} gets {_elements(layer)} value a "
                    "channel, which has no variance; choose a size that leaves 2 or more",
                )
    if any(gets_mask(model.get_submodule(path), model) for path in paths):
        _check_valid_positions(evaluation, data)


def _check_valid_positions(evaluation: EvaluationConfig, data: Dataset) -> None:
    """Raise if a batch of texts has too few valid positions for a variance."""
    size = evaluation.batch_size
    assert size is not None
    is_filled = evaluation.statistics == "batch"
    splits = {"validation": data.val.lengths, "test": data.test.lengths}
    if not is_filled:
        assert data.train.lengths is not None
        splits = {"training": data.train.lengths[: evaluation.num_samples]}
    for split, lengths in splits.items():
        assert lengths is not None
        for start in range(0, len(lengths), size):
            end = min(start + size, len(lengths))
            first = max(0, end - size) if is_filled else start
            found = int(lengths[first:end].sum())
            if found < 2:
                raise UserError(
                    "evaluation.batch_size",
                    size,
                    f"the {end - first} texts from number {first} of the {split} split of "
                    f"{data.name} have {found} tokens together, and a variance needs 2 or more; "
                    "choose a larger size",
                )


def _tracked(evaluation: EvaluationConfig, model: nn.Module) -> set[str]:
    """Return the paths of the layers whose statistics are in question."""
    try:
        return set(find_tracked_layers(model))
    except ValueError as error:
        raise UserError("evaluation.statistics", evaluation.statistics, str(error)) from None


def _elements(layer: NormLayer) -> int:
    """Return the values a channel that a layer's input holds."""
    shape = layer.input_shape
    return math.prod(shape) // count_channels(shape)
