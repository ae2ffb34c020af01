"""Training shares a machine; a cost pass has it alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from normexp.launch.machine import training_share, whole_machine

HOLDER = """
import os, sys
os.environ["NORMEXP_LOCK_DIR"] = sys.argv[1]
from normexp.launch import machine
with getattr(machine, sys.argv[2])():
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMEXP_LOCK_DIR", str(tmp_path))


def hold_elsewhere(tmp_path: Path, kind: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), kind]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_two_trainings_share_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = hold_elsewhere(tmp_path, "training_share")
    with training_share():
        pass
    other.communicate("\n")
    assert "waiting" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mine", "theirs", "line"),
    [
        (whole_machine, "training_share", "waiting for other training"),
        (whole_machine, "whole_machine", "waiting for other training"),
        (training_share, "whole_machine", "waiting for a cost pass"),
    ],
)
def test_a_cost_pass_and_anything_else_wait_for_each_other(
    tmp_path: Path, mine, theirs: str, line: str
) -> None:
    other = hold_elsewhere(tmp_path, theirs)
    waiter = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), mine.__name__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert waiter.stderr is not None
    assert line in waiter.stderr.readline()
    assert waiter.poll() is None
    other.communicate("\n")
    out, _ = waiter.communicate("\n")
    assert out == "held\n"
