"""How much of the machine other processes used while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")


class ForeignLoad:
    """Share of the machine's cores that other processes were busy on, from start to ``share()``.

    Args:
        stat: The system's count of busy time; another file in tests.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._started = time.perf_counter()
        self._busy = self._read_busy_s()
        self._own = time.process_time()

    def share(self) -> float | None:
        """Return the share in [0, 1], or None where the system does not tell.

        The system counts in steps of a hundredth of a second, so spans below a second say little.
        """
        busy = self._read_busy_s()
        elapsed = time.perf_counter() - self._started
        if busy is None or self._busy is None or elapsed <= 0:
            return None
        foreign = (busy - self._busy) - (time.process_time() - self._own)
        return max(0.0, min(1.0, foreign / (elapsed * (os.cpu_count() or 1))))

    def _read_busy_s(self) -> float | None:
        """Return the seconds that all cores have been busy since the system started."""
        try:
            fields = [int(field) for field in self._stat.read_text().split("\n")[0].split()[1:]]
        except (OSError, ValueError, IndexError):
            return None
        if len(fields) < 8:
            return None
        idle = sum(fields[3:5])  # idle, and waiting for a disk
        return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")
