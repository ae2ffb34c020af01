from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine


@pytest.fixture
def normexp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> CommandLine:
    """The command line, started in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return CommandLine(capsys, monkeypatch)
