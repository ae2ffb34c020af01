from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command starts in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
