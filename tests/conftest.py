"""Shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from normexp.data import DATASETS
from normexp.models import MODELS
from normexp.norms import NORMS

# How long an example takes says more about the machine than about the code.
settings.register_profile("normexp", deadline=None)
settings.load_profile("normexp")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Threads change last digits; the tests compare last digits."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_entries_only() -> Iterator[None]:
    """What a test's plugin registers is gone after the test."""
    before = [(registry, set(registry.names())) for registry in (NORMS, MODELS, DATASETS)]
    yield
    for registry, names in before:
        for name in set(registry.names()) - names:
            del registry._entries[name]


@pytest.fixture(autouse=True, scope="session")
def _own_machine_lock(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests and whatever else trains on this machine do not wait for each other."""
    os.environ["NORMEXP_LOCK_DIR"] = str(tmp_path_factory.mktemp("machine"))


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_works() -> None:
    """A shell's background job starts with SIGINT ignored, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
