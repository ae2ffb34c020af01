"""group_norm against its formula in NumPy, forward and backward; masks; what it equals."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import (
    check_equals_truncated,
    check_padding_is_without_influence,
    find_influenced_positions,
    make_input,
    make_mask,
    with_own_parameters,
)
from oracle import group as oracle
from torch import nn

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.group_norm import build_group_norm
from normexp.norms.instance_norm import build_instance_norm

SHAPES = {0: (3, 8), 1: (3, 5, 8), 2: (3, 8, 2, 5)}


@given(
    num_groups=st.sampled_from([1, 2, 4, 8]),
    dims=st.sampled_from([0, 1, 2]),
    eps=st.sampled_from([1e-5, 1e-3, 1.0]),
    seed=st.integers(0, 9),
)
def test_forward_and_backward_match_the_formula(num_groups, dims, eps, seed):
    x, grad = make_input(SHAPES[dims], seed), make_input(SHAPES[dims], seed + 10)
    built = build_group_norm(8, dims=dims, num_groups=num_groups, eps=eps)
    layer, own = with_own_parameters(built, seed)
    options = {"num_groups": num_groups, "eps": eps}
    given = torch.from_numpy(x).requires_grad_()
    y = layer(given)
    expected = oracle.group_norm(x, own["weight"], own["bias"], **options)
    np.testing.assert_allclose(y.detach(), expected, rtol=0, atol=1e-10)
    y.backward(torch.from_numpy(grad))
    found = (given.grad, layer.weight.grad, layer.bias.grad)
    expected = oracle.group_norm_backward(x, own["weight"], grad, **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@given(num_groups=st.sampled_from([1, 2, 8]), seed=st.integers(0, 9))
def test_masked_forward_and_backward_match_the_formula(num_groups, seed):
    mask = make_mask()
    x, grad = make_input((*mask.shape, 8), seed), make_input((*mask.shape, 8), seed + 10)
    layer, own = with_own_parameters(build_group_norm(8, dims=1, num_groups=num_groups), seed)
    options = {"num_groups": num_groups, "eps": 1e-5, "mask": mask}
    given = torch.from_numpy(x).requires_grad_()
    y = layer(given, torch.from_numpy(mask))
    expected = oracle.group_norm(x, own["weight"], own["bias"], **options)
    np.testing.assert_allclose(y.detach(), expected, rtol=0, atol=1e-10)
    y.backward(torch.from_numpy(grad))
    found = (given.grad, layer.weight.grad, layer.bias.grad)
    expected = oracle.group_norm_backward(x, own["weight"], grad, **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_gradient_is_exact(dims):
    layer, _ = with_own_parameters(build_group_norm(8, dims=dims, num_groups=4))
    x = torch.from_numpy(make_input(SHAPES[dims])).requires_grad_()
    others = (torch.ones(3, 5, dtype=torch.bool).tril(2),) if dims == 1 else ()
    assert torch.autograd.gradcheck(lambda given: layer(given, *others), (x,))


@pytest.mark.parametrize("dims", [0, 2])
def test_is_torch_s_layer_to_the_bit(dims):
    x = torch.from_numpy(make_input(SHAPES[dims])).float()
    ours, theirs = build_group_norm(8, dims=dims, num_groups=4), nn.GroupNorm(4, 8)
    assert torch.equal(ours(x), theirs(x))
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_padding_is_without_influence():
    layer, _ = with_own_parameters(build_group_norm(8, dims=1, num_groups=2))
    check_padding_is_without_influence(layer, 8)


def test_masked_equals_truncated():
    layer, _ = with_own_parameters(build_group_norm(8, dims=1, num_groups=2))
    check_equals_truncated(layer, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masked_half_precision_has_float32_statistics(dtype):
    mask = torch.from_numpy(make_mask())
    # Squares of these overflow float16, and the spread is lost in a bfloat16 sum.
    x = (torch.from_numpy(make_input((*mask.shape, 8))) * 100 + 600).to(dtype)
    layer = build_group_norm(8, dims=1, num_groups=2)
    y = layer(x, mask)
    assert y.dtype == dtype
    expected = layer(x.float(), mask)
    torch.testing.assert_close(y, expected.to(dtype), rtol=0, atol=0)


def test_one_group_is_layer_norm_over_channels_and_positions():
    x = torch.from_numpy(make_input((3, 8, 2, 5)))
    y = build_group_norm(8, dims=2, num_groups=1, affine=False)(x)
    torch.testing.assert_close(y, nn.functional.layer_norm(x, (8, 2, 5)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dims", [1, 2])
def test_groups_of_one_channel_are_instance_norm(dims):
    x = torch.from_numpy(make_input(SHAPES[dims]))
    y = build_group_norm(8, dims=dims, num_groups=8, affine=False)(x)
    expected = build_instance_norm(8, dims=dims, affine=False)(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_groups", [1, 4, 8])
def test_sequences_leak_from_later_positions_to_earlier_ones(num_groups):
    layer = build_group_norm(8, dims=1, num_groups=num_groups).double()
    assert find_influenced_positions(layer, 8, changed=5) == [0, 1, 2, 3, 4, 5]
    # A norm of each position alone lets nothing through.
    assert find_influenced_positions(nn.LayerNorm(8).double(), 8, changed=5) == [5]


def test_a_leak_inside_a_model_shows_at_its_output():
    torch.manual_seed(0)
    cases = [
        (build_group_norm(8, dims=1, num_groups=2), [0, 1, 2, 3, 4, 5]),
        (nn.LayerNorm(8), [5]),
    ]
    for norm, expected in cases:
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8)).double()
        assert find_influenced_positions(model, 8, changed=5) == expected


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
