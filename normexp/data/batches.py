"""Which samples an update takes: exact accounting, as a pure function of seed and update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normexp.random import random_stream


@dataclass(frozen=True)
class UpdatePlan:
    """How a budget of samples becomes updates, epochs and evaluations.

    An update takes exactly ``effective_batch_size`` samples of the epoch's permutation; what is
    left of an epoch is dropped and counted. There is no partial update.

    Attributes:
        num_train: Samples of the training split.
        micro_batch_size: Samples of one forward pass.
        accumulation_steps: Forward passes of one update.
        budget_samples: Samples to consume; the last update may go beyond it, none is cut short.
        num_evaluations: Evaluations, evenly spaced over the budget.
    """

    num_train: int
    micro_batch_size: int
    accumulation_steps: int
    budget_samples: int
    num_evaluations: int

    @property
    def effective_batch_size(self) -> int:
        """Samples of one update."""
        return self.micro_batch_size * self.accumulation_steps

    @property
    def num_updates(self) -> int:
        """Updates of the whole run: the first boundary at or after the budget."""
        return math.ceil(self.budget_samples / self.effective_batch_size)

    @property
    def updates_per_epoch(self) -> int:
        """Whole updates that one permutation of the training split gives."""
        return self.num_train // self.effective_batch_size

    @property
    def dropped_per_epoch(self) -> int:
        """Samples that each whole epoch leaves unused."""
        return self.num_train - self.updates_per_epoch * self.effective_batch_size

    @property
    def dropped_samples(self) -> int:
        """Samples left unused by all epochs that the run goes through to their end."""
        return (self.num_updates // self.updates_per_epoch) * self.dropped_per_epoch

    @property
    def evaluation_updates(self) -> tuple[int, ...]:
        """Updates after which evaluations 1..n stand.

        Evaluation k stands at the first update boundary at or after k/n of the budget, so runs
        of other batch sizes are compared at the same k.
        """
        return tuple(
            math.ceil(k * self.budget_samples / (self.num_evaluations * self.effective_batch_size))
            for k in range(1, self.num_evaluations + 1)
        )


def epoch_order(seed: int, epoch: int, num_train: int) -> NDArray[np.int64]:
    """Return the order in which an epoch takes the training samples.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        num_train: Samples of the training split.

    Returns:
        A permutation of ``range(num_train)``, shape ``(num_train,)``: the same for every arm.
    """
    return random_stream(seed, "data_order", epoch).permutation(num_train)


class IndexStream:
    """Sample indices of any update of a run; remembers the last epoch's order only for speed.

    Args:
        plan: Accounting of the run.
        seed: Seed of the run.
    """

    def __init__(self, plan: UpdatePlan, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def indices(self, first_update: int, num_updates: int) -> NDArray[np.int64]:
        """Return the samples of consecutive updates.

        Args:
            first_update: Number of the first update, from 0.
            num_updates: How many updates.

        Returns:
            Indices into the training split, shape ``(num_updates, effective_batch_size)``.
        """
        size = self.plan.effective_batch_size
        rows = []
        for update in range(first_update, first_update + num_updates):
            epoch, position = divmod(update, self.plan.updates_per_epoch)
            if epoch != self._epoch:
                self._order = epoch_order(self.seed, epoch, self.plan.num_train)
                self._epoch = epoch
            rows.append(self._order[position * size : (position + 1) * size])
        return np.stack(rows)
