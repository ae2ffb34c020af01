"""Shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Threads change last digits; the tests compare last digits."""
    torch.set_num_threads(1)
