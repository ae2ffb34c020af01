"""weight_standardization against its formula in NumPy, and its group norm."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.weights import weight_standardization
from torch import nn

from normexp.norms import NormFactory
from normexp.norms.group_norm import GroupNorm
from normexp.norms.weight_standardization import parametrize_weight


@given(
    shape=st.sampled_from([(3, 4), (5, 2), (4, 2, 3, 3), (1, 6, 1, 1)]),
    weight_eps=st.sampled_from([1e-5, 0.5]),
    seed=st.integers(0, 9),
)
def test_matches_the_formula(shape, weight_eps, seed):
    weight = np.random.default_rng(seed).normal(0.5, 2.0, shape)
    layer = (
        nn.Conv2d(shape[1], shape[0], shape[2], bias=False)
        if len(shape) == 4
        else nn.Linear(shape[1], shape[0])
    )
    parametrize_weight(layer.double(), weight_eps=weight_eps)
    layer.weight = torch.from_numpy(weight)
    expected = weight_standardization(weight, weight_eps)
    np.testing.assert_allclose(layer.weight.detach(), expected, rtol=0, atol=1e-10)


def test_a_constant_weight_becomes_zero_with_a_finite_gradient():
    layer = parametrize_weight(nn.Linear(4, 2))
    layer.weight = torch.full((2, 4), 3.0)
    layer.weight.sum().backward()
    assert not layer.weight.any()
    assert layer.parametrizations.weight.original.grad.isfinite().all()


def test_its_place_in_the_network_holds_a_group_norm():
    layer = NormFactory("weight_standardization", {"channels_per_group": 2, "eps": 0.5})(
        8, role="block", dims=2
    )
    assert type(layer) is GroupNorm
    assert (layer.num_groups, layer.eps) == (4, 0.5)
    assert layer.norm_record.params == {
        "num_groups": 4,
        "channels_per_group": 2,
        "weight_eps": 1e-5,
        "eps": 0.5,
        "affine": True,
    }


def test_options_go_where_they_belong():
    factory = NormFactory("weight_standardization", {"weight_eps": 0.25, "eps": 0.5})
    conv = factory.parametrize(nn.Conv2d(3, 4, 3), role="block")
    assert conv.parametrizations.weight[0].eps == 0.25
