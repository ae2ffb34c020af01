"""What a job's process does. The fork server imports this module once, for all jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing import connection, parent_process
from types import FrameType
from typing import Any

import sklearn.datasets  # noqa: F401 - imported here once, so that no job pays for it

from normexp.config.compose import load_plugins
from normexp.config.schema import CellConfig
from normexp.errors import HeldElsewhereError
from normexp.records.environment import describe_commit
from normexp.training.cell import train_cell

# Exit code of a job whose run another process trains (EX_TEMPFAIL).
HELD_ELSEWHERE = 75

# The jobs run the code that the fork server imported, so this is their commit, whatever is
# committed while they run. The answer is cached, and a fork inherits the cache.
describe_commit()


def run_job(config: CellConfig, seed: int, progress: connection.Connection) -> None:
    """Train one run.

    Args:
        config: The composed cell.
        seed: Seed of the run.
        progress: Gets the number of updates done, now and then, and a line if the job breaks.
    """
    die_with_parent()
    # Ctrl-C reaches the whole process group; the launcher alone decides and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    load_plugins(config.plugins)

    def report(_: int, update: int) -> None:
        with contextlib.suppress(OSError):
            progress.send(update)

    try:
        train_cell(config, [seed], on_progress=report)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except HeldElsewhereError:
        raise SystemExit(HELD_ELSEWHERE) from None
    except Exception as error:
        # The launcher records it: this process could not.
        with contextlib.suppress(OSError):
            progress.send(f"{type(error).__name__}: {error}")
        raise


def die_with_parent() -> None:
    """End this process when the launcher dies, however it dies: no run goes on unseen."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _interrupt(_: int, __: FrameType | None) -> Any:
    raise KeyboardInterrupt
