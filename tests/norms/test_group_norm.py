"""group_norm against its formula in NumPy, and the two ways to say the groups."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.group_norm import build_group_norm

GAIN = np.linspace(0.5, 2.0, 8)
SHIFT = np.linspace(-1.0, 1.0, 8)


def with_affine(layer):
    """Give the layer a gain and shift that differ by channel, in float64."""
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(GAIN))
        if hasattr(layer, "bias"):
            layer.bias.copy_(torch.from_numpy(SHIFT))
    return layer


@given(
    num_groups=st.sampled_from([1, 2, 4, 8]), dims=st.sampled_from([0, 2]), seed=st.integers(0, 9)
)
def test_matches_the_formula(num_groups, dims, seed):
    shape = (3, 8, 2, 5) if dims == 2 else (3, 8)
    x = np.random.default_rng(seed).normal(3.0, 2.0, shape)
    grouped = x.reshape(3, num_groups, -1)
    mean, var = grouped.mean(2, keepdims=True), grouped.var(2, keepdims=True)
    gain, shift = (v.reshape(8, *[1] * (len(shape) - 2)) for v in (GAIN, SHIFT))
    expected = ((grouped - mean) / np.sqrt(var + 1e-3)).reshape(shape) * gain + shift
    layer = with_affine(build_group_norm(8, dims=dims, num_groups=num_groups, eps=1e-3))
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("params", "num_groups", "channels_per_group"),
    [
        ({}, 8, 4),
        ({"num_groups": 4}, 4, 8),
        ({"channels_per_group": 16}, 2, 16),
        ({"num_groups": None, "channels_per_group": 32}, 1, 32),
    ],
)
def test_both_numbers_are_recorded(params, num_groups, channels_per_group):
    layer = NormFactory("group_norm", params)(32, role="block", dims=2)
    assert layer.num_groups == num_groups
    assert layer.norm_record.params == {
        "num_groups": num_groups,
        "channels_per_group": channels_per_group,
        "eps": 1e-5,
        "affine": True,
    }


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"num_groups": 5}, "norm.params.num_groups=5: does not divide the 8 channels"),
        ({"channels_per_group": 3}, "norm.params.channels_per_group=3: does not divide the 8"),
        ({"num_groups": 0}, "norm.params.num_groups=0: a whole number of 1 or more"),
        ({"channels_per_group": -2}, "norm.params.channels_per_group=-2: a whole number of 1"),
        ({"num_groups": 2, "channels_per_group": 4}, "norm.params.channels_per_group=4: excludes"),
    ],
)
def test_bad_groups_are_named(params, line):
    with pytest.raises(UserError, match="^" + re.escape(line)):
        build_group_norm(8, dims=2, **params)


def test_affine_false_has_no_parameters():
    layer = build_group_norm(8, dims=2, affine=False)
    assert list(layer.parameters()) == []


def test_affine_is_one_gain_and_one_shift_a_channel():
    layer = build_group_norm(8, dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (8,),
        "bias": (8,),
    }


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=group_norm: .*dims=3"):
        build_group_norm(8, dims=3)
