"""Who else of normexp works on this machine: training shares it, a cost pass has it alone."""

from __future__ import annotations

import contextlib
import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rich.console import Console

try:
    import fcntl
except ImportError:  # not on Windows: there the measured load of others is the only guard
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def training_share() -> Iterator[None]:
    """Hold a share of the machine while training; waits for a cost pass to end."""
    yield from _hold(is_exclusive=False, waiting_for="a cost pass on this machine to end")


@contextlib.contextmanager
def whole_machine() -> Iterator[None]:
    """Hold the machine while timing; waits for all other training of this user to end."""
    yield from _hold(is_exclusive=True, waiting_for="other training on this machine to end")


def _hold(*, is_exclusive: bool, waiting_for: str) -> Iterator[None]:
    """Hold the machine's lock file; the system lets go of it when the process dies."""
    if fcntl is None:
        yield
        return
    kind = fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH
    with _lock_file() as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            Console(stderr=True).print(f"waiting for {waiting_for}")
            fcntl.flock(file, kind)
        yield


def _lock_file() -> IO[bytes]:
    """Return the lock file of this user, open; ``NORMEXP_LOCK_DIR`` moves it, as tests do."""
    folder = os.environ.get("NORMEXP_LOCK_DIR") or tempfile.gettempdir()
    return (Path(folder) / f"normexp-{getpass.getuser()}.lock").open("ab")
