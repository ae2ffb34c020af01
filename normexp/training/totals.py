"""What a run has consumed of its texts: a function of seed and updates alone."""

from __future__ import annotations

from dataclasses import dataclass

from normexp.data import Dataset
from normexp.data.batches import IndexStream, UpdatePlan
from normexp.training.windows import longest_texts


@dataclass(frozen=True)
class TextTotals:
    """Sums over the updates of a run; every number is None where samples are no texts.

    Attributes:
        tokens: Valid positions that the model was given.
        targets: Predictions that were asked for.
        padded_share: Share of the positions that the model was given, as batches were cut, that
            were not valid; None before the first update too.
    """

    tokens: int | None = None
    targets: int | None = None
    padded_share: float | None = None


def count_texts(data: Dataset, plan: UpdatePlan, *, seed: int, updates: int) -> TextTotals:
    """Return what the first updates of a run consume, wherever it was interrupted and resumed.

    Args:
        data: The run's data set.
        plan: The run's accounting.
        seed: The run's seed.
        updates: Updates done.
    """
    lengths = data.train.lengths
    if lengths is None:
        return TextTotals()
    stream, micro_batch_size = IndexStream(plan, seed), plan.micro_batch_size
    tokens = targets = positions = 0
    for first in range(0, updates, plan.updates_per_epoch):
        count = min(plan.updates_per_epoch, updates - first)
        indices = stream.indices(first, count).reshape(-1, micro_batch_size)
        tokens += int(lengths[indices].sum())
        per_sample = data.train.num_targets
        targets += indices.size if per_sample is None else int(per_sample[indices].sum())
        if data.is_trimmed:
            positions += micro_batch_size * int(longest_texts(lengths, indices).sum())
        else:
            positions += indices.size * data.input_shape[0]
    return TextTotals(tokens, targets, 1.0 - tokens / positions if positions else None)
