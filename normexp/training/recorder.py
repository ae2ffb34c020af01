"""Take a run's rows and bring them to disk, to trackers and to the progress display."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning.pytorch.loggers import Logger

from normexp.records import HistoryRow, Journal, read_journal, write_history


class Recorder:
    """The one place through which a run's numbers leave it.

    The journal on disk is the record; trackers mirror it and may fail or be absent.

    Args:
        folder: Folder of the run.
        num_train: Samples of the training split: the length of an epoch.
        trackers: Lightning loggers that mirror the rows.
        on_progress: Told the number of updates done, for display.
        wall_s: Seconds that earlier attempts at this run took.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_train: int,
        trackers: Sequence[Logger] = (),
        on_progress: Callable[[int], None] | None = None,
        wall_s: float = 0.0,
    ) -> None:
        self.folder = folder
        self.num_train = num_train
        self.trackers = trackers
        self.latest: dict[str, float] = {}
        self._on_progress = on_progress
        self._started = time.monotonic() - wall_s
        self._journal = Journal(folder)
        self._losses: list[tuple[int, float]] = []
        self._update = 0
        for row in read_journal(folder):
            self._follow(row)

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, earlier attempts included."""
        return time.monotonic() - self._started

    def record(
        self,
        split: str,
        values: Mapping[str, float],
        *,
        update: int,
        samples: int,
        evaluation: int | None = None,
    ) -> None:
        """Append one row for each value; they are on disk when this returns.

        Args:
            split: train, val or test.
            values: Metric to value.
            update: Updates done.
            samples: Training samples consumed.
            evaluation: k of the k-th evaluation, if these rows belong to one.
        """
        wall_s = self.wall_s
        epoch = samples / self.num_train
        rows = [
            HistoryRow(samples, update, epoch, evaluation, split, metric, value, wall_s)
            for metric, value in values.items()
        ]
        self._journal.append(rows)
        for row in rows:
            self._follow(row)
        named = {f"{split}/{metric}": value for metric, value in values.items()}
        # Trackers have the training loss of every window already.
        if split != "train" or evaluation is None:
            for tracker in self.trackers:
                tracker.log_metrics({**named, "samples": samples, "epoch": epoch}, step=update)
        if self._on_progress is not None:
            self._on_progress(update)

    def mean_train_loss(self) -> float:
        """Return the mean training loss of the updates since the last evaluation.

        Between two evaluations every arm takes the same samples, to within one update, so unlike
        the loss of a window this compares.
        """
        updates = sum(count for count, _ in self._losses)
        return sum(count * loss for count, loss in self._losses) / updates

    def _follow(self, row: HistoryRow) -> None:
        """Take in a row, new or from the journal of an earlier attempt."""
        if row.value is None:
            return
        if row.evaluation is not None:
            self.latest[f"{row.split}/{row.metric}"] = row.value
            self._losses.clear()
        elif row.split == "train":
            self._losses.append((row.update - self._update, row.value))
            self._update = row.update

    def close(self) -> None:
        """Turn the journal into the history; the journal goes once the summary stands."""
        self._journal.close()
        write_history(self.folder, read_journal(self.folder))
