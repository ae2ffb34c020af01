"""Trackers: a run of its own each, nothing sent, nothing printed."""

import importlib.util
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from normexp.errors import UserError
from normexp.training.csv_tracker import CsvTracker
from normexp.training.trackers import (
    TRACKERS,
    build_trackers,
    check_trackers,
    close_trackers,
)

CONF = Path(__file__).parents[2] / "conf" / "logger"
CONFIG = {"norm": {"name": "batch_norm", "params": {"eps": 1e-5}}, "seeds": [0, 1], "plan": None}


def _build(trackers: dict[str, Any], folder: Path, **changes: Any) -> list[Any]:
    place = {
        "run_dir": folder,
        "run_name": "cell-seed0",
        "run_id": "0123456789abcdef",
        "group": "quickstart",
        "config": CONFIG,
    }
    return build_trackers(trackers, **(place | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ({"wanb": {}}, "logger.trackers.wanb={}: did you mean wandb?"),
        (
            {"wandb": {"mod": "online"}},
            "logger.trackers.wandb.mod=online: tracker wandb has no such parameter; "
            "did you mean mode?",
        ),
        (
            {"wandb": {"mode": "sometimes"}},
            "logger.trackers.wandb.mode=sometimes: a value of type offline | online is needed",
        ),
        ({"csv": {"path": "x"}}, "logger.trackers.csv.path=x: tracker csv has no such parameter"),
        ({"csv": True}, "logger.trackers.csv=True: a mapping of parameters is needed"),
    ],
)
def test_mistakes_are_told_in_one_line(
    trackers: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        check_trackers(trackers)
    assert str(raised.value).startswith(message)
    with pytest.raises(UserError):
        _build(trackers, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda package: None if package == name else find_spec(package)
    )
    with pytest.raises(UserError) as raised:
        check_trackers({"csv": None, name: None})
    assert str(raised.value) == (
        f'logger.trackers={name}: it needs a package; install it with pip install "normexp[{name}]"'
    )
    check_trackers({"csv": None})


def test_every_tracker_has_a_choice_that_shows_its_defaults() -> None:
    choices = {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml")}
    assert choices.pop("none") == {"trackers": {}}
    assert choices.keys() == TRACKERS.keys()
    for name, choice in choices.items():
        defaults = {key: p.default for key, p in TRACKERS[name].parameters().items()}
        assert choice == {"trackers": {name: defaults}}
        check_trackers(choice["trackers"])


@pytest.mark.slow
def test_no_tracker_is_imported_unless_asked(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from normexp.training.trackers import build_trackers, close_trackers\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "loggers = build_trackers({'csv': {}}, run_dir=folder, run_name='n', run_id='i',\n"
        "    group='g', config={})\n"
        "close_trackers(loggers, 'completed')\n"
        "print([name for name in ('wandb', 'tensorboard') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_other_ranks_track_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert _build({"csv": {}}, tmp_path) == []


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = _build({"tensorboard": {}}, tmp_path)
    for update, accuracy in ((10, 0.5), (20, 0.75)):
        loggers[0].log_metrics(
            {"val/accuracy": accuracy, "samples": update * 32, "epoch": update / 10}, step=update
        )
    close_trackers(loggers, "completed")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    read = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert read == {
        "val/accuracy": [(10, 0.5), (20, 0.75)],
        "samples": [(10, 320.0), (20, 640.0)],
        "epoch": [(10, 1.0), (20, 2.0)],
    }
    assert yaml.safe_load((tmp_path / "tensorboard" / "hparams.yaml").read_text()) == CONFIG


@pytest.mark.parametrize("status", ["diverged", "failed", "interrupted"])
def test_the_configuration_is_written_whatever_the_status(tmp_path: Path, status: str) -> None:
    loggers = _build({"tensorboard": {}}, tmp_path)
    close_trackers(loggers, status)
    assert (tmp_path / "tensorboard" / "hparams.yaml").exists()


def test_a_failing_tracker_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object, status: str) -> None:
        raise OSError("disk full")

    loggers = _build({"csv": {}, "tensorboard": {}}, tmp_path)
    monkeypatch.setattr(CsvTracker, "finalize", fail)
    with caplog.at_level(logging.WARNING):
        close_trackers(loggers, "completed")
    assert caplog.messages == ["tracker CsvTracker could not be closed: disk full"]
    assert (tmp_path / "tensorboard" / "hparams.yaml").exists()


# wandb ----------------------------------------------------------------------------------------


def _records(folder: Path) -> list[Any]:
    """Return the records of an offline run once its last one is written.

    wandb's service answers before it has written everything, and then goes on.
    """
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 20
    while not _of_kind(records := _parse(path.read_bytes()), "exit"):
        assert time.monotonic() < deadline, "the run has no end"
        time.sleep(0.02)
    return records


def _parse(data: bytes) -> list[Any]:
    """Parse wandb's records, which stand in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, parts, records = 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # a header never crosses a block's end
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def _of_kind(records: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def _items(message: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in message}


@pytest.fixture
def refused_sockets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Refuse every connection but those within the machine's file system."""
    asked: list[Any] = []
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            asked.append(address)
            raise OSError("refused")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # restored after the test
    return asked


@pytest.mark.slow
def test_two_wandb_runs_in_one_process(tmp_path: Path, refused_sockets: list[Any]) -> None:
    """Both runs live at the same time; each file holds its own numbers and no others."""
    import wandb

    places = []
    for index, status in enumerate(["completed", "failed"]):
        folder, config = tmp_path / str(index), CONFIG | {"index": index}
        loggers = _build(
            {"wandb": {"tags": ["t"]}},
            folder,
            run_id=f"id{index}",
            run_name=f"name{index}",
            config=config,
        )
        places.append((folder, config, loggers, status))
    assert wandb.run is None  # nothing global for other code to join
    for update in (1, 2):
        for index, (_, _, loggers, _) in enumerate(places):
            metrics = {"val/accuracy": index + update / 10, "samples": 8 * update, "epoch": update}
            loggers[0].log_metrics(metrics, step=update)
    for _, _, loggers, status in places:
        close_trackers(loggers, status)
    for index, (folder, config, _, status) in enumerate(places):
        records = _records(folder)
        (run,) = _of_kind(records, "run")
        assert (run.run_id, run.display_name, run.run_group, run.project) == (
            f"id{index}",
            f"name{index}",
            "quickstart",
            "normexp",
        )
        assert list(run.tags) == ["t"]
        stored = _items(run.config.update)
        assert {key: stored[key] for key in config} == config
        rows = [_items(history.item) for history in _of_kind(records, "history")]
        assert [(row["val/accuracy"], row["samples"]) for row in rows] == [
            (index + 0.1, 8),
            (index + 0.2, 16),
        ]
        assert [row["trainer/global_step"] for row in rows] == [1, 2]
        summary: dict[str, Any] = {}
        for update_record in _of_kind(records, "summary"):
            summary |= _items(update_record.update)
        assert summary["status"] == status
        (ending,) = _of_kind(records, "exit")
        assert ending.exit_code == (0 if status == "completed" else 1)
    assert refused_sockets == []
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


@pytest.mark.slow
def test_a_run_of_the_user_is_left_alone(tmp_path: Path, refused_sockets: list[Any]) -> None:
    import wandb

    mine = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True))
    try:
        loggers = _build({"wandb": {}}, tmp_path / "run")
        assert loggers[0].experiment.id == "0123456789abcdef"
        close_trackers(loggers, "completed")
        assert wandb.run is mine
        mine.log({"still": 1})
    finally:
        mine.finish()


@pytest.mark.slow
def test_wandb_prints_nothing_and_stays_in_its_folder(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    code = (
        "from pathlib import Path\n"
        "from normexp.training.trackers import build_trackers, close_trackers\n"
        "for index in range(2):\n"
        f"    folder = Path({str(tmp_path)!r}, str(index))\n"
        "    loggers = build_trackers({'wandb': {}}, run_dir=folder, run_name='n',\n"
        "        run_id=f'i{index}', group='g', config={})\n"
        "    loggers[0].log_metrics({'val/loss': float('nan'), 'samples': 1}, step=1)\n"
        "    close_trackers(loggers, 'interrupted')\n"
    )
    path = os.pathsep.join([str(CONF.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=work,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(work.iterdir())
    for index in range(2):
        (ending,) = _of_kind(_records(tmp_path / str(index)), "exit")
        assert ending.exit_code == 130


@pytest.mark.slow
def test_online_without_a_key_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError) as raised:
        _build({"wandb": {"mode": "online"}}, tmp_path / "run")
    assert str(raised.value).startswith("logger.trackers.wandb.mode=online: wandb did not start (")
    assert "\n" not in str(raised.value)
