"""A cell's runs: paired over arms, repeatable over processes, resumable, honest about endings."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from normexp.config.schema import BudgetConfig, CellConfig, LoggerConfig, OptimizerConfig
from normexp.data import load_dataset
from normexp.data.batches import IndexStream, UpdatePlan
from normexp.errors import UserError
from normexp.launch.pool import fork_server
from normexp.models import initialize
from normexp.norms import NORMS
from normexp.records import read_history, read_journal, read_json, read_summary, write_json
from normexp.training import solo, windows
from normexp.training.cell import train_cell
from normexp.training.check import build_cell_model, check_cell

MakeCell = Callable[..., CellConfig]


def folder_of(config: CellConfig, seed: int = 0) -> Path:
    return check_cell(config).run_dir(config, seed)


def history_of(config: CellConfig, seed: int = 0) -> pd.DataFrame:
    return read_history(folder_of(config, seed)).drop(columns="wall_s")


def image_norms() -> list[str]:
    return [e.name for e in NORMS if 2 in e.card.dims and not e.card.takes_condition]


def test_arms_share_every_common_initial_weight(make_cell: MakeCell) -> None:
    data = load_dataset("digits", {})
    weights: dict[str, torch.Tensor] = {}
    shared = 0
    for norm in image_norms():
        model = build_cell_model(make_cell(norm), data)
        initialize(model, seed=3)
        for path, parameter in model.named_parameters():
            # A raw weight that a norm acts on counts under its plain name.
            name = re.sub(r"parametrizations\.weight\.original1?$", "weight", path)
            if name in weights and weights[name].shape == parameter.shape:
                torch.testing.assert_close(parameter, weights[name], rtol=0, atol=0)
                shared += 1
            weights.setdefault(name, parameter.detach().clone())
    # At the least, 9 convolutions and the classifier's two tensors in each further arm.
    assert shared >= (len(image_norms()) - 1) * 11


def test_arms_and_splits_share_the_data_order() -> None:
    streams = [
        IndexStream(UpdatePlan(1000, micro, steps, 4000, 1), seed=5)
        for micro, steps in [(8, 1), (4, 2), (2, 4)]
    ]
    orders = [stream.indices(100, 60).reshape(-1).tolist() for stream in streams]
    assert orders[0] == orders[1] == orders[2]
    other = IndexStream(UpdatePlan(1000, 8, 1, 4000, 1), seed=6).indices(100, 60)
    assert other.reshape(-1).tolist() != orders[0]


def test_the_windows_of_all_arms_hold_the_same_samples(make_cell: MakeCell) -> None:
    data = load_dataset("digits", {})
    seen = []
    for norm in ("batch_norm", "group_norm"):
        config = make_cell(norm)
        model = build_cell_model(config, data)
        plan = check_cell(config).plan
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module = solo.SoloModule(model, plan=plan, optimizer=optimizer, lr=lambda _: 0.1)
        source = windows.WindowSource(
            module,
            IndexStream(plan, 0),
            data,
            {"crop_padding": 1, "horizontal_flip": True},
            window_updates=7,
        )
        seen.append(torch.cat([window.inputs for window in source]))
    assert seen[0].shape == (20, 1, 8, 1, 8, 8)
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)


def _train_in_process(config: CellConfig, root: str) -> None:
    config.output_root = root
    train_cell(config)


@pytest.mark.parametrize("norm", ["batch_norm", "group_norm"])
def test_two_processes_give_bit_identical_runs(
    make_cell: MakeCell, tmp_path: Path, norm: str
) -> None:
    context = fork_server()
    roots = [str(tmp_path / name) for name in ("one", "two")]
    processes = [
        context.Process(target=_train_in_process, args=(make_cell(norm), root)) for root in roots
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    one, two = (make_cell(norm, output_root=root) for root in roots)
    pd.testing.assert_frame_equal(history_of(one), history_of(two), check_exact=True)
    assert read_summary(folder_of(one))["metrics"] == read_summary(folder_of(two))["metrics"]  # type: ignore[index]


def test_record_of_a_run(make_cell: MakeCell) -> None:
    config = make_cell("group_norm", budget=BudgetConfig(samples=250), num_evaluations=4)
    (identifier,) = train_cell(config)
    folder = folder_of(config)
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {"config.yaml", "environment.json", "history.parquet", "summary.json"}
    summary = read_summary(folder)
    assert summary is not None
    assert summary["run_id"] == identifier
    assert summary["status"] == "completed"
    # 250 samples in updates of 8 are 31.25: the last update goes beyond the budget, whole.
    assert summary["totals"]["updates"] == 32
    assert summary["totals"]["samples"] == 256
    history = read_history(folder)
    evaluations = history[history["split"] == "val"].drop_duplicates("evaluation")
    # At or after 62.5, 125, 187.5 and 250 samples.
    assert evaluations["update"].tolist() == [8, 16, 24, 32]
    assert evaluations["evaluation"].tolist() == [1, 2, 3, 4]
    test = history[history["split"] == "test"]
    assert sorted(test["metric"]) == ["accuracy", "loss"]
    assert (history["samples"] == history["update"] * 8).all()
    assert (
        sum(group["num_parameters"] for group in summary["parameter_groups"])
        == (summary["model"]["num_parameters"])
    )
    assert {g["role"]: g["weight_decay"] for g in summary["parameter_groups"]} == {
        "weight": 5e-4,
        "bias": 0.0,
        "norm": 0.0,
    }
    environment = read_json(folder / "environment.json")
    assert environment["num_threads"] == 1
    assert environment["data_fingerprint"] == load_dataset("digits", {}).fingerprint


def test_a_second_start_does_only_what_is_missing(make_cell: MakeCell) -> None:
    config = make_cell(seeds=[0])
    train_cell(config)
    before = (folder_of(config, 0) / "summary.json").stat().st_mtime_ns
    config.seeds = [0, 1]
    assert len(set(train_cell(config))) == 2
    assert (folder_of(config, 0) / "summary.json").stat().st_mtime_ns == before
    assert read_summary(folder_of(config, 1)) is not None


def test_divergence_is_an_outcome(make_cell: MakeCell) -> None:
    optimizer = OptimizerConfig("sgd", 1e9, 0.0, ["weight"], {"momentum": 0.9})
    config = make_cell("no_norm", optimizer=optimizer)
    train_cell(config)
    summary = read_summary(folder_of(config))
    assert summary is not None
    assert summary["status"] == "diverged"
    assert "training loss is" in summary["reason"]
    assert "test/accuracy" not in summary["metrics"]
    assert not (folder_of(config) / "journal.jsonl").exists()
    assert (folder_of(config) / "history.parquet").exists()


def test_a_buffer_that_is_not_finite_ends_the_run_and_is_named(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = solo.SoloModule.on_validation_epoch_start

    def poison(module: solo.SoloModule) -> None:
        dict(module.model.named_buffers())["stages.1.0.norm2.running_var"][3] = math.nan
        real(module)

    monkeypatch.setattr(solo.SoloModule, "on_validation_epoch_start", poison)
    config = make_cell("batch_norm")
    train_cell(config)
    summary = read_summary(folder_of(config))
    assert summary is not None
    assert summary["status"] == "diverged"
    assert "stages.1.0.norm2.running_var" in summary["reason"]


def test_a_failing_seed_does_not_stop_the_others(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = windows.WindowSource.window

    def fail_for_seed_0(source: windows.WindowSource, *arguments: Any) -> windows.Window:
        if source.stream.seed == 0:
            raise RuntimeError("no memory\nsecond line")
        return real(source, *arguments)

    monkeypatch.setattr(windows.WindowSource, "window", fail_for_seed_0)
    config = make_cell(seeds=[0, 1])
    train_cell(config)
    first, second = (read_summary(folder_of(config, seed)) for seed in (0, 1))
    assert first is not None
    assert second is not None
    assert (first["status"], first["reason"]) == ("failed", "RuntimeError: no memory")
    assert "second line" in (folder_of(config, 0) / "error.txt").read_text()
    assert second["status"] == "completed"


def _interrupt_at(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = solo.SoloModule.training_step

    def step(module: solo.SoloModule, window: windows.Window, batch_idx: int) -> None:
        if module.update >= update:
            raise KeyboardInterrupt
        real(module, window, batch_idx)

    monkeypatch.setattr(solo.SoloModule, "training_step", step)


@pytest.mark.parametrize("norm", ["batch_norm", "group_norm"])
@pytest.mark.parametrize("at", [5, 12, 20])
def test_stop_and_resume_is_bit_identical(
    make_cell: MakeCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: str, at: int
) -> None:
    settings: dict[str, Any] = {"budget": BudgetConfig(updates=30), "num_evaluations": 3}
    whole = make_cell(norm, output_root=str(tmp_path / "whole"), **settings)
    stopped = make_cell(norm, output_root=str(tmp_path / "stopped"), **settings)
    for config in (whole, stopped):
        config.trainer.window_updates = 4
        config.trainer.checkpoint_interval_s = 1e-9
    train_cell(whole)
    with monkeypatch.context() as patch:
        _interrupt_at(at, patch)
        with pytest.raises(KeyboardInterrupt):
            train_cell(stopped)
    summary = read_summary(folder_of(stopped))
    assert summary is not None
    assert summary["status"] == "interrupted"
    # Lightning ignores Ctrl-C for good after it met one; the handler must be back.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(read_journal(folder_of(stopped))) > 0
    train_cell(stopped)
    resumed = read_summary(folder_of(stopped))
    reference = read_summary(folder_of(whole))
    assert resumed is not None
    assert reference is not None
    assert resumed["totals"]["resumed_from_update"] > 0
    assert resumed["status"] == "completed"
    assert resumed["metrics"] == reference["metrics"]
    pd.testing.assert_frame_equal(history_of(stopped), history_of(whole), check_exact=True)


def test_looking_changes_nothing(make_cell: MakeCell, tmp_path: Path) -> None:
    config = make_cell("batch_norm", output_root=str(tmp_path / "a"))
    often = make_cell(
        "batch_norm",
        output_root=str(tmp_path / "b"),
        num_evaluations=5,
        probes=["running_statistics"],
        logger=LoggerConfig({"csv": {}}),
    )
    for cell in (config, often):
        train_cell(cell)
    rows = [
        history_of(cell).query("split == 'test' or (split == 'val' and update == 20)")
        for cell in (config, often)
    ]
    assert rows[0]["value"].tolist() == rows[1]["value"].tolist()
    summary = read_summary(folder_of(often))
    assert summary is not None
    assert summary["metrics"]["running_statistic_mean_error"] > 0


def test_evaluation_batch_size_does_not_change_the_result(
    make_cell: MakeCell, tmp_path: Path
) -> None:
    values = []
    for size in (1, 7, 64):
        config = make_cell("batch_norm", output_root=str(tmp_path / str(size)))
        config.trainer.eval_batch_size = size
        train_cell(config)
        summary = read_summary(folder_of(config))
        assert summary is not None
        values.append(summary["metrics"])
    for metrics in values[1:]:
        assert metrics["test/loss"] == pytest.approx(values[0]["test/loss"], rel=1e-6)
        assert metrics["test/accuracy"] == values[0]["test/accuracy"]


def test_another_process_holds_the_run(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    from normexp.training import cell

    config = make_cell()
    folder = folder_of(config)
    folder.mkdir(parents=True)
    real = cell.hold_lock
    monkeypatch.setattr(cell, "hold_lock", lambda *a, **k: real(*a, **{**k, "timeout_s": 0.1}))
    with FileLock(str(folder / ".lock")), pytest.raises(UserError, match="another process"):
        train_cell(config)


def test_checkpoints_hold_plain_types_only(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_cell("batch_norm")
    config.trainer.window_updates = 4
    config.trainer.checkpoint_interval_s = 1e-9
    _interrupt_at(8, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_cell(config)
    checkpoint = torch.load(folder_of(config) / "checkpoint.ckpt")  # weights_only by default
    assert checkpoint["progress"] == {"update": 8, "evaluation": 0}
    assert json.dumps(checkpoint["progress"])


@pytest.mark.parametrize("content", [b"", b"half a check", b"PK\x03\x04 torn"])
def test_a_torn_checkpoint_is_no_checkpoint(make_cell: MakeCell, content: bytes) -> None:
    config = make_cell()
    (identifier,) = train_cell(config)
    folder = folder_of(config)
    reference = read_summary(folder)
    # As after a kill: the conditions are noted, the summary is not there.
    (folder / "summary.json").unlink()
    (folder / "checkpoint.ckpt").write_bytes(content)
    assert train_cell(config) == [identifier]
    summary = read_summary(folder)
    assert summary is not None
    assert reference is not None
    assert summary["totals"]["resumed_from_update"] == 0
    assert summary["metrics"] == reference["metrics"]
    assert (folder / "checkpoint.unreadable").exists()


def _stop_at(config: CellConfig, update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config.trainer.window_updates = 4
    config.trainer.checkpoint_interval_s = 1e-9
    with monkeypatch.context() as patch:
        _interrupt_at(update, patch)
        with pytest.raises(KeyboardInterrupt):
            train_cell(config)


def test_a_checkpoint_of_other_layers_is_no_checkpoint(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_cell()
    _stop_at(config, 8, monkeypatch)
    path = folder_of(config) / "checkpoint.ckpt"
    checkpoint = torch.load(path)
    checkpoint["state_dict"]["model.renamed"] = checkpoint["state_dict"].popitem()[1]
    torch.save(checkpoint, path)
    train_cell(config)
    summary = read_summary(folder_of(config))
    assert summary is not None
    assert (summary["status"], summary["totals"]["resumed_from_update"]) == ("completed", 0)


@pytest.mark.parametrize(
    ("key", "value"), [("commit", "another"), ("torch", "1.0"), ("cpu", "abacus"), (None, None)]
)
def test_a_run_is_made_under_one_set_of_conditions(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, key: str | None, value: str | None
) -> None:
    config = make_cell()
    _stop_at(config, 8, monkeypatch)
    path = folder_of(config) / "environment.json"
    if key is not None:
        write_json(path, {**read_json(path), key: value})
    train_cell(config)
    summary = read_summary(folder_of(config))
    assert summary is not None
    assert summary["totals"]["resumed_from_update"] == (8 if key is None else 0)
    if key is not None:
        assert read_json(path)[key] != value


def test_the_training_loss_of_an_evaluation_is_the_mean_since_the_last(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_cell(budget=BudgetConfig(updates=20), num_evaluations=2)
    # Windows of 4, 4, 2 before each evaluation; stopped in the second stretch.
    _stop_at(config, 14, monkeypatch)
    train_cell(config)
    history = read_history(folder_of(config)).query("split == 'train'")
    windows = history[history["evaluation"].isna()]["value"].tolist()
    evaluations = history[history["evaluation"].notna()]
    assert evaluations["update"].tolist() == [10, 20]
    for value, (a, b, c) in zip(evaluations["value"], (windows[:3], windows[3:]), strict=True):
        assert value == pytest.approx((4 * a + 4 * b + 2 * c) / 10, rel=1e-15)
    summary = read_summary(folder_of(config))
    assert summary is not None
    assert summary["metrics"]["train/loss"] == evaluations["value"].iloc[-1]
