"""The conditions of a run, as it records them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

from normexp.records import NUMERICS_VERSION, count_cores, describe_environment


def test_every_condition_is_there():
    found = describe_environment(
        device="a device", num_threads=3, precision="64-true", data_fingerprint="ff"
    )
    json.dumps(found)
    assert found["device"] == "a device"
    assert (found["num_threads"], found["precision"]) == (3, "64-true")
    assert (found["data_fingerprint"], found["numerics_version"]) == ("ff", NUMERICS_VERSION)
    for package in ("normexp", "torch", "torchvision", "lightning", "numpy", "python", "cpu"):
        assert found[package]
    assert datetime.fromisoformat(found["started_at"]).tzinfo is not None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_cores_are_those_that_this_process_may_use():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from normexp.records import count_cores; print(count_cores())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "1\n", printed.stderr
    assert count_cores() == len(os.sched_getaffinity(0))


def test_records_need_no_torch():
    code = "import sys, normexp.records; print([m for m in ('torch', 'hydra') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == "[]\n", printed.stderr
