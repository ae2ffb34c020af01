"""instance_norm against its formula in NumPy, forward and backward; masks; running statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import (
    check_equals_truncated,
    check_padding_is_without_influence,
    find_influenced_positions,
    make_input,
    make_mask,
    with_own_parameters,
)
from oracle import group as oracle
from torch import nn

from normexp.errors import UserError
from normexp.norms.instance_norm import build_instance_norm

SHAPES = {1: (3, 5, 8), 2: (3, 8, 2, 5)}
TORCH_LAYERS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d}


def channels_first(x):
    return x.transpose(1, 2) if x.ndim == 3 else x


@given(dims=st.sampled_from([1, 2]), eps=st.sampled_from([1e-5, 1e-3]), seed=st.integers(0, 9))
def test_forward_and_backward_match_the_formula(dims, eps, seed):
    x, grad = make_input(SHAPES[dims], seed), make_input(SHAPES[dims], seed + 10)
    layer, own = with_own_parameters(build_instance_norm(8, dims=dims, eps=eps), seed)
    given = torch.from_numpy(x).requires_grad_()
    y = layer(given)
    expected = oracle.instance_norm(x, own["weight"], own["bias"], eps=eps)
    np.testing.assert_allclose(y.detach(), expected, rtol=0, atol=1e-10)
    y.backward(torch.from_numpy(grad))
    found = (given.grad, layer.weight.grad, layer.bias.grad)
    expected = oracle.instance_norm_backward(x, own["weight"], grad, eps=eps)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@given(seed=st.integers(0, 9))
def test_masked_forward_and_backward_match_the_formula(seed):
    mask = make_mask()
    x, grad = make_input((*mask.shape, 8), seed), make_input((*mask.shape, 8), seed + 10)
    layer, own = with_own_parameters(build_instance_norm(8, dims=1), seed)
    given = torch.from_numpy(x).requires_grad_()
    y = layer(given, torch.from_numpy(mask))
    expected = oracle.instance_norm(x, own["weight"], own["bias"], eps=1e-5, mask=mask)
    np.testing.assert_allclose(y.detach(), expected, rtol=0, atol=1e-10)
    y.backward(torch.from_numpy(grad))
    found = (given.grad, layer.weight.grad, layer.bias.grad)
    expected = oracle.instance_norm_backward(x, own["weight"], grad, eps=1e-5, mask=mask)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [1, 2])
def test_gradient_is_exact(dims):
    layer, _ = with_own_parameters(build_instance_norm(8, dims=dims))
    x = torch.from_numpy(make_input(SHAPES[dims])).requires_grad_()
    others = (torch.ones(3, 5, dtype=torch.bool).tril(2),) if dims == 1 else ()
    assert torch.autograd.gradcheck(lambda given: layer(given, *others), (x,))


def test_padding_is_without_influence():
    layer, _ = with_own_parameters(build_instance_norm(8, dims=1))
    check_padding_is_without_influence(layer, 8)


def test_padding_is_without_influence_on_tracked_layers():
    layer, _ = with_own_parameters(build_instance_norm(8, dims=1, track_running_stats=True))
    check_padding_is_without_influence(layer, 8)
    assert layer.running_mean.isfinite().all()
    check_padding_is_without_influence(layer.eval(), 8)


def test_masked_equals_truncated():
    layer, _ = with_own_parameters(build_instance_norm(8, dims=1))
    check_equals_truncated(layer, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masked_half_precision_has_float32_statistics(dtype):
    mask = torch.from_numpy(make_mask())
    # Squares of these overflow float16, and the spread is lost in a bfloat16 sum.
    x = (torch.from_numpy(make_input((*mask.shape, 8))) * 100 + 600).to(dtype)
    layer = build_instance_norm(8, dims=1)
    y = layer(x, mask)
    assert y.dtype == dtype
    torch.testing.assert_close(y, layer(x.float(), mask).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dims", [1, 2])
def test_one_sample_in_training_is_batch_norm(dims):
    x = torch.from_numpy(make_input((1, *SHAPES[dims][1:])))
    y = build_instance_norm(8, dims=dims, affine=False)(x)
    expected = nn.functional.batch_norm(channels_first(x), None, None, training=True)
    torch.testing.assert_close(channels_first(y), expected, rtol=0, atol=1e-12)


def test_sequences_leak_from_later_positions_to_earlier_ones():
    layer = build_instance_norm(8, dims=1).double()
    assert find_influenced_positions(layer, 8, changed=5) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("shape", [(3, 1, 8), (3, 8, 1, 1)])
def test_a_single_position_is_an_error(mode, shape):
    layer = build_instance_norm(8, dims=len(shape) - 2).train(mode == "train")
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        layer(torch.ones(shape))


def test_keeps_no_running_statistics():
    assert list(build_instance_norm(8, dims=2).buffers()) == []


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_state_and_output_are_those_of_torch_s_layer(dims, tracked, affine):
    options = {"eps": 1e-3, "momentum": 0.3, "affine": affine, "track_running_stats": tracked}
    ours, theirs = build_instance_norm(8, dims=dims, **options), TORCH_LAYERS[dims](8, **options)
    for seed in range(2):
        x = torch.from_numpy(make_input(SHAPES[dims], seed)).float()
        assert torch.equal(channels_first(ours(x)), theirs(channels_first(x)))
    assert torch.equal(channels_first(ours.eval()(x)), theirs.eval()(channels_first(x)))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)


@pytest.mark.parametrize("dims", [1, 2])
def test_running_statistics_average_the_samples_unbiased_variances(dims):
    layer = build_instance_norm(8, dims=dims, track_running_stats=True, momentum=0.3).double()
    x = make_input(SHAPES[dims])
    layer(torch.from_numpy(x))
    mean, var = oracle.instance_norm_running(x, np.zeros(8), np.ones(8), momentum=0.3)
    np.testing.assert_allclose(layer.running_mean, mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(layer.running_var, var, rtol=0, atol=1e-10)
    assert layer.num_batches_tracked == 0


def test_masked_running_statistics_leave_short_samples_out():
    mask = make_mask()
    mask[1, 1:] = False
    x = make_input((*mask.shape, 8))
    layer, own = with_own_parameters(
        build_instance_norm(8, dims=1, track_running_stats=True, momentum=0.3)
    )
    layer(torch.from_numpy(x), torch.from_numpy(mask))
    mean, var = oracle.instance_norm_running(x, np.zeros(8), np.ones(8), momentum=0.3, mask=mask)
    np.testing.assert_allclose(layer.running_mean, mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(layer.running_var, var, rtol=0, atol=1e-10)
    y = layer.eval()(torch.from_numpy(x), torch.from_numpy(mask)).detach()
    expected = (x - mean) / np.sqrt(var + 1e-5) * own["weight"] + own["bias"]
    np.testing.assert_allclose(y, np.where(mask[:, :, None], expected, 0), rtol=0, atol=1e-10)


def test_a_batch_of_short_samples_leaves_the_running_statistics():
    layer = build_instance_norm(8, dims=1, track_running_stats=True).double()
    mask = torch.tensor([[True, False], [False, False]])
    layer(torch.from_numpy(make_input((2, 2, 8))), mask)
    assert torch.equal(layer.running_mean, torch.zeros(8, dtype=torch.float64))
    assert torch.equal(layer.running_var, torch.ones(8, dtype=torch.float64))


def test_tracking_needs_a_momentum():
    # torch's layer would take None for 0 and keep what the buffers start with.
    with pytest.raises(UserError, match=r"^norm\.params\.momentum=null: a number is needed"):
        build_instance_norm(8, dims=2, track_running_stats=True, momentum=None)


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
