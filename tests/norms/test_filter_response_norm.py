"""filter_response_norm against its formula in NumPy and timm's layer; masks; its threshold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import (
    check_equals_truncated,
    check_padding_is_without_influence,
    make_input,
    make_mask,
    with_own_parameters,
)
from oracle import activation as oracle

from normexp.errors import UserError
from normexp.norms import NormFactory, check_statistic_sets, describe_norm_layers
from normexp.norms.filter_response_norm import build_filter_response_norm
from normexp.norms.instance_norm import build_instance_norm

SHAPES = {1: (3, 5, 8), 2: (3, 8, 2, 5)}


@given(
    dims=st.sampled_from([1, 2]),
    eps=st.sampled_from([1e-6, 1e-3]),
    is_activated=st.booleans(),
    seed=st.integers(0, 9),
)
def test_matches_the_formula(dims, eps, is_activated, seed):
    x = make_input(SHAPES[dims], seed)
    built = build_filter_response_norm(8, dims=dims, eps=eps, is_activated=is_activated)
    layer, own = with_own_parameters(built, seed)
    expected = oracle.filter_response_norm(
        x, own["weight"], own["bias"], own.get("threshold"), eps=eps
    )
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


@given(seed=st.integers(0, 9))
def test_masked_matches_the_formula(seed):
    mask = make_mask()
    x = make_input((*mask.shape, 8), seed)
    layer, own = with_own_parameters(build_filter_response_norm(8, dims=1), seed)
    y = layer(torch.from_numpy(x), torch.from_numpy(mask)).detach()
    expected = oracle.filter_response_norm(x, **own, eps=1e-6, mask=mask)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [1, 2])
def test_gradient_is_exact(dims):
    layer, _ = with_own_parameters(build_filter_response_norm(8, dims=dims))
    x = torch.from_numpy(make_input(SHAPES[dims])).requires_grad_()
    others = (torch.ones(3, 5, dtype=torch.bool).tril(2),) if dims == 1 else ()

    def apply(given, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(layer, named, (given, *others))

    assert torch.autograd.gradcheck(apply, (x, *layer.parameters()))


@pytest.mark.parametrize("is_activated", [True, False])
def test_output_and_gradients_are_those_of_timm(is_activated):
    timm = pytest.importorskip("timm.layers")
    theirs = timm.FilterResponseNormTlu2d(8, apply_act=is_activated, eps=1e-6)
    ours = build_filter_response_norm(8, dims=2, is_activated=is_activated)
    # What is called threshold here is tau there.
    names = [key.replace("threshold", "tau") for key in ours.state_dict()]
    assert names == list(theirs.state_dict())
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


def test_padding_is_without_influence():
    layer, _ = with_own_parameters(build_filter_response_norm(8, dims=1))
    check_padding_is_without_influence(layer, 8)


def test_masked_equals_truncated():
    layer, _ = with_own_parameters(build_filter_response_norm(8, dims=1))
    check_equals_truncated(layer, 8)


def test_images_take_no_mask():
    layer = build_filter_response_norm(8, dims=2)
    with pytest.raises(ValueError, match="only sequences take a mask"):
        layer(torch.ones(3, 8, 2, 5), torch.ones(3, 8, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    # The squares overflow float16.
    x = (torch.from_numpy(make_input((3, 8, 2, 5))) * 500).to(dtype)
    layer = build_filter_response_norm(8, dims=2)
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, layer(x.float()).to(dtype), rtol=0, atol=0)


def test_on_centred_planes_it_is_instance_norm():
    x = torch.from_numpy(make_input((3, 8, 2, 5)))
    x = x - x.mean((2, 3), keepdim=True)
    y = build_filter_response_norm(8, dims=2, eps=1e-3, is_activated=False)(x)
    expected = build_instance_norm(8, dims=2, eps=1e-3, affine=False)(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_on_a_single_position_it_is_the_sign():
    x = torch.tensor([[[[3.0]], [[-0.2]]]])
    y = build_filter_response_norm(2, dims=2, is_activated=False)(x)
    torch.testing.assert_close(y, x.sign(), rtol=0, atol=2e-5)


def test_a_single_position_is_refused_before_training():
    model = NormFactory("filter_response_norm")(8, role="block", dims=2)
    layers = describe_norm_layers(model, (8, 1, 1), micro_batch_size=4)
    with pytest.raises(UserError, match="would normalize over a single value"):
        check_statistic_sets(layers)


def test_threshold_starts_as_relu_and_is_there_only_where_an_activation_belongs():
    x = torch.from_numpy(make_input((3, 8, 2, 5))).float()
    activated = build_filter_response_norm(8, dims=2)
    plain = build_filter_response_norm(8, dims=2, is_activated=False)
    assert torch.equal(activated(x), plain(x).relu())
    assert [name for name, _ in activated.named_parameters()] == ["weight", "bias", "threshold"]
    assert [name for name, _ in plain.named_parameters()] == ["weight", "bias"]


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=filter_response_norm: .*features.*rms_norm"):
        build_filter_response_norm(8, dims=0)
