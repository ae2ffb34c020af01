"""Cut a run's updates into windows of ready micro-batches, and a split into batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
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


class Window(NamedTuple):
    """Ready micro-batches of consecutive updates.

    Attributes:
        inputs: Shape ``(updates, accumulation_steps, micro_batch_size, C, H, W)``.
        targets: Shape ``(updates, accumulation_steps, micro_batch_size)``.
    """

    inputs: Tensor
    targets: Tensor


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
        return Window(inputs.reshape(*shape, *inputs.shape[1:]), targets.reshape(shape))


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
    """

    def __init__(
        self, module: Trainee, split: Split, batch_size: int, *, is_filled: bool = False
    ) -> None:
        self.module = module
        self.split = split
        self.batch_size = batch_size
        self.is_filled = is_filled

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        split = self.module.split_on_device(self.split)
        size = self.batch_size
        for start in range(0, len(split), size):
            end = min(start + size, len(split))
            first = max(0, end - size) if self.is_filled else start
            yield split.inputs[first:end], split.targets[start:end]
