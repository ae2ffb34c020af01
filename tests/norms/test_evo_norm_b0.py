"""evo_norm_b0 against its formula in NumPy and timm's layer; masks; its running variance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import (
    LENGTHS,
    check_padding_is_without_influence,
    make_input,
    make_mask,
    with_own_parameters,
)
from oracle import activation as oracle

from normexp.errors import UserError
from normexp.norms import NormFactory, check_statistic_sets, describe_norm_layers
from normexp.norms.evo_norm_b0 import build_evo_norm_b0

SHAPES = {1: (3, 5, 8), 2: (3, 8, 2, 5)}


@given(dims=st.sampled_from([1, 2]), eps=st.sampled_from([1e-5, 1e-3]), seed=st.integers(0, 9))
def test_matches_the_formula_in_training_and_evaluation(dims, eps, seed):
    x = make_input(SHAPES[dims], seed)
    built = build_evo_norm_b0(8, dims=dims, eps=eps, momentum=0.3)
    layer, own = with_own_parameters(built, seed)
    expected = oracle.evo_norm_b0(x, **own, eps=eps)
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)
    running = oracle.evo_norm_b0_running_var(x, np.ones(8), momentum=0.3)
    np.testing.assert_allclose(layer.running_var, running, rtol=0, atol=1e-10)
    y = layer.eval()(torch.from_numpy(x)).detach()
    expected = oracle.evo_norm_b0(x, **own, eps=eps, running_var=running)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(layer.running_var, running, rtol=0, atol=1e-10)


@given(seed=st.integers(0, 9))
def test_masked_matches_the_formula(seed):
    mask = make_mask()
    x = make_input((*mask.shape, 8), seed)
    layer, own = with_own_parameters(build_evo_norm_b0(8, dims=1, momentum=0.3), seed)
    y = layer(torch.from_numpy(x), torch.from_numpy(mask)).detach()
    expected = oracle.evo_norm_b0(x, **own, eps=1e-3, mask=mask)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)
    running = oracle.evo_norm_b0_running_var(x, np.ones(8), momentum=0.3, mask=mask)
    np.testing.assert_allclose(layer.running_var, running, rtol=0, atol=1e-10)
    y = layer.eval()(torch.from_numpy(x), torch.from_numpy(mask)).detach()
    expected = oracle.evo_norm_b0(x, **own, eps=1e-3, running_var=running, mask=mask)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("dims", [1, 2])
def test_gradient_is_exact(dims, mode):
    layer, _ = with_own_parameters(build_evo_norm_b0(8, dims=dims).train(mode == "train"))
    x = torch.from_numpy(make_input(SHAPES[dims])).requires_grad_()
    others = (torch.ones(3, 5, dtype=torch.bool).tril(2),) if dims == 1 else ()

    def apply(given, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        buffers = {"running_var": layer.running_var.clone()}
        return torch.func.functional_call(layer, (named, buffers), (given, *others))

    assert torch.autograd.gradcheck(apply, (x, *layer.parameters()))


@pytest.mark.parametrize("is_activated", [True, False])
def test_output_gradients_and_parameters_are_those_of_timm(is_activated):
    timm = pytest.importorskip("timm.layers")
    theirs = timm.EvoNorm2dB0(8, apply_act=is_activated)
    ours = build_evo_norm_b0(8, dims=2, is_activated=is_activated)
    # timm keeps the buffer also where nothing reads it.
    expected = [key for key in theirs.state_dict() if is_activated or key != "running_var"]
    assert list(ours.state_dict()) == expected
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        values = torch.linspace(-0.5, 1.5, 8)
        one.data, other.data = values.clone(), values.clone()
    inputs = [torch.from_numpy(make_input((3, 8, 2, 5))).float() for _ in range(2)]
    for layer, x in zip((ours, theirs), inputs, strict=True):
        layer(x.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(ours(inputs[0]), theirs(inputs[1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    if is_activated:
        torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-6, atol=0)
    evaluated = [layer.eval()(x) for layer, x in zip((ours, theirs), inputs, strict=True)]
    torch.testing.assert_close(*evaluated, rtol=1e-5, atol=1e-5)


def test_padding_is_without_influence():
    layer, _ = with_own_parameters(build_evo_norm_b0(8, dims=1))
    check_padding_is_without_influence(layer, 8)
    assert layer.running_var.isfinite().all()


def test_masked_evaluation_equals_truncated():
    # In training the batch's variance joins all samples, so none can be cut alone.
    layer, _ = with_own_parameters(build_evo_norm_b0(8, dims=1).eval())
    mask = torch.from_numpy(make_mask())
    x = torch.from_numpy(make_input((*mask.shape, 8)))
    y = layer(x, mask)
    for n, length in enumerate(LENGTHS):
        if length:
            alone = layer(x[n : n + 1, :length])
            torch.testing.assert_close(y[n : n + 1, :length], alone, rtol=0, atol=1e-12)


def test_padding_longer_changes_nothing():
    layer, _ = with_own_parameters(build_evo_norm_b0(8, dims=1))
    x = torch.from_numpy(make_input((3, 5, 8)))
    padded, mask = torch.ones(3, 9, 8).double(), torch.arange(9).expand(3, 9) < 5
    padded[:, :5] = x
    torch.testing.assert_close(layer(padded, mask)[:, :5], layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_valid", [0, 1])
def test_a_batch_without_a_variance_leaves_the_running_one(num_valid):
    layer = build_evo_norm_b0(8, dims=1).double()
    y = layer(torch.from_numpy(make_input((1, 4, 8))), torch.arange(4)[None] < num_valid)
    assert y.isfinite().all()
    assert torch.equal(layer.running_var, torch.ones(8).double())


def test_images_take_no_mask():
    layer = build_evo_norm_b0(8, dims=2)
    with pytest.raises(ValueError, match="only sequences take a mask"):
        layer(torch.ones(3, 8, 2, 5), torch.ones(3, 8, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    # The squares overflow float16.
    x = (torch.from_numpy(make_input((3, 8, 2, 5))) * 500).to(dtype)
    layer = build_evo_norm_b0(8, dims=2)
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, layer(x.float()).to(dtype), rtol=0, atol=0)


def test_batch_mates_matter_in_training_alone():
    x = torch.from_numpy(make_input((3, 8, 2, 5)))
    other = x.clone()
    other[1:] *= 5.0
    layer = build_evo_norm_b0(8, dims=2).double()
    assert (layer(x)[0] - layer(other)[0]).abs().max() > 0.1
    layer.eval()
    assert torch.equal(layer(x)[0], layer(other)[0])


def test_without_activation_gain_and_shift_are_all_there_is():
    layer, own = with_own_parameters(build_evo_norm_b0(8, dims=2, is_activated=False))
    assert list(own) == ["weight", "bias"]
    assert list(layer.buffers()) == []
    x = torch.from_numpy(make_input((3, 8, 1, 1)))
    expected = x * layer.weight[:, None, None] + layer.bias[:, None, None]
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("shape", [(3, 1, 8), (3, 8, 1, 1)])
def test_a_single_position_is_an_error(mode, shape):
    layer = build_evo_norm_b0(8, dims=len(shape) - 2).train(mode == "train")
    with pytest.raises(ValueError, match="2 positions or more"):
        layer(torch.ones(shape))


def test_a_single_position_is_refused_before_training():
    factory = NormFactory("evo_norm_b0")
    shape = ((8, 1, 1), 4)
    check_statistic_sets(describe_norm_layers(factory(8, role="block", dims=2), *shape))
    activated = factory(8, role="block", dims=2, is_activated=True)
    with pytest.raises(UserError, match="would normalize over a single value"):
        check_statistic_sets(describe_norm_layers(activated, *shape))


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=evo_norm_b0: .*features.*evo_norm_s0"):
        build_evo_norm_b0(8, dims=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_in_evaluation_too(dtype):
    half, full = (build_evo_norm_b0(8, dims=2).eval() for _ in range(2))
    var = torch.linspace(0.3, 3.0, 8).to(dtype)
    half.to(dtype).running_var.copy_(var)
    full.running_var.copy_(var)
    x = torch.from_numpy(make_input((16, 8, 6, 6))).to(dtype)
    assert torch.equal(half(x), full(x.float()).to(dtype))
