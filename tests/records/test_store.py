"""Files appear whole or not at all, and numbers come back as they were."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from normexp.errors import UserError
from normexp.records import (
    HistoryRow,
    Journal,
    clear_partial,
    cut_journal,
    find_runs,
    hold_lock,
    read_history,
    read_journal,
    read_json,
    read_plan,
    read_summary,
    run_dir,
    write_history,
    write_json,
    write_plan,
    write_whole,
    write_yaml,
)
from normexp.records.schema import HISTORY_FILE, JOURNAL_FILE
from normexp.records.store import decode, encode

INF, NAN = math.inf, math.nan


def row(update: int, value: float | None = 0.5, evaluation: int | None = None) -> HistoryRow:
    split = "train" if evaluation is None else "val"
    return HistoryRow(8 * update, update, update / 10, evaluation, split, "loss", value, 0.1)


def same(first: object, second: object) -> bool:
    """Equality under which NaN equals itself and 1 is not 1.0."""
    return repr(first) == repr(second)


# --- whole files


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"new": 2})
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_value_that_json_lacks_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == {"old": 1}


def test_a_reader_never_meets_half_a_file(tmp_path):
    path = tmp_path / "deep" / "file"
    contents = {b"a" * 100_000, b"b" * 200_000}
    write_whole(path, b"a" * 100_000)
    seen, done = set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        for content in sorted(contents):
            write_whole(path, content)
    done.set()
    reader.join()
    assert seen <= contents


def test_files_are_for_sharing(tmp_path):
    write_whole(tmp_path / "file", "é")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "file").read_bytes() == "é".encode()


# --- JSON, YAML

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
).filter(lambda value: not (set(_texts(value)) & {"NaN", "Infinity", "-Infinity"}))


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


@given(JSON)
def test_plain_values_come_back_as_they_were(value):
    text = json.dumps(encode(value), allow_nan=False)
    assert same(decode(json.loads(text)), value)


def test_numbers_that_json_lacks_are_words_in_the_file(tmp_path):
    path = tmp_path / "a.json"
    value = {"nan": NAN, "inf": INF, "minus": [-INF], "null": None, "tenth": 0.1}
    write_json(path, value)
    # Any JSON reader can read it: no bare NaN.
    plain = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert plain == {
        "nan": "NaN",
        "inf": "Infinity",
        "minus": ["-Infinity"],
        "null": None,
        "tenth": 0.1,
    }
    assert same(read_json(path), value)


def test_yaml_keeps_the_order_of_keys_and_plain_types(tmp_path):
    write_yaml(tmp_path / "config.yaml", {"b": 1, "a": {"lr": 1e-05}})
    text = (tmp_path / "config.yaml").read_text()
    assert text.index("b:") < text.index("a:")
    assert yaml.safe_load(text) == {"b": 1, "a": {"lr": 1e-05}}


def test_a_folder_without_records_has_none(tmp_path):
    assert read_summary(tmp_path) is None
    assert read_plan(tmp_path / "nowhere") is None
    assert read_journal(tmp_path) == []
    assert find_runs(tmp_path) == []


def test_runs_are_found_where_run_dir_puts_them(tmp_path):
    folders = [run_dir(tmp_path, "name", cell, seed) for cell in ("b", "a") for seed in (1, 0)]
    for folder in folders:
        folder.mkdir(parents=True)
    (tmp_path / "name" / "runs" / "a" / "cost.json").write_text("{}")
    assert find_runs(tmp_path / "name") == sorted(folders)
    assert len(set(folders)) == 4


def test_a_plan_comes_back(tmp_path):
    plan = {"name": "x", "cells": [{"factors": {"optimizer.lr": INF}}]}
    write_plan(tmp_path / "x", plan)
    assert read_plan(tmp_path / "x") == plan


# --- history


ROWS = [
    row(0, NAN),
    row(1, None),
    row(2, INF, evaluation=1),
    row(3, -INF),
    row(2**40, 0.1 + 0.2, evaluation=2),
]


@pytest.mark.parametrize("source", ["history", "journal"])
def test_null_nan_and_infinities_are_kept_apart(tmp_path, source):
    if source == "history":
        write_history(tmp_path, ROWS)
    else:
        with contextlib.closing(Journal(tmp_path)) as journal:
            journal.append(ROWS)
    frame = read_history(tmp_path)
    assert list(frame.columns) == list(HistoryRow._fields)
    assert frame["update"].tolist() == [0, 1, 2, 3, 2**40]
    assert frame["evaluation"].dtype == "Int64"
    assert frame["evaluation"].isna().tolist() == [True, True, False, True, False]
    assert frame["evaluation"].dropna().tolist() == [1, 2]
    values = frame["value"]
    assert values.dtype == np.float64
    assert values.iloc[2] == INF
    assert values.iloc[3] == -INF
    assert values.iloc[4] == 0.1 + 0.2


def test_null_is_not_nan_in_the_history_file(tmp_path):
    import pyarrow.parquet as pq

    write_history(tmp_path, ROWS)
    column = pq.read_table(tmp_path / HISTORY_FILE)["value"]
    assert column.null_count == 1
    assert math.isnan(column[0].as_py())
    assert column[1].as_py() is None


def test_an_empty_history_has_its_types(tmp_path):
    write_history(tmp_path, [])
    frame = read_history(tmp_path)
    assert len(frame) == 0
    assert frame["update"].dtype == np.int64
    assert pd.api.types.is_string_dtype(frame["metric"])


# --- journal


@given(st.lists(st.builds(row, st.integers(0, 99), st.none() | st.floats()), max_size=5))
def test_rows_of_a_journal_come_back(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("run")
    journal = Journal(folder)
    journal.append(rows)
    assert same(read_journal(folder), rows), "not on disk while the journal is open"
    journal.close()


def test_a_line_that_a_kill_cut_off_is_left_out_at_every_byte(tmp_path):
    journal = Journal(tmp_path)
    journal.append([row(1), row(2, NAN)])
    journal.close()
    path = tmp_path / JOURNAL_FILE
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        rows = read_journal(tmp_path)
        assert len(rows) == (1 if length >= first else 0)


def test_a_resumed_journal_loses_the_torn_line_and_the_rows_that_come_again(tmp_path):
    journal = Journal(tmp_path)
    journal.append([row(10), row(20, evaluation=1), row(30)])
    journal.close()
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:-5])
    assert cut_journal(tmp_path, 20) == 0.1
    journal = Journal(tmp_path)
    journal.append([row(30)])
    journal.close()
    assert [found.update for found in read_journal(tmp_path)] == [10, 20, 30]


def test_a_run_that_starts_again_keeps_nothing(tmp_path):
    journal = Journal(tmp_path)
    journal.append([row(0), row(10)])
    journal.close()
    assert cut_journal(tmp_path, 0) == 0.0
    assert read_journal(tmp_path) == []


# --- locks


def test_a_held_lock_is_refused_with_one_line(tmp_path):
    path = tmp_path / "new" / ".lock"
    with (
        hold_lock(path, key="name", held="wait"),
        pytest.raises(UserError) as caught,
        hold_lock(path, key="name", held="wait"),
    ):
        pass
    assert str(caught.value) == f"name={path.parent}: wait"
    with hold_lock(path, key="name", held="wait"):
        pass


def test_a_lock_dies_with_its_holder(tmp_path):
    path = tmp_path / ".lock"
    code = (
        "import sys, os, pathlib\n"
        "from normexp.records import hold_lock\n"
        "with hold_lock(pathlib.Path(sys.argv[1]), key='k', held='h'):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError), hold_lock(path, key="name", held="wait"):
        pass
    holder.kill()
    holder.communicate()
    with hold_lock(path, key="name", held="wait", timeout_s=5.0):
        pass


def test_no_process_writes_where_it_only_reads(tmp_path):
    read_history(tmp_path)
    read_summary(tmp_path)
    read_plan(tmp_path)
    assert list(Path(tmp_path).iterdir()) == []


def test_what_a_kill_left_half_written_is_cleared(tmp_path):
    write_json(tmp_path / "summary.json", {"a": 1})
    (tmp_path / ".lock").touch()
    for name in (".environment.json.k3j4.partial", "checkpoint.partial"):
        (tmp_path / name).write_text("half")
    clear_partial(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", ".lock"}


def test_a_file_being_written_is_one_that_a_kill_may_leave(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.extend(tmp_path.iterdir()))
    write_json(tmp_path / "summary.json", {"a": 1})
    assert [path.suffix for path in seen] == [".partial"]
