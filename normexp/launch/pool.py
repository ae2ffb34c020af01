"""Run jobs in processes of their own; the death of one is its own."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from normexp.errors import HeldElsewhereError
from normexp.launch.machine import training_share
from normexp.launch.plan import Job
from normexp.launch.progress import SweepProgress
from normexp.records import hold_lock, read_history, read_summary, run_id, write_json
from normexp.records.schema import SUMMARY_FILE

# Seconds that a run gets to write its record after it was told to stop.
_GRACE_S = 15.0


@dataclass
class _Running:
    """A job in its process."""

    job: Job
    process: BaseProcess
    progress: connection.Connection
    error: str | None = None


def run_jobs(jobs: Sequence[Job], *, num_jobs: int, total: int, fail_fast: bool = False) -> None:
    """Train runs, several at a time, until none is left.

    Args:
        jobs: Runs to do, in the order in which they start.
        num_jobs: Processes at a time.
        total: Runs of the whole sweep, those on disk included, for the display.
        fail_fast: Stop at the first run that fails; the others stay to be done.

    Raises:
        KeyboardInterrupt: After every running job has been told to stop and has ended.
    """
    if not jobs:
        Console(stderr=True).print(f"all {total} runs are on disk already")
        return
    context = fork_server()
    waiting = deque(jobs)
    running: list[_Running] = []
    with training_share(), SweepProgress(jobs, total=total) as progress, _sigterm_interrupts():
        try:
            while waiting or running:
                while waiting and len(running) < num_jobs:
                    running.append(_start(context, waiting.popleft()))
                _wait(running, progress)
                for ended in [item for item in running if not item.process.is_alive()]:
                    running.remove(ended)
                    status = _finish(ended)
                    reason = (read_summary(ended.job.folder) or {}).get("reason")
                    progress.finish(ended.job, status, reason)
                    if status == "failed" and fail_fast:
                        waiting.clear()
                        _stop(running)
        except BaseException:
            _stop(running)
            raise


def fork_server() -> Any:
    """Return the context whose processes fork from a server with torch imported once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["normexp.launch.worker", "typer", "rich.progress"])
    # Ctrl-C reaches the server too; it would tell of each import that it was in.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    return context


def _start(context: Any, job: Job) -> _Running:
    """Start a job's process."""
    from normexp.launch.worker import run_job

    # How an earlier attempt ended must not pass for the end of this one.
    (job.folder / SUMMARY_FILE).unlink(missing_ok=True)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_job, args=(job.cell.config, job.seed, sender))
    process.start()
    sender.close()
    return _Running(job, process, receiver)


def _wait(running: Sequence[_Running], progress: SweepProgress) -> None:
    """Wait for news of any job, and show it."""
    handles: list[Any] = [item.process.sentinel for item in running]
    handles += [item.progress for item in running if not item.progress.closed]
    ready = connection.wait(handles, timeout=0.5)
    for item in running:
        if item.progress not in ready:
            continue
        try:
            while item.progress.poll():
                news = item.progress.recv()
                if isinstance(news, str):
                    item.error = news
                else:
                    progress.advance(item.job, news)
        except EOFError:
            item.progress.close()


def _finish(ended: _Running) -> str:
    """Return how a job ended; one that died without a word is recorded as failed."""
    from normexp.launch.worker import HELD_ELSEWHERE

    ended.process.join()
    ended.progress.close()
    summary = read_summary(ended.job.folder)
    if summary is not None:
        return str(summary["status"])
    code = ended.process.exitcode or 0
    reason = f"the process died of signal {-code}" if code < 0 else f"exit code {code}"
    lock = ended.job.folder / ".lock"
    try:
        if code == HELD_ELSEWHERE:
            return "trained elsewhere"
        with hold_lock(lock, key="seeds", held="trained elsewhere"):
            summary = _describe_death(ended.job, ended.error or reason)
            write_json(ended.job.folder / SUMMARY_FILE, summary)
    except HeldElsewhereError:
        return "trained elsewhere"
    return "failed"


def _describe_death(job: Job, reason: str) -> dict[str, Any]:
    """Return the summary of a run whose process could not write one."""
    from normexp.data import DATASETS, load_dataset
    from normexp.training.summary import build_summary
    from normexp.training.totals import TextTotals, count_texts

    facts, config = job.cell.facts, job.cell.config
    history = read_history(job.folder)
    updates = int(history["update"].max()) if len(history) else 0
    texts = TextTotals()
    if DATASETS.get(config.data.name, key="data").card.is_text:
        data = load_dataset(config.data.name, config.data.params)
        texts = count_texts(data, facts.plan, seed=job.seed, updates=updates)
    return build_summary(
        facts,
        run_id=run_id(job.seed, config.to_plain(), facts.data_fingerprint),
        seed=job.seed,
        status="failed",
        reason=reason,
        metrics={},
        updates=updates,
        texts=texts,
    )


def _stop(running: Sequence[_Running]) -> None:
    """Tell jobs to stop, give them time to write their records, then end them."""
    for item in running:
        if item.process.is_alive():
            item.process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for item in running:
        item.process.join(max(0.0, deadline - time.monotonic()))
        if item.process.is_alive():
            item.process.kill()
            item.process.join()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let a polite kill of the launcher end a sweep as Ctrl-C does."""

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
