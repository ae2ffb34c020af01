"""weight_norm against its formula in NumPy and against torch's own parametrization."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.weights import weight_norm
from torch import nn
from torch.nn.utils import parametrizations

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.weight_norm import build_weight_norm, parametrize_weight


@given(shape=st.sampled_from([(3, 4), (5, 1), (4, 2, 3, 3), (1, 6, 1, 1)]), seed=st.integers(0, 9))
def test_matches_the_formula(shape, seed):
    rng = np.random.default_rng(seed)
    g, v = rng.normal(1.0, 0.5, shape[0]), rng.normal(0.2, 2.0, shape)
    layer = (
        nn.Conv2d(shape[1], shape[0], shape[2], bias=False)
        if len(shape) == 4
        else nn.Linear(shape[1], shape[0])
    )
    raw = parametrize_weight(layer.double()).parametrizations.weight
    with torch.no_grad():
        raw.original0.copy_(torch.from_numpy(g).reshape(raw.original0.shape))
        raw.original1.copy_(torch.from_numpy(v))
    np.testing.assert_allclose(layer.weight.detach(), weight_norm(g, v), rtol=0, atol=1e-10)


def test_state_dict_and_numbers_are_those_of_torchs_parametrization():
    torch.manual_seed(0)
    theirs = parametrizations.weight_norm(nn.Conv2d(2, 3, 3), dim=0)
    ours = parametrize_weight(nn.Conv2d(2, 3, 3))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 2, 5, 5)
    assert torch.equal(ours(x), theirs(x))


def test_putting_it_on_keeps_the_effective_weight():
    layer = nn.Linear(7, 5).double()
    before = layer.weight.detach().clone()
    torch.testing.assert_close(parametrize_weight(layer).weight, before, rtol=1e-14, atol=0)


def test_its_place_in_the_network_holds_the_identity():
    layer = NormFactory("weight_norm")(8, role="block", dims=2)
    assert type(layer) is nn.Identity
    assert layer.norm_record.params == {}
    with pytest.raises(UserError, match=r"^norm=weight_norm: .*dims=3"):
        build_weight_norm(8, dims=3)
