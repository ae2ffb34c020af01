"""layer_norm_chw against its formula, its twins in torch, and its mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.layer import layer_norm_chw
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
from normexp.norms.group_norm import build_group_norm
from normexp.norms.layer_norm_channel import build_layer_norm_channel
from normexp.norms.layer_norm_chw import build_layer_norm_chw

# Five positions of three samples: some, all, none valid.
MASK = np.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool)


def affine_layer(dims, eps=1e-3):
    return with_affine(build_layer_norm_chw(8, dims=dims, eps=eps))


@given(
    dims=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
    mean=st.floats(-10, 10),
    scale=st.floats(0, 10),
)
def test_matches_the_formula(dims, seed, mean, scale):
    x = draw(dims, seed, mean=mean, scale=scale)
    assert_equals(affine_layer(dims), x, layer_norm_chw(x, GAIN, SHIFT, eps=1e-3, dims=dims))


@given(seed=st.integers(0, 99), bits=st.lists(st.booleans(), min_size=15, max_size=15))
def test_matches_the_formula_over_valid_positions(seed, bits):
    x, mask = draw(1, seed), np.reshape(bits, (3, 5))
    expected = layer_norm_chw(x, GAIN, SHIFT, eps=1e-3, dims=1, mask=mask)
    assert_equals(affine_layer(1), x, expected, torch.from_numpy(mask))


@pytest.mark.parametrize("dims", [1, 2])
def test_gradient_is_exact(dims):
    assert_exact_gradient(affine_layer(dims), draw(dims))


def test_gradient_is_exact_with_a_mask():
    layer, mask = affine_layer(1), torch.from_numpy(MASK)
    x = torch.from_numpy(draw(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, mask), (x,))


@pytest.mark.parametrize("affine", [True, False])
def test_a_full_mask_is_no_mask(affine):
    layer = build_layer_norm_chw(8, dims=1, affine=affine).double()
    x = torch.from_numpy(draw(1))
    y = layer(x, torch.ones(3, 5, dtype=torch.bool))
    torch.testing.assert_close(y, layer(x), rtol=0, atol=1e-12)


def test_padding_contaminates_without_a_mask_and_not_with_it():
    layer, mask = affine_layer(1), torch.from_numpy(MASK)
    x = torch.from_numpy(draw(1))
    padded = torch.where(mask[..., None], x, 100.0)
    # 40% of sample 0 at 100 move the mean of its 40 values from 3 to about 42.
    assert (layer(padded) - layer(x))[0][mask[0]].abs().max() > 1
    assert torch.equal(layer(padded, mask), layer(x, mask))


@pytest.mark.parametrize("content", [torch.nan, torch.inf, 1e300])
def test_what_stands_at_invalid_positions_has_no_influence(content):
    layer, mask = affine_layer(1), torch.from_numpy(MASK)
    found = []
    for fill in (0.0, content):
        layer.zero_grad()
        x = torch.where(mask[..., None], torch.from_numpy(draw(1)), fill).requires_grad_()
        y = layer(x, mask)
        y.square().sum().backward()
        assert (y[~mask] == 0).all()
        assert (x.grad[~mask] == 0).all()
        found.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    for zeros, other in zip(*found, strict=True):
        assert other.isfinite().all()
        assert torch.equal(zeros, other)


def test_masked_statistics_are_float32_for_half_precision():
    # 300 squared is more than float16 holds (65504).
    x = 300 * torch.from_numpy(draw(1, mean=0.0, scale=1.0)).half()
    layer, mask = build_layer_norm_chw(8, dims=1), torch.from_numpy(MASK)
    y, expected = layer(x, mask), layer(x.float(), mask)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, expected.half(), rtol=0, atol=0)


def test_every_position_of_a_sample_sees_every_other():
    assert find_positions_seen(affine_layer(1), 1).all()
    assert find_positions_seen(affine_layer(2), 2).all()
    valid = torch.from_numpy(MASK[0])
    seen = find_positions_seen(affine_layer(1), 1, valid[None])
    assert torch.equal(seen, valid[:, None] & valid)


def test_is_torchs_layer_norm_over_chw_but_for_the_affine_part():
    x = torch.from_numpy(draw(2))
    expected = torch.nn.LayerNorm((8, 2, 5), elementwise_affine=False)(x)
    actual = build_layer_norm_chw(8, dims=2, affine=False)(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_is_group_norm_with_one_group():
    x = torch.from_numpy(draw(2))
    one_group = with_affine(build_group_norm(8, dims=2, num_groups=1, eps=1e-3))
    assert torch.equal(affine_layer(2)(x), one_group(x))


def test_sequences_are_images_of_one_row():
    x = torch.from_numpy(draw(1))
    image = x.transpose(1, 2)[:, :, None]
    expected = affine_layer(2)(image)[:, :, 0].transpose(1, 2)
    torch.testing.assert_close(affine_layer(1)(x), expected, rtol=0, atol=1e-12)


def test_on_one_pixel_is_layer_norm_channel():
    x = torch.from_numpy(draw(2)[:, :, :1, :1].copy())
    expected = with_affine(build_layer_norm_channel(8, dims=2, eps=1e-3))(x)
    torch.testing.assert_close(affine_layer(2)(x), expected, rtol=0, atol=1e-12)


def test_the_three_layer_norms_differ_on_one_image():
    x = torch.from_numpy(draw(2))
    over_all = build_layer_norm_chw(8, dims=2, affine=False)(x)
    over_channels = build_layer_norm_channel(8, dims=2, affine=False)(x)
    over_width = torch.nn.LayerNorm(5, elementwise_affine=False, dtype=torch.float64)(x)
    assert (over_all - over_channels).abs().max() > 0.1
    assert (over_all - over_width).abs().max() > 0.1
    assert (over_channels - over_width).abs().max() > 0.1


@pytest.mark.parametrize("dims", [1, 2])
def test_a_single_number_is_refused_as_by_torch(dims):
    layer = build_layer_norm_chw(1, dims=dims)
    with pytest.raises(ValueError, match=r"single number|more than 1 value"):
        layer(torch.ones([1] * (dims + 2)))
    assert (layer(torch.ones([2] + [1] * (dims + 1))) == 0).all()


@pytest.mark.parametrize("dims", [1, 2])
def test_affine_false_has_no_parameters(dims):
    layer = build_layer_norm_chw(8, dims=dims, affine=False)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("dims", [1, 2])
def test_affine_is_one_gain_and_one_shift_a_channel(dims):
    layer = build_layer_norm_chw(8, dims=dims)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (8,),
        "bias": (8,),
    }


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=layer_norm_chw: .*features.*layer_norm"):
        build_layer_norm_chw(8, dims=0)
