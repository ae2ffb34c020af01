"""rms_norm against its formula, its backward pass by hand, and torch's layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.layer import rms_norm, rms_norm_backward
from per_token import (
    GAIN,
    assert_equals,
    assert_exact_gradient,
    draw,
    find_positions_seen,
    get_gradients,
    with_affine,
)

from normexp.errors import UserError
from normexp.norms.rms_norm import build_rms_norm


def affine_layer(dims, eps=1e-3):
    return with_affine(build_rms_norm(8, dims=dims, eps=eps))


@given(
    dims=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
    mean=st.floats(-10, 10),
    scale=st.floats(0, 10),
)
def test_matches_the_formula(dims, seed, mean, scale):
    x = draw(dims, seed, mean=mean, scale=scale)
    assert_equals(affine_layer(dims), x, rms_norm(x, GAIN, eps=1e-3, dims=dims))


@given(seed=st.integers(0, 99), eps=st.sampled_from([1e-6, 0.1]))
def test_backward_pass_is_the_one_derived_by_hand(seed, eps):
    x, g = draw(0, seed), draw(0, seed + 100, mean=0.0)
    expected = rms_norm_backward(x, GAIN, g, eps=eps)
    for actual, gradient in zip(get_gradients(affine_layer(0, eps), x, g), expected, strict=True):
        np.testing.assert_allclose(actual, gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_gradient_is_exact(dims):
    assert_exact_gradient(affine_layer(dims), draw(dims))


@pytest.mark.parametrize("num_rows", [3, 5000])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_is_torchs_layer_with_its_eps_stated(dims, num_rows):
    # Few rows and many, since rms_normalize computes the two in different ways.
    rows = np.random.default_rng(0).normal(1.0, 2.0, (num_rows, 8))
    g = np.random.default_rng(1).normal(0.0, 1.0, (num_rows, 8))
    reference = with_affine(torch.nn.RMSNorm(8, eps=1e-6))
    layer = with_affine(build_rms_norm(8, dims=dims))
    assert list(layer.state_dict()) == list(reference.state_dict())
    layer.load_state_dict(reference.state_dict())

    def arrange(rows):
        if dims == 0:
            return rows
        return rows[None] if dims == 1 else rows.T[None, :, :, None].copy()

    expected = reference(torch.from_numpy(rows)).detach().numpy()
    assert_equals(layer, arrange(rows), arrange(expected))
    by_rows, by_weight = get_gradients(reference, rows, g)
    by_x, ours_by_weight = get_gradients(layer, arrange(rows), arrange(g))
    np.testing.assert_allclose(by_x, arrange(by_rows), rtol=0, atol=1e-10)
    np.testing.assert_allclose(ours_by_weight, by_weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_statistics_are_float32_for_half_precision(dims):
    # 300 squared is more than float16 holds (65504); 300 / rms(300) is 1.
    x = torch.full(draw(dims).shape, 300.0, dtype=torch.float16, requires_grad=True)
    y = build_rms_norm(8, dims=dims).half()(x)
    y.sum().backward()
    assert y.dtype == torch.float16
    assert (y == 1.0).all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_scale_changes_nothing_but_shift_does(dims):
    layer, x = affine_layer(dims, eps=1e-12), torch.from_numpy(draw(dims))
    torch.testing.assert_close(layer(100 * x), layer(x), rtol=0, atol=1e-10)
    assert (layer(x + 10) - layer(x)).abs().max() > 0.1
    # eps is what breaks the first: a row of root mean square sqrt(eps) comes out at 1/sqrt(2).
    small = torch.full_like(x, 1e-3)
    y = build_rms_norm(8, dims=dims, eps=1e-6).double()(small)
    torch.testing.assert_close(y, torch.full_like(x, 0.5**0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_position_sees_itself_alone(dims):
    seen = find_positions_seen(affine_layer(dims), dims)
    assert torch.equal(seen, torch.eye(len(seen), dtype=torch.bool))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_eps_is_explicit(dims):
    assert build_rms_norm(8, dims=dims).eps == 1e-6


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_affine_false_has_no_parameters(dims):
    layer = build_rms_norm(8, dims=dims, affine=False)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_affine_is_one_gain_a_channel(dims):
    layer = build_rms_norm(8, dims=dims)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"weight": (8,)}


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=rms_norm: .*dims=3"):
        build_rms_norm(8, dims=3)
