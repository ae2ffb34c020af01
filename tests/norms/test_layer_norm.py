"""layer_norm against its formula and its backward pass by hand, and what it is invariant to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.layer import layer_norm, layer_norm_backward
from per_token import (
    GAIN,
    SHIFT,
    assert_equals,
    assert_exact_gradient,
    draw,
    get_gradients,
    with_affine,
)

from normexp.errors import UserError
from normexp.norms.layer_norm import build_layer_norm


@given(
    dims=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
    mean=st.floats(-10, 10),
    scale=st.floats(0, 10),
)
def test_matches_the_formula(dims, seed, mean, scale):
    x = draw(dims, seed, mean=mean, scale=scale)
    layer = with_affine(build_layer_norm(8, dims=dims, eps=1e-3))
    assert_equals(layer, x, layer_norm(x, GAIN, SHIFT, eps=1e-3, dims=dims))


@given(seed=st.integers(0, 99), eps=st.sampled_from([1e-5, 0.1]))
def test_backward_pass_is_the_one_derived_by_hand(seed, eps):
    x, g = draw(0, seed), draw(0, seed + 100, mean=0.0)
    layer = with_affine(build_layer_norm(8, dims=0, eps=eps))
    expected = layer_norm_backward(x, GAIN, g, eps=eps)
    for actual, gradient in zip(get_gradients(layer, x, g), expected, strict=True):
        np.testing.assert_allclose(actual, gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1])
def test_gradient_is_exact(dims):
    assert_exact_gradient(with_affine(build_layer_norm(8, dims=dims)), draw(dims))


@pytest.mark.parametrize("dims", [0, 1])
def test_shift_and_positive_scale_of_a_token_change_nothing(dims):
    layer, x = with_affine(build_layer_norm(8, dims=dims, eps=1e-12)), torch.from_numpy(draw(dims))
    per_token = torch.from_numpy(draw(dims, 1)[..., :1])
    torch.testing.assert_close(layer(x + per_token), layer(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(layer(x * per_token.abs()), layer(x), rtol=0, atol=1e-10)
    # The gain and shift stand behind the statistics: a negative factor turns the input over.
    turned = 2 * layer.bias - layer(x)
    torch.testing.assert_close(layer(-x), turned, rtol=0, atol=1e-10)


def test_a_token_does_not_see_the_others():
    layer, x = with_affine(build_layer_norm(8, dims=1)), torch.from_numpy(draw(1))
    changed = x.clone()
    changed[:, 3:] = torch.nan
    changed[1, 0] = 1e6
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[:, 3:] = keep[1, 0] = False
    assert torch.equal(layer(changed)[keep], layer(x)[keep])


def test_zero_padding_comes_out_as_the_shift():
    layer, x = with_affine(build_layer_norm(8, dims=1)), torch.from_numpy(draw(1))
    x[:, 3:] = 0.0
    assert torch.equal(layer(x)[:, 3:], layer.bias.expand(3, 2, 8))


def test_one_feature_comes_out_as_the_shift_whatever_the_input():
    layer = build_layer_norm(1, dims=0).double()
    with torch.no_grad():
        layer.bias.fill_(0.25)
    x = torch.tensor([[-3.0], [0.0], [1e6]], dtype=torch.float64)
    assert layer(x).tolist() == [[0.25]] * 3


def test_two_features_come_out_as_plus_and_minus_one():
    x = torch.tensor([[0.0, 1e3], [7.0, -30.0]], dtype=torch.float64)
    y = build_layer_norm(2, dims=0).double()(x)
    # x = mean +- d: d / sqrt(d^2 + eps), off by eps / 2 / d^2.
    expected = torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 / 2 / 18.5**2)


def test_constant_row_gives_the_shift_and_no_gradient_of_its_gain():
    layer = with_affine(build_layer_norm(8, dims=0))
    x = torch.full((1, 8), 7.0, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert torch.equal(y[0], layer.bias)
    g = torch.linspace(-1, 2, 8, dtype=torch.float64)
    by_x, by_weight = torch.autograd.grad(y, (x, layer.weight), g[None], retain_graph=True)
    assert torch.equal(by_weight, torch.zeros(8))
    # What remains by the input is the gradient less its mean, over sqrt(eps) ...
    a = (g * layer.weight).detach()
    torch.testing.assert_close(by_x[0], (a - a.mean()) / 1e-5**0.5, rtol=0, atol=1e-9)
    # ... and so nothing for a loss that weighs all normalized values alike.
    (by_x,) = torch.autograd.grad(y, x, 1 / layer.weight[None])
    torch.testing.assert_close(by_x, torch.zeros_like(x), rtol=0, atol=1e-10)


def test_affine_false_has_no_parameters():
    layer = build_layer_norm(8, dims=0, affine=False)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("dims", [0, 1])
def test_affine_is_one_gain_and_one_shift_a_channel(dims):
    layer = build_layer_norm(8, dims=dims)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (8,),
        "bias": (8,),
    }


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(
        UserError, match=r"^norm=layer_norm: .*images.*layer_norm_channel .*layer_norm_chw"
    ):
        build_layer_norm(8, dims=2)
