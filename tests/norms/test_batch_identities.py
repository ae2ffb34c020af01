"""What is exactly true of batch normalization, number by number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import batch as oracle
from torch import nn

from normexp.norms.batch_norm import build_batch_norm

SHAPES = {0: (6, 4), 1: (3, 5, 4), 2: (3, 4, 2, 5)}
GAIN = np.linspace(0.5, 2.0, 4)
SHIFT = np.linspace(-1.0, 1.0, 4)


def draw(shape, seed=0, mean=3.0, std=2.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(mean, std, shape))


def build(num_features=4, *, dims=0, gain=None, shift=None, **params):
    layer = build_batch_norm(num_features, dims=dims, **params).double()
    with torch.no_grad():
        if gain is not None:
            layer.weight.copy_(torch.as_tensor(gain))
        if shift is not None:
            layer.bias.copy_(torch.as_tensor(shift))
    return layer


def test_golden_values_of_a_forward_pass():
    # x = (1, 3): mean 2, variance 1, normalized (-1, 1); gain 2 and shift 1 make (-1, 3).
    x, gain, shift = np.array([[1.0], [3.0]]), np.array([2.0]), np.array([1.0])
    assert oracle.batch_norm(x, gain, shift, 0.0).ravel().tolist() == [-1.0, 3.0]
    y = build(1, gain=gain, shift=shift, eps=1e-30)(torch.from_numpy(x))
    assert y.flatten().tolist() == pytest.approx([-1.0, 3.0], abs=1e-15)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_golden_values_of_the_running_mean(dims):
    # Batches of mean 2 and 4 with decay 0.9: 0.1 * 2 = 0.2, then 0.9 * 0.2 + 0.1 * 4 = 0.58.
    layer, shape = build(1, dims=dims, momentum=0.1), [(2, 1), (2, 1, 1), (2, 1, 1, 1)][dims]
    for batch, expected in (([1.0, 3.0], 0.2), ([3.0, 5.0], 0.58)):
        layer(torch.tensor(batch, dtype=torch.float64).reshape(shape))
        assert layer.running_mean.item() == pytest.approx(expected, abs=1e-15)


@given(dims=st.sampled_from([0, 1, 2]), eps=st.sampled_from([1e-5, 0.1]), seed=st.integers(0, 99))
def test_gradients_are_those_derived_by_hand(dims, eps, seed):
    x, upstream = draw(SHAPES[dims], seed).requires_grad_(), draw(SHAPES[dims], seed + 100)
    layer = build(dims=dims, gain=GAIN, shift=SHIFT, eps=eps)
    layer(x).backward(upstream)
    actual = (x.grad, layer.weight.grad, layer.bias.grad)
    expected = oracle.batch_norm_backward(upstream.numpy(), x.detach().numpy(), GAIN, eps)
    for gradient, by_hand in zip(actual, expected, strict=True):
        np.testing.assert_allclose(gradient, by_hand, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [1, 2])
def test_of_one_sample_it_is_instance_normalization(dims):
    x = draw((1, *SHAPES[dims][1:]))
    y = build(dims=dims)(x).detach().numpy()
    axes = {1: 1, 2: (2, 3)}[dims]
    mean, var = x.numpy().mean(axes, keepdims=True), x.numpy().var(axes, keepdims=True)
    np.testing.assert_allclose(y, (x.numpy() - mean) / np.sqrt(var + 1e-5), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_evaluation_is_smaller_by_the_bias_of_the_variance(dims):
    # Momentum 1 keeps the batch's own statistics, but the unbiased variance of them.
    x = draw(SHAPES[dims])
    layer = build(dims=dims, momentum=1.0, eps=1e-30)
    trained, num_elements = layer(x), x.numel() // 4
    ratio = layer.eval()(x) / trained
    expected = torch.full_like(ratio, math.sqrt((num_elements - 1) / num_elements))
    torch.testing.assert_close(ratio, expected, rtol=0, atol=1e-10)


def test_four_elements_make_that_ratio_0_866():
    layer, x = build(1, momentum=1.0, eps=1e-30), draw((4, 1))
    ratio = layer(x) / layer.eval()(x)
    assert ratio.flatten().tolist() == pytest.approx([math.sqrt(4 / 3)] * 4, abs=1e-12)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_the_stored_variance_is_the_unbiased_one(dims):
    x = draw(SHAPES[dims])
    layer = build(dims=dims, momentum=1.0)
    layer(x)
    _, biased, unbiased = oracle.moments(x.numpy())
    np.testing.assert_allclose(layer.running_var, unbiased, rtol=0, atol=1e-12)
    assert np.abs(layer.running_var.numpy() - biased).min() > 0.05


def test_a_bias_before_it_has_no_gradient():
    conv, norm = nn.Conv2d(3, 4, 3).double(), build(dims=2, gain=GAIN, shift=SHIFT)
    y = norm(conv(draw((5, 3, 6, 6))))
    (y * draw(y.shape, 1)).sum().backward()
    assert conv.bias.grad.abs().max() < 1e-12
    assert conv.weight.grad.abs().max() > 0.01


@pytest.mark.parametrize("std", [2.0, 0.01])
def test_gain_and_shift_can_restore_the_identity(std):
    # With the gain sqrt(var + eps). sqrt(var) misses, by far where the variance is below eps.
    x, eps = draw((16, 4), std=std), 1e-3
    mean, var, _ = oracle.moments(x.numpy())
    y = build(gain=np.sqrt(var + eps), shift=mean, eps=eps)(x)
    torch.testing.assert_close(y, x, rtol=0, atol=1e-12)
    missed = build(gain=np.sqrt(var), shift=mean, eps=eps)(x)
    relative = ((missed - x).abs() / (x - torch.from_numpy(mean)).abs()).max().item()
    assert relative == pytest.approx(1 - np.sqrt(var / (var + eps)).min(), rel=1e-6)
    assert relative > (0.6 if std == 0.01 else 1e-4)


@given(log_std=st.floats(-4, 2), seed=st.integers(0, 99))
def test_the_output_variance_is_v_over_v_plus_eps(log_std, seed):
    x, eps = draw((16, 4), seed, std=10.0**log_std), 1e-3
    _, var, _ = oracle.moments(x.numpy())
    mean, found, _ = oracle.moments(build(eps=eps)(x).detach().numpy())
    np.testing.assert_allclose(found, var / (var + eps), rtol=0, atol=1e-10)
    np.testing.assert_allclose(mean, 0.0, atol=1e-10)


@given(first=st.floats(-1e3, 1e3), distance=st.floats(0.01, 1e3), sign=st.sampled_from([-1, 1]))
def test_two_elements_give_plus_and_minus_one_whatever_they_are(first, distance, sign):
    # Why M = 2 destroys training: nothing of the data is left but an order.
    x = torch.tensor([[first], [first + sign * distance]], dtype=torch.float64)
    y = build(1, eps=1e-30)(x).flatten().tolist()
    assert y == pytest.approx([-sign, sign], abs=1e-6)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_large_mean_does_not_swamp_the_variance(dims):
    # E[x^2] - E[x]^2 in float32 would be a difference of two numbers of 1e8, rounded to 8.
    shape = {0: (4096, 4), 1: (64, 64, 4), 2: (64, 4, 8, 8)}[dims]
    x = draw(shape, mean=1e4, std=1.0).float()
    layer = build_batch_norm(4, dims=dims, momentum=1.0)
    y = layer(x).detach().double().numpy()
    _, var, unbiased = oracle.moments(x.double().numpy())
    np.testing.assert_allclose(layer.running_var, unbiased, rtol=0.01)
    _, found, _ = oracle.moments(y)
    np.testing.assert_allclose(found, var / (var + 1e-5), rtol=0.01)


def test_a_constant_channel_gives_the_shift_and_finite_gradients():
    x = torch.full((6, 4), 7.0, dtype=torch.float64, requires_grad=True)
    layer = build(gain=GAIN, shift=SHIFT)
    y = layer(x)
    (y * draw(y.shape)).sum().backward()
    np.testing.assert_allclose(y.detach(), np.broadcast_to(SHIFT, y.shape), atol=1e-12)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_evaluation_does_not_depend_on_batch_mates(dims):
    layer, x = build(dims=dims, gain=GAIN, shift=SHIFT), draw(SHAPES[dims])
    layer(x)
    alone = layer.eval()(x[:1])
    others = torch.cat([x[:1], 100 * draw(SHAPES[dims], 1)])
    torch.testing.assert_close(layer(others)[:1], alone, rtol=0, atol=1e-13)
    layer.train()
    assert (layer(others)[:1] - alone).abs().max() > 0.1


@pytest.mark.parametrize(
    ("dims", "shape"), [(0, (6, 5)), (1, (3, 4, 5)), (1, (3, 5)), (2, (3, 5, 4, 4))], ids=str
)
def test_a_wrong_number_of_features_raises(dims, shape):
    with pytest.raises((ValueError, RuntimeError)):
        build(dims=dims)(draw(shape))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_momentum_none_is_the_average_with_equal_weights(dims):
    layer = build(dims=dims, momentum=None)
    batches = [draw(SHAPES[dims], seed) for seed in range(5)]
    for x in batches:
        layer(x)
    found = [oracle.moments(x.numpy()) for x in batches]
    mean, var = (np.mean([moments[i] for moments in found], 0) for i in (0, 2))
    np.testing.assert_allclose(layer.running_mean, mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(layer.running_var, var, rtol=0, atol=1e-12)
