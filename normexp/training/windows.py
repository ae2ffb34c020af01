"""Cut a run's updates into windows of ready micro-batches, and a split into batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normexp.data import AugmentDraws, Dataset, Split, augment, draw_augmentation
from normexp.data.batches import IndexStream

# A window holds at most this many samples, so that its gathered inputs stay small.
_WINDOW_SAMPLES = 8192


class Trainee(Protocol):
    """What a source asks of the module that it feeds."""

    update: int
    evaluation: int

    @property
    def device(self) -> torch.device:
        """Device that trains."""

    def split_on_device(self, split: Split) -> Split:
        """Return a split's tensors on the device."""


MicroBatch = tuple[Tensor, Tensor]


class Window(NamedTuple):
    """Ready micro-batches of consecutive updates.

    Attributes:
        inputs: Shape ``(updates, accumulation_steps, micro_batch_size, *input_shape)``.
        targets: Shape ``(updates, accumulation_steps, micro_batch_size)``, or one axis more of
            positions where the next token is predicted.
        num_targets: Predictions that each update asks for.
        lengths: Positions that each micro-batch is cut to; None if it keeps all.
    """

    inputs: Tensor
    targets: Tensor
    num_targets: list[int]
    lengths: list[list[int]] | None = None

    def updates(self) -> Iterator[tuple[int, list[MicroBatch]]]:
        """Yield each update: how many predictions it asks for, and its micro-batches."""
        for index, num_targets in enumerate(self.num_targets):
            inputs, targets = self.inputs[index].unbind(), self.targets[index].unbind()
            if self.lengths is not None:
                lengths = self.lengths[index]
                inputs = tuple(x[:, :n] for x, n in zip(inputs, lengths, strict=True))
            yield num_targets, list(zip(inputs, targets, strict=True))


class WindowSource:
    """Windows from the update that the module has reached to its next evaluation.

    Args:
        module: Tells where training stands and on which device.
        stream: Sample indices of every update.
        data: Data set of the run.
        augment_params: ``crop_padding`` and ``horizontal_flip``.
        window_updates: Most updates of a window.
    """

    def __init__(
        self,
        module: Trainee,
        stream: IndexStream,
        data: Dataset,
        augment_params: dict[str, Any],
        window_updates: int,
    ) -> None:
        self.module = module
        self.stream = stream
        self.train = data.train
        self.is_trimmed = data.is_trimmed
        self.augment_params = augment_params
        self.is_augmented = any(augment_params.values())
        size = stream.plan.effective_batch_size
        self.window_updates = max(1, min(window_updates, _WINDOW_SAMPLES // size))

    def __iter__(self) -> Iterator[Window]:
        plan = self.stream.plan
        end = plan.evaluation_updates[self.module.evaluation]
        update = self.module.update
        while update < end:
            count = min(self.window_updates, end - update)
            yield self.window(update, count)
            update += count

    def window(self, first_update: int, num_updates: int) -> Window:
        """Return the micro-batches of ``num_updates`` updates from ``first_update`` on."""
        plan, seed = self.stream.plan, self.stream.seed
        device = self.module.device
        split = self.module.split_on_device(self.train)
        indices = self.stream.indices(first_update, num_updates).reshape(-1)
        index = torch.from_numpy(indices).to(device)
        inputs, targets = split.inputs[index], split.targets[index]
        if self.is_augmented:
            draws = [
                draw_augmentation(seed, update, plan.effective_batch_size, **self.augment_params)
                for update in range(first_update, first_update + num_updates)
            ]
            inputs = augment(inputs, AugmentDraws.concatenate(draws).to(device))
        shape = (num_updates, plan.accumulation_steps, plan.micro_batch_size)
        num_targets = [plan.effective_batch_size] * num_updates
        if self.train.num_targets is not None:
            num_targets = self.train.num_targets[indices].reshape(num_updates, -1).sum(1).tolist()
        return Window(
            inputs.reshape(*shape, *inputs.shape[1:]),
            targets.reshape(*shape, *targets.shape[1:]),
            num_targets,
            self._lengths(indices.reshape(shape)),
        )

    def _lengths(self, indices: NDArray[np.int64]) -> list[list[int]] | None:
        """Return the length of the longest text of each micro-batch, known without the device."""
        lengths = self.train.lengths
        if lengths is None or not self.is_trimmed:
            return None
        longest: list[list[int]] = longest_texts(lengths, indices).tolist()
        return longest


def longest_texts(lengths: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions that batches of texts are cut to: one at least.

    Args:
        lengths: Valid positions of each text.
        indices: Texts of each batch, ``(..., batch_size)``.
    """
    longest: NDArray[np.int64] = np.maximum(lengths[indices].max(-1), 1)
    return longest


class EvaluationSource:
    """The batches of a split, in order, all samples once.

    Args:
        module: Tells the device.
        split: Samples to evaluate.
        batch_size: Samples of one forward pass; it does not change the numbers but their
            last digits, unless the model uses the statistics of the batch.
        is_filled: Whether an incomplete last batch is filled up with the samples before it, so
            that all batches have one size. Its targets are those of the new samples alone: of
            the predictions, the last ones.
        is_trimmed: Whether a batch of texts is cut to its longest text.
    """

    def __init__(
        self,
        module: Trainee,
        split: Split,
        batch_size: int,
        *,
        is_filled: bool = False,
        is_trimmed: bool = False,
    ) -> None:
        self.module = module
        self.split = split
        self.batch_size = batch_size
        self.is_filled = is_filled
        self.lengths = split.lengths if is_trimmed else None

    def __iter__(self) -> Iterator[MicroBatch]:
        split = self.module.split_on_device(self.split)
        size = self.batch_size
        for start in range(0, len(split), size):
            end = min(start + size, len(split))
            first = max(0, end - size) if self.is_filled else start
            inputs = split.inputs[first:end]
            if self.lengths is not None:
                inputs = inputs[:, : int(longest_texts(self.lengths, np.arange(first, end)))]
            yield inputs, split.targets[start:end]
