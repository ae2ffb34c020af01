"""instance_norm against its formula in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normexp.errors import UserError
from normexp.norms.instance_norm import build_instance_norm

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


def test_matches_the_formula():
    x = np.random.default_rng(0).normal(3.0, 2.0, (3, 8, 2, 5))
    mean, var = x.mean((2, 3), keepdims=True), x.var((2, 3), keepdims=True)
    expected = (x - mean) / np.sqrt(var + 1e-3) * GAIN[:, None, None] + SHIFT[:, None, None]
    layer = with_affine(build_instance_norm(8, dims=2, eps=1e-3))
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


def test_keeps_no_running_statistics():
    assert list(build_instance_norm(8, dims=2).buffers()) == []


def test_affine_false_has_no_parameters():
    layer = build_instance_norm(8, dims=2, affine=False)
    assert list(layer.parameters()) == []


def test_affine_is_one_gain_and_one_shift_a_channel():
    layer = build_instance_norm(8, dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (8,),
        "bias": (8,),
    }


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=instance_norm: .*features.*layer_norm"):
        build_instance_norm(8, dims=0)
