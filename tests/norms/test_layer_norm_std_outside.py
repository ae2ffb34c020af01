"""layer_norm_std_outside against its formula, and what its two departures from layer norm do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.layer import layer_norm, layer_norm_std_outside
from per_token import (
    GAIN,
    SHIFT,
    assert_equals,
    assert_exact_gradient,
    draw,
    find_positions_seen,
    with_affine,
)

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.layer_norm import build_layer_norm
from normexp.norms.layer_norm_std_outside import build_layer_norm_std_outside


def affine_layer(dims, eps=1e-3):
    return with_affine(build_layer_norm_std_outside(8, dims=dims, eps=eps))


@given(
    dims=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
    mean=st.floats(-10, 10),
    scale=st.floats(0, 10),
)
def test_matches_the_formula(dims, seed, mean, scale):
    x = draw(dims, seed, mean=mean, scale=scale)
    expected = layer_norm_std_outside(x, GAIN, SHIFT, eps=1e-3, dims=dims)
    assert_equals(affine_layer(dims), x, expected)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_gradient_is_exact(dims):
    assert_exact_gradient(affine_layer(dims), draw(dims))


@pytest.mark.parametrize("num_features", [2, 4, 64])
def test_is_layer_norm_times_a_factor_below_one(num_features):
    x = torch.from_numpy(np.random.default_rng(0).normal(0.0, 1.0, (5, num_features)))
    ours = build_layer_norm_std_outside(num_features, dims=0, eps=1e-14).double()(x)
    reference = build_layer_norm(num_features, dims=0, eps=1e-14).double()(x)
    factor = math.sqrt((num_features - 1) / num_features)
    torch.testing.assert_close(ours, factor * reference, rtol=0, atol=1e-10)
    # 0.866 with 4 channels.
    assert num_features != 4 or round(factor, 3) == 0.866


def test_near_constant_rows_are_amplified():
    # Noise of standard deviation 1e-6 (with divisor C-1) around 7.
    noise = np.array([1.0, -1.0, 1.0, -1.0]) * 1e-6 * math.sqrt(3 / 4)
    x = torch.from_numpy(7.0 + noise)[None]
    ours = build_layer_norm_std_outside(4, dims=0).double()(x)
    reference = build_layer_norm(4, dims=0).double()(x)
    # Divided by 1e-6 + 1e-5 here, by sqrt(3/4 * 1e-12 + 1e-5) there.
    ratio = math.sqrt(0.75e-12 + 1e-5) / (1e-6 + 1e-5)
    assert 287 < ratio < 288
    torch.testing.assert_close(ours / reference, torch.full_like(x, ratio), rtol=1e-6, atol=0)
    # The formulas alone say the same.
    gain, shift = np.ones(4), np.zeros(4)
    by_hand = layer_norm_std_outside(x.numpy(), gain, shift, eps=1e-5, dims=0)
    by_hand /= layer_norm(x.numpy(), gain, shift, eps=1e-5, dims=0)
    np.testing.assert_allclose(by_hand, ratio, rtol=1e-6)
    assert by_hand.min() > 100


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_constant_rows_give_the_shift_and_the_exact_gradient(dims):
    layer = with_affine(build_layer_norm_std_outside(8, dims=dims))
    x = torch.full(draw(dims).shape, 0.1, dtype=torch.float64, requires_grad=True)
    y, g = layer(x), torch.from_numpy(draw(dims, 1))
    axis = 2 if dims == 1 else 1
    rows = y.movedim(axis, -1)
    assert torch.equal(rows, layer.bias.expand_as(rows))
    (by_x,) = torch.autograd.grad(y, x, g)
    # y - bias = weight (x - mean) / (std + eps) is weight (x - mean) / eps there, to first order.
    a = g.movedim(axis, -1) * layer.weight
    expected = (a - a.mean(-1, keepdim=True)) / 1e-5
    torch.testing.assert_close(by_x.movedim(axis, -1), expected, rtol=1e-10, atol=1e-6)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_position_sees_itself_alone(dims):
    seen = find_positions_seen(affine_layer(dims), dims)
    assert torch.equal(seen, torch.eye(len(seen), dtype=torch.bool))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_statistics_are_float32_for_half_precision(dims):
    # 300 squared is more than float16 holds (65504).
    x = 300 * torch.from_numpy(draw(dims, mean=0.0, scale=1.0)).half()
    layer = build_layer_norm_std_outside(8, dims=dims)
    expected = layer(x.float()).half()
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.half()(x), expected)


@pytest.mark.parametrize("role", ["block", "final"])
def test_one_channel_is_refused(role):
    with pytest.raises(UserError, match=r"^norm=layer_norm_std_outside: .*2 or more"):
        NormFactory("layer_norm_std_outside")(1, role=role, dims=0)


def test_affine_false_has_no_parameters():
    layer = build_layer_norm_std_outside(8, dims=2, affine=False)
    assert list(layer.parameters()) == []


def test_affine_is_one_gain_and_one_shift_a_channel():
    layer = build_layer_norm_std_outside(8, dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (8,),
        "bias": (8,),
    }


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=layer_norm_std_outside: .*dims=3"):
        build_layer_norm_std_outside(8, dims=3)
