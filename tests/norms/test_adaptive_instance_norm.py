"""adaptive_instance_norm against its formula in NumPy; a fresh layer is the plain norm."""

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
from oracle import group as oracle

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.adaptive_instance_norm import build_adaptive_instance_norm
from normexp.norms.instance_norm import build_instance_norm

SHAPES = {1: (3, 5, 8), 2: (3, 8, 2, 5)}


def build(dims, **options):
    return build_adaptive_instance_norm(8, dims=dims, condition_features=4, **options)


@given(dims=st.sampled_from([1, 2]), eps=st.sampled_from([1e-5, 1e-3]), seed=st.integers(0, 9))
def test_matches_the_formula(dims, eps, seed):
    x, condition = make_input(SHAPES[dims], seed), make_input((3, 4), seed + 10)
    layer, own = with_own_parameters(build(dims, eps=eps), seed)
    y = layer(torch.from_numpy(x), torch.from_numpy(condition)).detach()
    weight, bias = own["projection.weight"], own["projection.bias"]
    expected = oracle.adaptive_instance_norm(x, condition, weight, bias, eps=eps)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [1, 2])
def test_gradient_is_exact(dims):
    layer, _ = with_own_parameters(build(dims))
    x = torch.from_numpy(make_input(SHAPES[dims])).requires_grad_()
    condition = torch.from_numpy(make_input((3, 4))).requires_grad_()

    def apply(given, condition, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(layer, named, (given, condition))

    assert torch.autograd.gradcheck(apply, (x, condition, *layer.parameters()))


@pytest.mark.parametrize("dims", [1, 2])
def test_a_fresh_layer_is_the_plain_norm_and_draws_nothing(dims):
    before = torch.get_rng_state()
    layer = build(dims)
    assert torch.equal(torch.get_rng_state(), before)
    x = torch.from_numpy(make_input(SHAPES[dims])).float()
    plain = build_instance_norm(8, dims=dims, affine=False)
    assert torch.equal(layer(x, torch.ones(3, 4)), plain(x))


def test_each_sample_has_its_own_condition():
    layer, _ = with_own_parameters(build(1))
    x = torch.from_numpy(make_input(SHAPES[1]))
    condition = torch.from_numpy(make_input((3, 4)))
    other = condition.clone()
    other[1] += 1.0
    moved = (layer(x, condition) != layer(x, other)).flatten(1).any(1)
    assert moved.tolist() == [False, True, False]


def test_state_is_one_projection():
    shapes = {key: tuple(value.shape) for key, value in build(1).state_dict().items()}
    assert shapes == {"projection.weight": (16, 4), "projection.bias": (16,)}


@given(seed=st.integers(0, 9))
def test_masked_matches_the_formula(seed):
    mask = make_mask()
    x, condition = make_input((*mask.shape, 8), seed), make_input((len(mask), 4), seed + 10)
    layer, own = with_own_parameters(build(1), seed)
    y = layer(*(torch.from_numpy(array) for array in (x, condition, mask))).detach()
    weight, bias = own["projection.weight"], own["projection.bias"]
    expected = oracle.adaptive_instance_norm(x, condition, weight, bias, eps=1e-5, mask=mask)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)


def test_padding_is_without_influence():
    layer, _ = with_own_parameters(build(1))
    check_padding_is_without_influence(layer, 8, torch.from_numpy(make_input((4, 4))))


def test_masked_equals_truncated():
    layer, _ = with_own_parameters(build(1))
    check_equals_truncated(layer, 8, torch.from_numpy(make_input((4, 4))))


def test_images_take_no_mask():
    layer, mask = build(2), torch.ones(3, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="only sequences take a mask"):
        layer(torch.ones(3, 8, 2, 5), torch.ones(3, 4), mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_all_half", [False, True])
def test_half_precision_is_computed_in_float32(dtype, is_all_half):
    # The squares overflow float16.
    x = (torch.from_numpy(make_input(SHAPES[2])) * 500).to(dtype)
    condition = torch.from_numpy(make_input((3, 4))).to(dtype)
    layer = with_own_parameters(build(2))[0].to(dtype if is_all_half else torch.float32)
    y = layer(x, condition)
    assert y.dtype == dtype
    expected = layer.float()(x.float(), condition.float())
    # A projection in half precision rounds gain and shift.
    tolerance = torch.finfo(dtype).eps * (8 if is_all_half else 1)
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)


def test_our_models_refuse_it():
    with pytest.raises(UserError, match="a condition goes in with every input"):
        NormFactory("adaptive_instance_norm")(8, role="block", dims=1)


def test_a_condition_has_features():
    with pytest.raises(UserError, match=r"^norm\.params\.condition_features=0: "):
        build_adaptive_instance_norm(8, dims=1, condition_features=0)


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(
        UserError, match=r"^norm=adaptive_instance_norm: .*features.*adaptive_layer_norm"
    ):
        build_adaptive_instance_norm(8, dims=0)
