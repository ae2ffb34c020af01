"""evo_norm_s0 against its formula in NumPy and timm's layer; masks; without its activation."""

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
    make_input,
    make_mask,
    with_own_parameters,
)
from oracle import activation as oracle

from normexp.errors import UserError
from normexp.norms import NormFactory, check_statistic_sets, describe_norm_layers
from normexp.norms.evo_norm_s0 import build_evo_norm_s0

SHAPES = {0: (3, 8), 1: (3, 5, 8), 2: (3, 8, 2, 5)}


@given(
    num_groups=st.sampled_from([1, 2, 8]),
    dims=st.sampled_from([0, 1, 2]),
    eps=st.sampled_from([1e-5, 1e-3]),
    seed=st.integers(0, 9),
)
def test_matches_the_formula(num_groups, dims, eps, seed):
    x = make_input(SHAPES[dims], seed)
    built = build_evo_norm_s0(8, dims=dims, num_groups=num_groups, eps=eps)
    layer, own = with_own_parameters(built, seed)
    expected = oracle.evo_norm_s0(x, **own, num_groups=num_groups, eps=eps)
    # A group of one value is divided by sqrt(eps): the numbers grow.
    np.testing.assert_allclose(
        layer(torch.from_numpy(x)).detach(), expected, rtol=1e-10, atol=1e-10
    )


@given(num_groups=st.sampled_from([1, 2, 8]), seed=st.integers(0, 9))
def test_masked_matches_the_formula(num_groups, seed):
    mask = make_mask()
    x = make_input((*mask.shape, 8), seed)
    layer, own = with_own_parameters(build_evo_norm_s0(8, dims=1, num_groups=num_groups), seed)
    y = layer(torch.from_numpy(x), torch.from_numpy(mask)).detach()
    expected = oracle.evo_norm_s0(x, **own, num_groups=num_groups, eps=1e-5, mask=mask)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_gradient_is_exact(dims):
    layer, _ = with_own_parameters(build_evo_norm_s0(8, dims=dims, num_groups=2))
    x = torch.from_numpy(make_input(SHAPES[dims])).requires_grad_()
    others = (torch.ones(3, 5, dtype=torch.bool).tril(2),) if dims == 1 else ()

    def apply(given, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(layer, named, (given, *others))

    assert torch.autograd.gradcheck(apply, (x, *layer.parameters()))


@pytest.mark.parametrize("is_activated", [True, False])
def test_output_gradients_and_state_are_those_of_timm(is_activated):
    timm = pytest.importorskip("timm.layers")
    theirs = timm.EvoNorm2dS0(8, groups=2, apply_act=is_activated)
    ours = build_evo_norm_s0(8, dims=2, num_groups=2, is_activated=is_activated)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        values = torch.linspace(-0.5, 1.5, 8)
        one.data, other.data = values.clone(), values.clone()
    inputs = [torch.from_numpy(make_input((3, 8, 2, 5))).float() for _ in range(2)]
    for layer, x in zip((ours, theirs), inputs, strict=True):
        layer(x.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(ours(inputs[0]), theirs(inputs[1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_padding_is_without_influence():
    layer, _ = with_own_parameters(build_evo_norm_s0(8, dims=1, num_groups=2))
    check_padding_is_without_influence(layer, 8)


def test_masked_equals_truncated():
    layer, _ = with_own_parameters(build_evo_norm_s0(8, dims=1, num_groups=2))
    check_equals_truncated(layer, 8)


def test_images_take_no_mask():
    layer = build_evo_norm_s0(8, dims=2)
    with pytest.raises(ValueError, match="only sequences take a mask"):
        layer(torch.ones(3, 8, 2, 5), torch.ones(3, 8, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    # The squares overflow float16.
    x = (torch.from_numpy(make_input((3, 8, 2, 5))) * 500).to(dtype)
    layer = build_evo_norm_s0(8, dims=2, num_groups=2)
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, layer(x.float()).to(dtype), rtol=0, atol=0)


def test_scale_goes_through_the_gate_alone():
    x = torch.from_numpy(make_input((3, 8, 2, 5)))
    layer = build_evo_norm_s0(8, dims=2, num_groups=2, eps=1e-12).double()
    assert (layer(x) - layer(3.0 * x)).abs().max() > 0.1
    with torch.no_grad():
        layer.v.zero_()
    torch.testing.assert_close(layer(x), layer(3.0 * x), rtol=0, atol=1e-10)


def test_without_activation_gain_and_shift_are_all_there_is():
    layer, own = with_own_parameters(build_evo_norm_s0(8, dims=2, is_activated=False))
    assert list(own) == ["weight", "bias"]
    x = torch.from_numpy(make_input((3, 8, 2, 5)))
    expected = x * layer.weight[:, None, None] + layer.bias[:, None, None]
    torch.testing.assert_close(layer(x), expected, rtol=1e-15, atol=1e-15)


def test_without_activation_a_single_value_is_no_problem():
    factory = NormFactory("evo_norm_s0", {"num_groups": 8})
    shape = ((8, 1, 1), 4)
    check_statistic_sets(describe_norm_layers(factory(8, role="block", dims=2), *shape))
    activated = factory(8, role="block", dims=2, is_activated=True)
    with pytest.raises(UserError, match="would normalize over a single value"):
        check_statistic_sets(describe_norm_layers(activated, *shape))


def test_both_group_numbers_are_recorded():
    layer = NormFactory("evo_norm_s0", {"channels_per_group": 16})(32, role="block", dims=2)
    expected = {"num_groups": 2, "channels_per_group": 16, "eps": 1e-5}
    assert layer.norm_record.params == expected


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"num_groups": 5}, "norm.params.num_groups=5: does not divide the 8 channels"),
        ({"num_groups": 2, "channels_per_group": 4}, "norm.params.channels_per_group=4: excludes"),
    ],
)
def test_bad_groups_are_named(params, line):
    with pytest.raises(UserError, match="^" + re.escape(line)):
        build_evo_norm_s0(8, dims=2, **params)


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=evo_norm_s0: .*dims=3"):
        build_evo_norm_s0(8, dims=3)
