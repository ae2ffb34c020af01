"""no_norm returns its input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.no_norm import CARD, build_no_norm


def test_returns_its_input_and_has_nothing():
    layer = build_no_norm(8, dims=2)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 8, 3, 3)))
    assert layer(x) is x
    assert list(layer.state_dict()) == []
    assert CARD.statistic_sets == {0: (), 1: (), 2: ()}


def test_takes_no_option():
    with pytest.raises(UserError, match=r"^norm\.params\.eps=1e-05: "):
        NormFactory("no_norm", {"eps": 1e-5})


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=no_norm: .*dims=3"):
        build_no_norm(8, dims=3)
