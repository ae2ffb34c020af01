"""How busy others were, from the system's counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from normexp.measure import load
from normexp.measure.load import ForeignLoad

TICKS = os.sysconf("SC_CLK_TCK")


def write(path: Path, *, user_s: float, idle_s: float) -> None:
    ticks = [round(user_s * TICKS), 0, 0, round(idle_s * TICKS), 0, 0, 0, 0, 0, 0]
    path.write_text("cpu  " + " ".join(map(str, ticks)) + "\ncpu0 1 2 3\n")


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"wall": 100.0, "own": 7.0}
    monkeypatch.setattr(load.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(load.time, "process_time", lambda: now["own"])
    monkeypatch.setattr(load.os, "cpu_count", lambda: 4)
    return now


def test_what_others_used_is_all_that_was_busy_but_not_here(
    tmp_path: Path, clocks: dict[str, float]
) -> None:
    stat = tmp_path / "stat"
    write(stat, user_s=1000.0, idle_s=50.0)
    foreign = ForeignLoad(stat)
    clocks["wall"] += 10.0
    clocks["own"] += 9.0
    # In 10 s on 4 cores 17 s were busy, 9 of them here: others used 8 of 40.
    write(stat, user_s=1017.0, idle_s=73.0)
    assert foreign.share() == pytest.approx(0.2, abs=1e-9)


def test_alone_is_zero_however_the_clocks_round(tmp_path: Path, clocks: dict[str, float]) -> None:
    stat = tmp_path / "stat"
    write(stat, user_s=5.0, idle_s=0.0)
    foreign = ForeignLoad(stat)
    clocks["wall"] += 2.0
    clocks["own"] += 2.0
    write(stat, user_s=6.99, idle_s=6.0)
    assert foreign.share() == 0.0


@pytest.mark.parametrize("content", [None, "", "cpu a b c\n"])
def test_where_the_system_does_not_tell_it_is_unknown(
    tmp_path: Path, clocks: dict[str, float], content: str | None
) -> None:
    stat = tmp_path / "stat"
    if content is not None:
        stat.write_text(content)
    foreign = ForeignLoad(stat)
    clocks["wall"] += 1.0
    assert foreign.share() is None
