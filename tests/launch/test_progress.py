"""What a sweep tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from normexp.launch import progress
from normexp.launch.progress import SweepProgress


@dataclass(eq=False)
class FakeJob:
    work: float = 100.0
    num_updates: int = 50
    seed: int = 3
    cell: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(facts=SimpleNamespace(cell="a-cell"))
    )


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.s)
    return now


def test_the_time_left_follows_the_work_done(clock):
    first, second = FakeJob(), FakeJob(work=300.0)
    shown = SweepProgress([first, second], total=5)
    assert shown.seconds_left() is None
    clock.s = 10.0
    shown.advance(first, 25)  # 50 of 400 in 10 s
    assert shown.seconds_left() == pytest.approx(70.0)
    shown.finish(first, "completed")  # 100 of 400
    assert shown.seconds_left() == pytest.approx(30.0)
    assert shown.num_done == 4


def test_without_a_terminal_it_is_plain_lines_now_and_then(clock, capsys):
    jobs = [FakeJob(), FakeJob()]
    with SweepProgress(jobs, total=3) as shown:
        for update in range(1, 50):
            clock.s += 1.0
            shown.advance(jobs[0], update)
        shown.finish(jobs[0], "failed", "exit code 3 [x]")
        shown.finish(jobs[1], "completed")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "training 2 of 3 runs (1 on disk already)",
        "1/3 runs about 1 min 9 s left",
        "failed: a-cell seed 3: exit code 3 [x]",
        "1 completed, 1 failed in 49 s",
    ]
