"""signed_power against its formula in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.pointwise import signed_power

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.signed_power import CARD, build_signed_power

GAIN = np.linspace(0.5, 2.0, 6)
SHIFT = np.linspace(-1.0, 1.0, 6)
SHAPES = {0: (3, 6), 1: (3, 5, 6), 2: (3, 6, 2, 5)}
ALPHA = 0.7
EPS = 1e-5


def build(dims, **params):
    """Return the layer in float64, every parameter away from where it starts."""
    layer = build_signed_power(6, dims=dims, **params).double()
    with torch.no_grad():
        layer.log_alpha.fill_(np.log(ALPHA))
        if layer.weight is not None:
            layer.weight.copy_(torch.from_numpy(GAIN))
            layer.bias.copy_(torch.from_numpy(SHIFT))
    return layer


def draw(dims, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(0.3, scale, SHAPES[dims])


@given(
    dims=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-9, 1e-3, 1.0, 30.0]),
)
def test_matches_the_formula(dims, seed, scale):
    x = draw(dims, seed, scale)
    expected = signed_power(x, alpha=ALPHA, eps=EPS, weight=GAIN, bias=SHIFT)
    actual = build(dims)(torch.from_numpy(x)).detach()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_the_gradient_is_exact(dims):
    layer = build(dims)
    x = torch.from_numpy(draw(dims)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_starts_at_the_signed_square_root():
    layer = NormFactory("signed_power")(6, role="block", dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        name: tuple(6 for _ in shape) for name, shape in CARD.parameters.items()
    }
    assert layer.log_alpha.exp().item() == pytest.approx(0.5, abs=1e-7)
    assert layer.norm_record.params == {"eps": 1e-5, "affine": True, "initial_alpha": 0.5}


def test_without_affine_the_power_remains():
    layer = build(1, affine=False)
    assert [name for name, _ in layer.named_parameters()] == ["log_alpha"]
    x = draw(1)
    expected = signed_power(x, alpha=ALPHA, eps=EPS, weight=np.ones(6), bias=np.zeros(6))
    actual = layer(torch.from_numpy(x)).detach()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_half_precision_is_rounded_once(dims, dtype):
    # Computed in float32 throughout and cast at the end: the very same bits.
    layer = build(dims).float()
    x = torch.from_numpy(draw(dims)).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(y, layer(x.float()).to(dtype))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_stacked_replicas_are_the_replicas(dims):
    layers = [build(dims), build(dims)]
    with torch.no_grad():
        layers[1].log_alpha.fill_(0.4)
    params, _ = torch.func.stack_module_state(layers)
    x = torch.from_numpy(draw(dims))
    base = copy.deepcopy(layers[0])
    y = torch.vmap(lambda p: torch.func.functional_call(base, p, (x,)))(params)
    torch.testing.assert_close(y, torch.stack([layer(x) for layer in layers]), rtol=0, atol=1e-14)


def test_compiles_whole():
    layer = build(2)
    x = torch.from_numpy(draw(2))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-14)


def test_channels_last_images_stay_so():
    x = torch.from_numpy(draw(2)).contiguous(memory_format=torch.channels_last)
    assert build(2)(x).is_contiguous(memory_format=torch.channels_last)


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=signed_power: .*dims=3"):
        build_signed_power(6, dims=3)


@pytest.mark.parametrize("initial_alpha", [0.0, -0.5])
def test_a_power_that_is_not_positive_is_refused(initial_alpha):
    with pytest.raises(UserError, match=rf"^norm\.params\.initial_alpha={initial_alpha}: "):
        build_signed_power(6, dims=0, initial_alpha=initial_alpha)


def test_zero_gives_the_shift_with_finite_gradients():
    layer = build(0)
    x = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    np.testing.assert_array_equal(y.detach(), np.stack([SHIFT, SHIFT]))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_the_slope_beside_zero_is_bounded_by_eps():
    # alpha (|x| + eps)^(alpha - 1) = 0.7 * 1e-5^-0.3 at |x| << eps.
    layer = build(0, affine=False)
    x = torch.full((1, 6), 1e-12, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    np.testing.assert_allclose(x.grad, ALPHA * EPS ** (ALPHA - 1), rtol=1e-6)
