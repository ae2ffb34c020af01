"""spectral_band_norm against its formula in NumPy, and its identity with instance norm."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.mixed import spectral_band_norm

from normexp.errors import UserError
from normexp.norms import NormFactory, check_statistic_sets, describe_norm_layers
from normexp.norms.spectral_band_norm import build_spectral_band_norm

C, EPS = 3, 1e-3
SHAPES = {1: (2, 9, C), 2: (2, C, 4, 5)}


def gains(num_bands):
    return np.linspace(0.5, 2.0, C * num_bands).reshape(C, num_bands)


SHIFT = np.linspace(-1.0, 1.0, C)


def build(dims, num_bands=3, **params):
    """Return the layer in float64, with gains and shifts that all differ."""
    layer = build_spectral_band_norm(C, dims=dims, eps=EPS, num_bands=num_bands, **params).double()
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(torch.from_numpy(gains(num_bands)))
            layer.bias.copy_(torch.from_numpy(SHIFT))
    return layer


def draw(shape, seed=0):
    return np.random.default_rng(seed).normal(3.0, 2.0, shape)


@given(
    sizes=st.one_of(st.tuples(st.integers(2, 12)), st.tuples(st.integers(1, 6), st.integers(2, 7))),
    num_bands=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_matches_the_formula_at_every_size(sizes, num_bands, seed):
    dims = len(sizes)
    x = draw((2, *sizes, C) if dims == 1 else (2, C, *sizes), seed)
    layer = build(dims, num_bands)
    if layer.find_problem(x.shape) is not None:
        return
    actual = layer(torch.from_numpy(x)).detach()
    expected = spectral_band_norm(
        x, num_bands=num_bands, weight=gains(num_bands), bias=SHIFT, eps=EPS
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [(7,), (8,), (2,), (4, 4), (5, 3), (1, 6), (6, 1)])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_one_band_is_instance_norm(sizes, eps):
    dims = len(sizes)
    images = torch.from_numpy(draw((2, C, *sizes)))
    x = images if dims == 2 else images.transpose(1, 2)
    expected = torch.nn.functional.instance_norm(images, eps=eps)
    expected = expected if dims == 2 else expected.transpose(1, 2)
    layer = build_spectral_band_norm(C, dims=dims, num_bands=1, eps=eps).double()
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [1, 2])
def test_the_output_has_mean_0_variance_1_and_an_even_spectrum(dims):
    x = torch.from_numpy(draw(SHAPES[dims]))
    y = build_spectral_band_norm(C, dims=dims, num_bands=2, eps=1e-12).double()(x)
    images = y if dims == 2 else y.transpose(1, 2)
    flat = images.flatten(2)
    torch.testing.assert_close(flat.mean(2), torch.zeros(2, C).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(
        flat.var(2, correction=0), torch.ones(2, C).double(), rtol=0, atol=1e-9
    )
    if dims == 1:
        # 9 positions: frequencies 1, 2 and 3, 4; of each pair the mean power is the same.
        power = torch.fft.rfft(images).abs().square()
        torch.testing.assert_close(
            power[..., 1:3].mean(-1), power[..., 3:5].mean(-1), rtol=0, atol=1e-8
        )


def test_bands_of_sequences_are_of_equal_width():
    # A wave of one frequency gets the gain of its band: frequencies 1 to 8 in four bands of two.
    layer = build_spectral_band_norm(1, dims=1, num_bands=4).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    position = torch.arange(17, dtype=torch.float64)
    waves = torch.stack([torch.cos(2 * torch.pi * k * position / 17) for k in range(1, 9)])[
        ..., None
    ]
    found = layer(waves).square().sum((1, 2)).sqrt()
    torch.testing.assert_close(
        found / found[0], torch.tensor([1, 1, 2, 2, 3, 3, 4, 4]).double(), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("dims", [1, 2])
def test_the_gradient_is_exact(dims):
    layer = build(dims)
    x = torch.from_numpy(draw(SHAPES[dims])).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


@pytest.mark.parametrize(
    ("dims", "shape", "num_radii"),
    [(2, (2, C, 2, 2), 2), (2, (2, C, 1, 1), 0), (2, (2, C, 2, 3), 3), (1, (2, 7, C), 3)],
)
def test_too_small_inputs_are_named(dims, shape, num_radii):
    # 2 x 2 maps: sides at 1/2 and the corner at sqrt(1/2).
    layer = build(dims, num_bands=4)
    line = rf"have {num_radii} distinct frequencies beside the mean, too few for num_bands=4"
    with pytest.raises(ValueError, match=line):
        layer(torch.from_numpy(draw(shape)))
    assert build(dims, num_bands=max(1, num_radii)).find_problem(shape) is None or num_radii == 0


def test_too_small_inputs_are_found_before_training():
    model = torch.nn.Sequential(
        NormFactory("spectral_band_norm", {"num_bands": 4})(C, role="block", dims=2)
    )
    with pytest.raises(UserError, match=r"^norm=spectral_band_norm: layer 0: 2 x 2 positions"):
        check_statistic_sets(describe_norm_layers(model, (C, 2, 2), 8))
    check_statistic_sets(describe_norm_layers(model, (C, 4, 4), 8))


def test_parameters_and_record():
    layer = NormFactory("spectral_band_norm")(C, role="block", dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (C, 2),
        "bias": (C,),
    }
    assert layer.norm_record.params == {"eps": 1e-5, "affine": True, "num_bands": 2}
    assert list(build(2, affine=False).parameters()) == []


@pytest.mark.parametrize("num_bands", [0, -1])
def test_a_number_of_bands_below_1_is_refused(num_bands):
    with pytest.raises(UserError, match=rf"^norm\.params\.num_bands={num_bands}: "):
        build_spectral_band_norm(C, dims=2, num_bands=num_bands)


@pytest.mark.parametrize("dims", [1, 2])
def test_constant_inputs_give_the_shift_with_finite_gradients(dims):
    layer = build(dims)
    x = torch.full(SHAPES[dims], 7.0, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    shift = torch.from_numpy(SHIFT if dims == 1 else SHIFT[:, None, None])
    torch.testing.assert_close(y, shift.expand_as(y), rtol=0, atol=1e-10)
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [1, 2])
def test_half_precision_is_rounded_once(dims, dtype):
    # Squares of spectra of values around 300 are more than float16 holds.
    layer = build(dims).float()
    x = (100 * torch.from_numpy(draw(SHAPES[dims]))).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(y, layer(x.float()).to(dtype))


@pytest.mark.parametrize("dims", [1, 2])
def test_stacked_replicas_are_the_replicas(dims):
    layers = [build(dims), build(dims)]
    with torch.no_grad():
        layers[1].weight.mul_(2.0)
    params, _ = torch.func.stack_module_state(layers)
    base, x = copy.deepcopy(layers[0]), torch.from_numpy(draw((2, *SHAPES[dims])))
    y = torch.vmap(lambda p, x: torch.func.functional_call(base, p, (x,)))(params, x)
    expected = torch.stack([layer(part) for layer, part in zip(layers, x, strict=True)])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dims", [1, 2])
def test_compiles_whole(dims):
    layer, x = build(dims), torch.from_numpy(draw(SHAPES[dims]))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dims", "hint"), [(0, r"features.*layer_norm"), (3, "dims=3")])
def test_unsupported_dims_point_to_what_to_use(dims, hint):
    with pytest.raises(UserError, match=rf"^norm=spectral_band_norm: .*{hint}"):
        build_spectral_band_norm(C, dims=dims)
