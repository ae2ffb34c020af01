"""Every conf/model file names a model and every option of it with its default."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from normexp.models import MODELS, RESERVED

FOLDER = Path(__file__).parents[2] / "conf" / "model"


def test_every_model_has_a_file_and_every_file_a_model():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == MODELS.names()


@pytest.mark.parametrize("entry", list(MODELS), ids=lambda entry: entry.name)
def test_file_holds_every_option_with_its_default(entry):
    config = yaml.safe_load((FOLDER / f"{entry.name}.yaml").read_text())
    expected = {k: p.default for k, p in entry.parameters().items() if k not in RESERVED}
    assert config == {"name": entry.name, "params": expected}
