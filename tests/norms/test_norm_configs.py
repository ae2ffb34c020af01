"""Every conf/norm file names a norm and every option of it with its default."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from normexp.norms import NORMS, RESERVED

FOLDER = Path(__file__).parents[2] / "conf" / "norm"


def test_every_norm_has_a_file_and_every_file_a_norm():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == NORMS.names()


@pytest.mark.parametrize("entry", list(NORMS), ids=lambda entry: entry.name)
def test_file_holds_every_option_with_its_default(entry):
    config = yaml.safe_load((FOLDER / f"{entry.name}.yaml").read_text())
    expected = {k: p.default for k, p in entry.parameters().items() if k not in RESERVED}
    if entry.name in ("group_norm", "adaptive_group_norm", "evo_norm_s0"):
        # In Python neither is given by default; the file writes down what that means.
        expected["num_groups"] = 8
    assert config == {"name": entry.name, "params": expected}
