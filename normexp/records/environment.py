"""The conditions under which a run was made."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import normexp
from normexp.records.schema import NUMERICS_VERSION

_PACKAGES = ("torch", "torchvision", "lightning", "numpy", "pandas", "hydra-core")


@functools.cache
def describe_commit() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that normexp runs from, and whether it was changed.

    Returns:
        (None, None) for an installed copy. Files under results/ do not count as a change.
    """
    root = Path(normexp.__file__).resolve().parent.parent
    if not (root / "pyproject.toml").exists():
        return None, None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", ".", ":!results")
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit, bool(changed)


def describe_environment(
    *, device: str, num_threads: int, precision: str, data_fingerprint: str
) -> dict[str, Any]:
    """Return what ``environment.json`` holds.

    Args:
        device: Name of the device that trains.
        num_threads: CPU threads of the run.
        precision: Lightning's name of the precision, such as "32-true".
        data_fingerprint: Hash over the data set's tensors.
    """
    commit, is_dirty = describe_commit()
    return {
        "commit": commit,
        "is_dirty": is_dirty,
        "normexp": normexp.__version__,
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version_of(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": describe_cpu(),
        "num_cores": count_cores(),
        "device": device,
        "num_threads": num_threads,
        "precision": precision,
        "data_fingerprint": data_fingerprint,
        "numerics_version": NUMERICS_VERSION,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def count_cores() -> int:
    """Return the number of cores this process may use, which a container or queue can limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _count_quota()))


def _count_quota(limits: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the whole cores that the control group's quota allows; many without a quota."""
    try:
        quota, period = limits.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file; "max" is no number
        return sys.maxsize


@functools.cache
def describe_cpu() -> str:
    """Return the processor's own name, or its architecture where the system tells none."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _version_of(package: str) -> str | None:
    """Return a package's version without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
