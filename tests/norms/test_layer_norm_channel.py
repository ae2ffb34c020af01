"""layer_norm_channel against its formula and against layer_norm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.layer import layer_norm_channel
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
from normexp.norms.layer_norm import build_layer_norm
from normexp.norms.layer_norm_channel import build_layer_norm_channel


def affine_layer(dims, eps=1e-3):
    return with_affine(build_layer_norm_channel(8, dims=dims, eps=eps))


@given(
    dims=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
    mean=st.floats(-10, 10),
    scale=st.floats(0, 10),
)
def test_matches_the_formula(dims, seed, mean, scale):
    x = draw(dims, seed, mean=mean, scale=scale)
    assert_equals(affine_layer(dims), x, layer_norm_channel(x, GAIN, SHIFT, eps=1e-3, dims=dims))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_gradient_is_exact(dims):
    assert_exact_gradient(affine_layer(dims), draw(dims))


@pytest.mark.parametrize("dims", [0, 1])
def test_is_layer_norm_on_features_and_sequences(dims):
    x = torch.from_numpy(draw(dims))
    assert torch.equal(
        affine_layer(dims)(x), with_affine(build_layer_norm(8, dims=dims, eps=1e-3))(x)
    )


def test_pixels_are_tokens():
    x = torch.from_numpy(draw(2))
    tokens = x.flatten(2).transpose(1, 2)
    expected = affine_layer(1)(tokens).transpose(1, 2).reshape(3, 8, 2, 5)
    torch.testing.assert_close(affine_layer(2)(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_position_sees_itself_alone(dims):
    seen = find_positions_seen(affine_layer(dims), dims)
    assert torch.equal(seen, torch.eye(len(seen), dtype=torch.bool))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_eps_defaults_to_convnexts(dims):
    assert build_layer_norm_channel(8, dims=dims).eps == 1e-6


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_affine_false_has_no_parameters(dims):
    layer = build_layer_norm_channel(8, dims=dims, affine=False)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_affine_is_one_gain_and_one_shift_a_channel(dims):
    layer = build_layer_norm_channel(8, dims=dims)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (8,),
        "bias": (8,),
    }


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=layer_norm_channel: .*dims=3"):
        build_layer_norm_channel(8, dims=3)
