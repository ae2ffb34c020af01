"""Read and write what a run leaves on disk. Files appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from filelock import FileLock, Timeout

from normexp.errors import HeldElsewhereError, UserError
from normexp.records.schema import (
    HISTORY_FILE,
    JOURNAL_FILE,
    PLAN_FILE,
    RUNS_FOLDER,
    SUMMARY_FILE,
    HistoryRow,
)

if TYPE_CHECKING:
    import pandas as pd

# End of the name of a file that is being written; one that a kill left is worth nothing.
_PARTIAL = ".partial"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a kill, never meets half of it.

    Args:
        path: Where it shall stand; missing parent folders are made.
        content: Text (written as UTF-8) or bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; results are for sharing.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def clear_partial(folder: Path) -> None:
    """Remove what a kill in the middle of a write left in a folder; hold its lock meanwhile."""
    for path in folder.glob(f"*{_PARTIAL}"):
        path.unlink()


def encode(value: Any) -> Any:
    """Return ``value`` with numbers that JSON lacks written as "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def decode(value: Any) -> Any:
    """Return what ``encode`` was given."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def write_json(path: Path, value: Any) -> None:
    """Write plain containers as JSON, whole; numbers that are not finite survive."""
    write_whole(path, json.dumps(encode(value), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return what ``write_json`` wrote.

    Raises:
        UserError: If the file is damaged.
    """
    try:
        return decode(json.loads(path.read_text()))
    except ValueError as error:
        expected = f"is damaged ({error}); remove it, and start again to make it anew"
        raise UserError("file", path, expected) from error


def write_yaml(path: Path, value: Any) -> None:
    """Write plain containers as YAML, whole, keys in their order."""
    write_whole(path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def experiment_dir(output_root: str | Path, name: str) -> Path:
    """Return the folder of an experiment."""
    return Path(output_root) / name


def cell_dir(output_root: str | Path, name: str, cell: str) -> Path:
    """Return the folder of a cell."""
    return experiment_dir(output_root, name) / RUNS_FOLDER / cell


def run_dir(output_root: str | Path, name: str, cell: str, seed: int) -> Path:
    """Return the folder of a run: no other run shares it."""
    return cell_dir(output_root, name, cell) / f"seed={seed}"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return a run's summary, or None if the run never ended."""
    path = folder / SUMMARY_FILE
    return dict(read_json(path)) if path.exists() else None


def find_runs(experiment: Path) -> list[Path]:
    """Return the folders of all runs of an experiment, sorted."""
    return sorted(path for path in experiment.glob(f"{RUNS_FOLDER}/*/seed=*") if path.is_dir())


class Journal:
    """Rows of a run while it trains: one JSON array a line, only ever appended.

    A row is on disk when ``append`` returns, and survives the death of the process.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, rows: Iterable[HistoryRow]) -> None:
        """Append rows."""
        self._file.write("".join(json.dumps(encode(list(row))) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        """Close the file; the journal stays."""
        self._file.close()


def read_journal(folder: Path) -> list[HistoryRow]:
    """Return the rows of a run's journal; a last line that a kill cut off is left out."""
    path = folder / JOURNAL_FILE
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        rows.append(HistoryRow(*decode(json.loads(line))))
    return rows


def cut_journal(folder: Path, update: int) -> float:
    """Drop the rows after an update, as a resumed run makes them again.

    Args:
        folder: Folder of the run.
        update: Updates that the checkpoint holds; 0 drops every row.

    Returns:
        ``wall_s`` of the last row kept, 0.0 if there is none.
    """
    kept = [row for row in read_journal(folder) if row.update <= update and update > 0]
    text = "".join(json.dumps(encode(list(row))) + "\n" for row in kept)
    write_whole(folder / JOURNAL_FILE, text)
    return kept[-1].wall_s if kept else 0.0


def write_history(folder: Path, rows: list[HistoryRow]) -> None:
    """Write a run's history: one row a number, typed, null apart from NaN."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("samples", pa.int64()),
            ("update", pa.int64()),
            ("epoch", pa.float64()),
            ("evaluation", pa.int64()),
            ("split", pa.string()),
            ("metric", pa.string()),
            ("value", pa.float64()),
            ("wall_s", pa.float64()),
        ]
    )
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=schema), sink)
    write_whole(folder / HISTORY_FILE, sink.getvalue().to_pybytes())


def read_history(folder: Path) -> pd.DataFrame:
    """Return a run's history, from its journal if the run has not ended."""
    import pandas as pd

    path = folder / HISTORY_FILE
    if path.exists():
        frame = pd.read_parquet(path)
    else:
        frame = pd.DataFrame(read_journal(folder), columns=list(HistoryRow._fields))
        frame["value"] = frame["value"].astype("float64")
    return frame.astype({"evaluation": "Int64"})


def write_plan(experiment: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a sweep: its question, its cells and their seeds."""
    write_json(experiment / PLAN_FILE, plan)


def read_plan(experiment: Path) -> dict[str, Any] | None:
    """Return the plan of the last sweep into a folder, or None if there was none."""
    path = experiment / PLAN_FILE
    return dict(read_json(path)) if path.exists() else None


@contextlib.contextmanager
def hold_lock(path: Path, *, key: str, held: str, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold a lock file; the system lets go of it when the process dies, however it dies.

    Args:
        path: The lock file.
        key: Configuration key for the message.
        held: End of the message if somebody else holds it.
        timeout_s: Seconds to wait for it.

    Raises:
        HeldElsewhereError: If it is still held after that time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        raise HeldElsewhereError(key, path.parent, held) from None
    try:
        yield
    finally:
        lock.release()
