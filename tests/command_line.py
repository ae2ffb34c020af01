"""Run the real command line in this process, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from normexp.cli.main import main

COMMAND = [sys.executable, "-m", "normexp"]


@dataclass(frozen=True)
class Outcome:
    """What a command left in the terminal."""

    code: int
    out: str
    err: str


def normexp(*arguments: str) -> Outcome:
    """Run ``normexp`` in this process, where the imports are paid for once."""
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    with (
        mock.patch.object(sys, "argv", ["normexp", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return Outcome(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def started(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``normexp`` in a session of its own; nothing of it is left afterwards."""
    log = (folder / "stderr.txt").open("w")
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        log.close()
        for left in processes_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.wait()


def processes_of(session: int) -> list[int]:
    """Return the live processes of a session (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def children_of(parent: int) -> list[int]:
    """Return the live children of a process (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(stat.parent.name))
    return found
