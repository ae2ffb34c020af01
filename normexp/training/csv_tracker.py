"""A CSV mirror of a run whose rows cost the same however long the run is."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

COLUMNS = ("update", "samples", "epoch", "metric", "value")
FILE = "metrics.csv"


class CsvTracker(Logger):
    """Append every metric as a row of its own: update, samples, epoch, metric, value.

    In this long form a metric that first appears late is a new row, not a new column, so the
    file is only ever appended to. Lightning's own logger has a column for each metric and
    rewrites the file whenever one is added. NaN and infinities are written as ``nan``, ``inf``
    and ``-inf``; a number reads back as the same double.

    A resumed run goes on in its file: rows that it is about to log once more, and a last row
    that a kill cut short, are taken out when the first new row comes.

    Args:
        folder: Folder of the run; the file is ``metrics.csv`` in it.
        run_id: Id of the run.
    """

    def __init__(self, folder: Path, *, run_id: str) -> None:
        super().__init__()
        self._folder = folder
        self._run_id = run_id
        self._file: TextIO | None = None
        self._has_logged = False

    @property
    def name(self) -> str:
        """What the logger is called."""
        return "csv"

    @property
    def version(self) -> str:
        """Id of the run."""
        return self._run_id

    @property
    def save_dir(self) -> str:
        """Folder of the file."""
        return str(self._folder)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the configuration lies beside the file already."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append one row a metric; they have left the process when this returns.

        Args:
            metrics: Metric to value; ``samples`` and ``epoch`` become columns of the others.
            step: Updates done.
        """
        samples, epoch = metrics.get("samples", ""), metrics.get("epoch", "")
        rows = [
            (step, samples, epoch, metric, float(value))
            for metric, value in metrics.items()
            if metric not in ("samples", "epoch")
        ]
        file = self._file or self._open(step)
        csv.writer(file).writerows(rows)
        file.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file; a later row opens it again.

        Args:
            status: How the run ended; not written.
        """
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, first_update: int | None) -> TextIO:
        """Open the file for appending, without what an earlier attempt logged from here on."""
        path = self._folder / FILE
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._has_logged:
            kept = _rows_before(path, first_update)
            part = path.with_suffix(".csv.part")
            with part.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([COLUMNS, *kept])
            part.replace(path)
            self._has_logged = True
        self._file = path.open("a", newline="", encoding="utf-8")
        return self._file


def _rows_before(path: Path, update: int | None) -> list[list[str]]:
    """Return the whole rows of an earlier attempt that stand before an update."""
    if update is None or not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        # A line without its end may have lost digits and still look whole.
        whole = [line for line in file if line.endswith("\n")]
    rows = [row for row in csv.reader(whole[1:]) if len(row) == len(COLUMNS)]
    return [row for row in rows if row[0].isdigit() and int(row[0]) < update]
