"""How far a sweep is and how long it will take."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from normexp.launch.plan import Job

# Where nobody watches a terminal, a line now and then.
_PLAIN_INTERVAL_S = 30.0


class SweepProgress:
    """A bar over the runs of a sweep, or plain lines where the output is no terminal.

    Args:
        jobs: Runs to do.
        total: Runs of the whole sweep, those on disk included.
    """

    def __init__(self, jobs: Sequence[Job], *, total: int) -> None:
        self.total = total
        self.num_done = total - len(jobs)
        self.statuses: Counter[str] = Counter()
        self._started = time.monotonic()
        self._left = {id(job): job.work for job in jobs}
        self._work = sum(self._left.values())
        self._console = Console(stderr=True)
        self._is_live = sys.stderr.isatty()
        self._last_line = self._started
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[runs]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=self._work, runs="", left="")

    def __enter__(self) -> SweepProgress:
        known = f" ({self.num_done} on disk already)" if self.num_done else ""
        self._console.print(f"training {len(self._left)} of {self.total} runs{known}")
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_live:
            self._bar.stop()
        ends = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        seconds = time.monotonic() - self._started
        self._console.print(f"{ends or 'no run ended'} in {format_seconds(seconds)}")

    def advance(self, job: Job, update: int) -> None:
        """Show that a job has done so many updates."""
        self._left[id(job)] = job.work * (1 - update / job.num_updates)
        self._show()

    def finish(self, job: Job, status: str, reason: str | None = None) -> None:
        """Show that a job has ended, and why unless it is as planned."""
        self._left[id(job)] = 0.0
        self.num_done += 1
        self.statuses[status] += 1
        if status in ("failed", "diverged"):
            why = f": {reason}" if reason else ""
            line = f"{status}: {job.cell.facts.cell} seed {job.seed}{why}"
            self._console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
        self._show()

    def seconds_left(self) -> float | None:
        """Return the seconds until the end at the pace so far; None before there is one."""
        left = sum(self._left.values())
        done = self._work - left
        elapsed = time.monotonic() - self._started
        return left * elapsed / done if done > 0.01 * self._work else None

    def _show(self) -> None:
        seconds = self.seconds_left()
        left = "" if seconds is None else f"about {format_seconds(seconds)} left"
        runs = f"{self.num_done}/{self.total} runs"
        if self._is_live:
            done = self._work - sum(self._left.values())
            self._bar.update(self._task, completed=done, runs=runs, left=left)
        elif time.monotonic() - self._last_line > _PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            self._console.print(f"{runs} {left}")


def format_seconds(seconds: float) -> str:
    """Return a duration for people.

    Examples:
        >>> format_seconds(7.4), format_seconds(92), format_seconds(7300)
        ('7 s', '1 min 32 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
