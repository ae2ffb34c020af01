"""batch_norm against its formula in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.batch_norm import CARD, build_batch_norm

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


@pytest.mark.parametrize(
    ("dims", "shape", "axes"), [(2, (4, 8, 3, 5), (0, 2, 3)), (0, (6, 8), (0,))]
)
def test_training_matches_the_formula(dims, shape, axes):
    x = np.random.default_rng(0).normal(3.0, 2.0, shape)
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    gain, shift = (v.reshape(8, *[1] * (len(shape) - 2)) for v in (GAIN, SHIFT))
    expected = (x - mean) / np.sqrt(var + 1e-3) * gain + shift
    layer = with_affine(build_batch_norm(8, dims=dims, eps=1e-3))
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


def test_running_statistics_use_the_unbiased_variance_and_the_update_rate():
    # Batches of mean 2 and 4: 0.1 * 2 = 0.2, then 0.9 * 0.2 + 0.1 * 4 = 0.58.
    layer = build_batch_norm(1, dims=0, momentum=0.1).double()
    layer(torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    assert layer.running_mean.item() == pytest.approx(0.2, abs=1e-15)
    # The unbiased variance of (1, 3) is 2, the biased one 1; the start is 1.
    assert layer.running_var.item() == pytest.approx(0.9 * 1 + 0.1 * 2, abs=1e-15)
    layer(torch.tensor([[3.0], [5.0]], dtype=torch.float64))
    assert layer.running_mean.item() == pytest.approx(0.58, abs=1e-15)


def test_evaluation_uses_the_running_statistics():
    layer = build_batch_norm(8, dims=0, momentum=None).double()
    x = np.random.default_rng(1).normal(3.0, 2.0, (16, 8))
    layer(torch.from_numpy(x))
    other = np.random.default_rng(2).normal(size=(1, 8))
    expected = (other - x.mean(0)) / np.sqrt(x.var(0, ddof=1) + 1e-5)
    actual = layer.eval()(torch.from_numpy(other)).detach()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


def test_two_elements_give_plus_and_minus_one_whatever_they_are():
    # M = 2: (x - mean) / std is +-1 for any two different values; why M = 2 destroys training.
    x = torch.tensor([[1.0], [9.0]], dtype=torch.float64)
    y = build_batch_norm(1, dims=0, eps=1e-12, affine=False).double()(x)
    assert y.flatten().tolist() == pytest.approx([-1.0, 1.0], abs=1e-12)


def test_state_is_declared():
    assert tuple(name for name, _ in build_batch_norm(8, dims=2).named_buffers()) == CARD.state


def test_momentum_null_is_admitted():
    assert NormFactory("batch_norm", {"momentum": None})(8, role="stem", dims=2).momentum is None


def test_affine_false_has_no_parameters():
    layer = build_batch_norm(8, dims=2, affine=False)
    assert list(layer.parameters()) == []


def test_affine_is_one_gain_and_one_shift_a_channel():
    layer = build_batch_norm(8, dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (8,),
        "bias": (8,),
    }


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=batch_norm: .*dims=3"):
        build_batch_norm(8, dims=3)
