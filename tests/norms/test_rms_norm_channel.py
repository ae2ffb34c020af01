"""rms_norm_channel against its formula in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normexp.errors import UserError
from normexp.norms.rms_norm_channel import build_rms_norm_channel

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


@pytest.mark.parametrize(("dims", "shape"), [(2, (3, 8, 2, 5)), (0, (3, 8))])
def test_matches_the_formula(dims, shape):
    x = np.random.default_rng(0).normal(3.0, 2.0, shape)
    gain = GAIN.reshape(8, *[1] * (len(shape) - 2))
    expected = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-3) * gain
    layer = with_affine(build_rms_norm_channel(8, dims=dims, eps=1e-3))
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 2])
def test_statistics_are_float32_for_half_precision(dims):
    # 300 squared is more than float16 holds (65504); 300 / rms(300) is 1.
    x = torch.full((2, 8, 3, 3) if dims == 2 else (2, 8), 300.0, dtype=torch.float16)
    y = build_rms_norm_channel(8, dims=dims).half()(x)
    assert y.dtype == torch.float16
    assert (y == 1.0).all()


@pytest.mark.parametrize("dims", [0, 2])
def test_eps_is_explicit(dims):
    assert build_rms_norm_channel(8, dims=dims).eps == 1e-6


def test_affine_false_has_no_parameters():
    layer = build_rms_norm_channel(8, dims=2, affine=False)
    assert list(layer.parameters()) == []


def test_affine_is_one_gain_a_channel():
    layer = build_rms_norm_channel(8, dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"weight": (8,)}


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=rms_norm_channel: .*dims=3"):
        build_rms_norm_channel(8, dims=3)
