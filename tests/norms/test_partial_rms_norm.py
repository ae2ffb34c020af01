"""partial_rms_norm against its formula, and the fractions it takes."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.layer import partial_rms_norm
from per_token import GAIN, assert_equals, assert_exact_gradient, draw, with_affine

from normexp.errors import UserError
from normexp.norms import NormFactory, describe_norm_layers
from normexp.norms.partial_rms_norm import build_partial_rms_norm
from normexp.norms.rms_norm import build_rms_norm


def affine_layer(dims, fraction, eps=1e-3):
    return with_affine(build_partial_rms_norm(8, dims=dims, fraction=fraction, eps=eps))


@given(
    dims=st.sampled_from([0, 1, 2]),
    part_size=st.integers(1, 8),
    seed=st.integers(0, 99),
    scale=st.floats(0, 10),
)
def test_matches_the_formula(dims, part_size, seed, scale):
    x = draw(dims, seed, scale=scale)
    expected = partial_rms_norm(x, GAIN, part_size=part_size, eps=1e-3, dims=dims)
    # Anything from part_size/8 up to the next eighth.
    assert_equals(affine_layer(dims, min(1.0, (part_size + 0.5) / 8)), x, expected)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_gradient_is_exact(dims):
    assert_exact_gradient(affine_layer(dims, 0.375), draw(dims))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_an_output_depends_on_the_first_part_and_on_itself(dims):
    layer, x = affine_layer(dims, 0.375), torch.from_numpy(draw(dims))
    jacobian = torch.autograd.functional.jacobian(layer, x)
    axis = 2 if dims == 1 else 1
    # Channels last, then [samples * positions, C] * 2.
    jacobian = jacobian.movedim((axis, axis + x.ndim), (x.ndim - 1, -1))
    num_rows = x.numel() // 8
    pattern = jacobian.reshape(num_rows, 8, num_rows, 8).abs() > 0
    channels = torch.eye(8, dtype=torch.bool)
    channels[:, :3] = True
    rows = torch.eye(num_rows, dtype=torch.bool)
    assert torch.equal(pattern, rows[:, None, :, None] & channels[None, :, None, :])


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_the_whole_is_rms_norm(dims):
    x = torch.from_numpy(draw(dims))
    whole = with_affine(build_rms_norm(8, dims=dims, eps=1e-3))
    torch.testing.assert_close(affine_layer(dims, 1.0)(x), whole(x), rtol=0, atol=1e-12)


def test_a_small_first_part_amplifies_the_rest():
    x = torch.ones(1, 8, dtype=torch.float64)
    x[:, :2] = 0.0
    y = build_partial_rms_norm(8, dims=0, fraction=0.25).double()(x)
    assert (y[:, :2] == 0).all()
    torch.testing.assert_close(y[:, 2:], torch.full_like(y[:, 2:], 1e3), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_statistics_are_float32_for_half_precision(dims):
    # 300 squared is more than float16 holds (65504); 300 / rms(300) is 1.
    x = torch.full(draw(dims).shape, 300.0, dtype=torch.float16)
    for layer in (affine_layer(dims, 0.25).half(), affine_layer(dims, 0.25).float()):
        y = layer(x)
        assert y.dtype == torch.float16
        assert y.movedim(-1 if dims == 1 else 1, 0)[0].unique().tolist() == [0.5]


def test_defaults():
    layer = NormFactory("partial_rms_norm")(32, role="block", dims=0)
    assert layer.norm_record.params == {"fraction": 0.125, "eps": 1e-6, "affine": True}
    assert layer.part_size == 4
    (described,) = describe_norm_layers(layer, (32,), 4)
    assert described.statistic_set_sizes == (4,)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, math.nan])
def test_fractions_outside_of_0_to_1_are_refused(fraction):
    with pytest.raises(UserError, match=r"^norm\.params\.fraction=.*above 0 and up to 1"):
        build_partial_rms_norm(8, dims=0, fraction=fraction)


@pytest.mark.parametrize("num_features", range(2, 130))
def test_too_small_a_fraction_is_refused_with_the_smallest_that_works(num_features):
    too_small = 0.9 / num_features
    with pytest.raises(UserError, match=r"^norm\.params\.fraction=") as caught:
        build_partial_rms_norm(num_features, dims=0, fraction=too_small)
    smallest = float(re.search(r"smallest fraction .* is (\S+)$", str(caught.value))[1])
    assert build_partial_rms_norm(num_features, dims=0, fraction=smallest).part_size == 1
    with pytest.raises(UserError):
        build_partial_rms_norm(num_features, dims=0, fraction=math.nextafter(smallest, 0))


def test_affine_false_has_no_parameters():
    layer = build_partial_rms_norm(16, dims=2, affine=False)
    assert list(layer.parameters()) == []
    torch.testing.assert_close(layer(torch.full((1, 16, 2, 2), 5.0)), torch.ones(1, 16, 2, 2))


def test_affine_is_one_gain_a_channel():
    layer = build_partial_rms_norm(16, dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"weight": (16,)}


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=partial_rms_norm: .*dims=3"):
        build_partial_rms_norm(16, dims=3)
