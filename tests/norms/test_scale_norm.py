"""scale_norm against its formula, at zero rows, and against rms_norm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.layer import scale_norm
from per_token import assert_equals, assert_exact_gradient, draw, find_positions_seen

from normexp.errors import UserError
from normexp.norms.rms_norm import build_rms_norm
from normexp.norms.scale_norm import build_scale_norm


def layer_with_gain(gain, dims, eps=1e-5):
    layer = build_scale_norm(8, dims=dims, eps=eps).double()
    with torch.no_grad():
        layer.weight.fill_(gain)
    return layer


@given(
    dims=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
    gain=st.floats(-5, 5),
    scale=st.sampled_from([0.0, 1e-6, 0.1, 10.0]),
)
def test_matches_the_formula(dims, seed, gain, scale):
    # The smallest scale is below the bound of the norm.
    x = draw(dims, seed, mean=scale, scale=scale)
    assert_equals(layer_with_gain(gain, dims), x, scale_norm(x, gain, eps=1e-5, dims=dims))


@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("eps", [1e-5, 1e3])
def test_gradient_is_exact_above_and_below_the_bound(dims, eps):
    assert_exact_gradient(layer_with_gain(3.0, dims, eps), draw(dims))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_zero_rows_give_zero_and_a_finite_gradient(dims):
    layer = layer_with_gain(3.0, dims)
    x = torch.zeros(draw(dims).shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert (y == 0).all()
    by_x, by_weight = torch.autograd.grad(y.sum(), (x, layer.weight))
    # Below the bound the layer is a multiplication by weight / eps.
    torch.testing.assert_close(by_x, torch.full_like(x, 3.0 / 1e-5), rtol=1e-12, atol=0)
    assert by_weight == 0
    (by_x,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert (by_x == 0).all()


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_is_rms_norm_with_one_gain_for_all_channels(dims):
    x = torch.from_numpy(draw(dims))
    rms = build_rms_norm(8, dims=dims, eps=1e-14).double()
    with torch.no_grad():
        rms.weight.fill_(3.0 / 8**0.5)
    torch.testing.assert_close(layer_with_gain(3.0, dims)(x), rms(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_every_position_has_the_gain_for_its_length(dims):
    y = layer_with_gain(3.0, dims)(torch.from_numpy(draw(dims)))
    lengths = y.square().sum(2 if dims == 1 else 1).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 3.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_scale_changes_nothing_but_shift_does(dims):
    layer, x = layer_with_gain(3.0, dims), torch.from_numpy(draw(dims))
    torch.testing.assert_close(layer(100 * x), layer(x), rtol=0, atol=1e-12)
    assert (layer(x + 10) - layer(x)).abs().max() > 0.1


@pytest.mark.parametrize("dims", [1, 2])
def test_a_position_sees_itself_alone(dims):
    seen = find_positions_seen(layer_with_gain(3.0, dims), dims)
    assert torch.equal(seen, torch.eye(len(seen), dtype=torch.bool))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_statistics_are_float32_for_half_precision(dims):
    # Neither the square of 30,000 nor the norm of 8 of them is within float16 (65504).
    x = torch.full(draw(dims).shape, 3e4, dtype=torch.float16)
    for layer in (build_scale_norm(8, dims=dims).half(), build_scale_norm(8, dims=dims)):
        y = layer(x)
        assert y.dtype == torch.float16
        # The gain sqrt(8) is rounded to 11 bits in the first layer.
        torch.testing.assert_close(y, torch.ones_like(y), rtol=0, atol=2**-10)


@pytest.mark.parametrize("affine", [True, False])
def test_gain_starts_at_the_root_of_the_channels(affine):
    layer = build_scale_norm(16, dims=0, affine=affine)
    y = layer(torch.full((1, 16), 5.0))
    torch.testing.assert_close(y, torch.ones(1, 16))
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == ({"weight": ()} if affine else {})


def test_eps_defaults_to_the_authors():
    assert build_scale_norm(8, dims=0).eps == 1e-5


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=scale_norm: .*dims=3"):
        build_scale_norm(8, dims=3)
