"""The RMS normalization that all RMS norms share, against torch's and its derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, stack_module_state, vmap

from normexp.norms import _rms
from normexp.norms._rms import rms_normalize


@pytest.fixture(autouse=True)
def _always_ours(monkeypatch):
    """Small tensors take our own path too."""
    monkeypatch.setattr(_rms, "MIN_ELEMENTS", 0)


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 5), (2, 3, 4, 8)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equals_torch_in_output_and_gradients(shape, affine, eps):
    x = draw(*shape).requires_grad_()
    weight = draw(shape[-1], seed=1).requires_grad_() if affine else None
    inputs = (x, weight) if affine else (x,)
    g = draw(*shape, seed=2)
    ours = rms_normalize(x, weight, eps)
    theirs = F.rms_norm(x, (shape[-1],), weight, eps)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    assert "RmsNormalize" in type(ours.grad_fn).__name__  # not torch's own path
    for a, b in zip(
        torch.autograd.grad(ours, inputs, g), torch.autograd.grad(theirs, inputs, g), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("affine", [True, False])
def test_first_and_second_derivative_by_differences(affine):
    x = draw(3, 2, 5).requires_grad_()
    weight = draw(5, seed=1).requires_grad_() if affine else None

    def f(x, *rest):
        return rms_normalize(x, rest[0] if rest else None, 1e-3)

    inputs = (x, weight) if affine else (x,)
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_zero_rows_have_finite_derivatives():
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = rms_normalize(x, weight, 1e-6)
    gx, gw = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
    assert torch.equal(y, torch.zeros_like(y))
    torch.testing.assert_close(gx, torch.full_like(x, 1e3))  # 1 / sqrt(eps)
    assert gw.isfinite().all()


@pytest.mark.parametrize("x_is_stacked", [True, False])
def test_stacked_gains_equal_the_loop(x_is_stacked):
    layers = [torch.nn.RMSNorm(6, eps=1e-3).double() for _ in range(3)]
    for index, layer in enumerate(layers):
        layer.weight.data.copy_(draw(6, seed=index))
        layer.forward = lambda x, layer=layer: rms_normalize(x, layer.weight, 1e-3)
    params, _ = stack_module_state(layers)
    xs = draw(3, 4, 6, seed=9)

    def loss(params, x):
        y = rms_normalize(x, params["weight"], 1e-3)
        return (y * torch.arange(6.0, dtype=torch.float64)).sum()

    stacked = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, 0 if x_is_stacked else None))
    got_w, got_x = stacked(params, xs if x_is_stacked else xs[0])
    for index, layer in enumerate(layers):
        x = xs[index if x_is_stacked else 0].clone().requires_grad_()
        y = F.rms_norm(x, (6,), layer.weight, 1e-3)
        gx, gw = torch.autograd.grad(
            (y * torch.arange(6.0, dtype=torch.float64)).sum(), (x, layer.weight)
        )
        torch.testing.assert_close(got_x[index], gx, rtol=0, atol=1e-13)
        torch.testing.assert_close(got_w["weight"][index], gw, rtol=0, atol=1e-13)


def test_stacked_outputs_equal_the_loop():
    xs, ws = draw(3, 4, 6), draw(3, 6, seed=1)
    got = vmap(lambda x, w: rms_normalize(x, w, 1e-3))(xs, ws)
    expected = torch.stack([F.rms_norm(x, (6,), w, 1e-3) for x, w in zip(xs, ws, strict=True)])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_torchs_path(dtype):
    x = torch.full((2, 4), 300.0, dtype=dtype)  # the square overflows float16
    y = rms_normalize(x, torch.ones(4, dtype=dtype), 1e-6)
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_float32_gains_is_computed_in_float32(dtype):
    x = (300.0 * draw(4, 8, dtype=torch.float32)).to(dtype)
    weight = draw(8, dtype=torch.float32, seed=1)
    y = rms_normalize(x, weight, 1e-6)
    assert torch.equal(y, rms_normalize(x.float(), weight, 1e-6).to(dtype))


def test_small_inputs_take_torchs_path(monkeypatch):
    monkeypatch.setattr(_rms, "MIN_ELEMENTS", 25)
    small, large = draw(4, 6).requires_grad_(), draw(5, 6).requires_grad_()
    assert "RmsNormalize" not in type(rms_normalize(small, None, 1e-6).grad_fn).__name__
    assert "RmsNormalize" in type(rms_normalize(large, None, 1e-6).grad_fn).__name__


def test_keeps_as_many_bytes_for_backward_as_layer_norm():
    from normexp.measure import saved_for_backward_bytes

    x = draw(8, 16, dtype=torch.float32).requires_grad_()
    weight = torch.ones(16, requires_grad=True)
    ours = saved_for_backward_bytes(lambda: rms_normalize(x, weight, 1e-6), exclude=[weight])
    layer = saved_for_backward_bytes(
        lambda: F.layer_norm(x, (16,), weight, None, 1e-6), exclude=[weight]
    )
    # Layer norm keeps a mean beside the reciprocal deviation of each of 8 rows.
    assert layer - ours == 8 * 4
