"""The CSV mirror: rows kept, cost constant, resumable."""

import csv
import math
from pathlib import Path

import pytest
import torch

from normexp.training.csv_tracker import CsvTracker

HEADER = "update,samples,epoch,metric,value\r\n"


def _read(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_row_a_metric(tmp_path: Path) -> None:
    tracker = CsvTracker(tmp_path / "run", run_id="abc")
    tracker.log_metrics({"train/loss": 0.1 + 0.2, "samples": 64, "epoch": 0.5}, step=2)
    tracker.log_metrics(
        {"val/loss": torch.tensor(0.25), "val/accuracy": 1, "samples": 128, "epoch": 1.0}, step=4
    )
    # Read while the tracker is open: rows have left the process.
    assert (tmp_path / "run" / "metrics.csv").read_bytes().decode() == (
        HEADER
        + "2,64,0.5,train/loss,0.30000000000000004\r\n"
        + "4,128,1.0,val/loss,0.25\r\n"
        + "4,128,1.0,val/accuracy,1.0\r\n"
    )
    tracker.finalize("success")
    assert (tracker.name, tracker.version, tracker.save_dir) == (
        "csv",
        "abc",
        str(tmp_path / "run"),
    )


def test_not_finite_values_are_kept_apart(tmp_path: Path) -> None:
    tracker = CsvTracker(tmp_path, run_id="abc")
    for value in (math.nan, math.inf, -math.inf):
        tracker.log_metrics({"train/loss": value}, step=1)
    tracker.finalize("failed")
    assert [row["value"] for row in _read(tmp_path)] == ["nan", "inf", "-inf"]


def test_a_late_metric_costs_what_any_row_costs(tmp_path: Path) -> None:
    """10,000 rows with a new metric in the middle: what stands is never written again."""
    tracker = CsvTracker(tmp_path, run_id="abc")
    path = tmp_path / "metrics.csv"
    tracker.log_metrics({"train/loss": 1.0}, step=0)
    inode = path.stat().st_ino
    path.chmod(0o200)  # rewriting needs to read, appending does not
    for update in range(1, 10_000):
        late = {"val/late": 2.0} if update == 5000 else {}
        tracker.log_metrics({"train/loss": 1.0, **late}, step=update)
    tracker.finalize("success")
    tracker.log_metrics({"test/loss": 3.0}, step=10_000)  # opens the file again
    tracker.finalize("success")
    path.chmod(0o600)
    assert path.stat().st_ino == inode
    rows = _read(tmp_path)
    assert len(rows) == 10_002
    assert [row["update"] for row in rows if row["metric"] == "val/late"] == ["5000"]
    assert rows[-1]["metric"] == "test/loss"


@pytest.mark.parametrize("torn", ["", "3,96,0.7,train/lo", "3,96,0.7,train/loss,0.7", "3\r\n"])
def test_a_resumed_run_has_each_row_once(tmp_path: Path, torn: str) -> None:
    first = CsvTracker(tmp_path, run_id="abc")
    for update in (2, 4, 6):
        first.log_metrics({"train/loss": update / 10, "val/loss": 1.0}, step=update)
    first.finalize("failed")
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes() + torn.encode())
    # The checkpoint was taken at update 3: 4 and 6 are logged once more, a torn 3 is not.
    second = CsvTracker(tmp_path, run_id="abc")
    for update in (4, 6, 8):
        second.log_metrics({"train/loss": update / 10}, step=update)
        second.log_metrics({"val/loss": 1.0}, step=update)
    second.finalize("success")
    rows = [(int(row["update"]), row["metric"]) for row in _read(tmp_path)]
    assert rows == [(u, m) for u in (2, 4, 6, 8) for m in ("train/loss", "val/loss")]
    assert not list(tmp_path.glob("*.part"))
