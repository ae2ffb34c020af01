"""ghost_batch_norm: over k chunks it is batch_norm with k accumulated micro-batches."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import batch as oracle

from normexp.errors import UserError
from normexp.norms import NormFactory, _batch, check_statistic_sets, describe_norm_layers
from normexp.norms.batch_norm import build_batch_norm
from normexp.norms.ghost_batch_norm import CARD, build_ghost_batch_norm

C = 4
GAIN, SHIFT = np.linspace(0.5, 2.0, C), np.linspace(-1.0, 1.0, C)
TAIL = {0: (C,), 1: (3, C), 2: (C, 2, 3)}


def draw(shape, *seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(3.0, 2.0, shape))


def with_affine(layer):
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(GAIN))
        layer.bias.copy_(torch.from_numpy(SHIFT))
    return layer


@given(
    dims=st.sampled_from([0, 1, 2]),
    num_chunks=st.integers(1, 4),
    ghost_size=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_matches_the_formula(dims, num_chunks, ghost_size, seed):
    x = draw((num_chunks * ghost_size, *TAIL[dims]), seed)
    layer = with_affine(build_ghost_batch_norm(C, dims=dims, ghost_size=ghost_size, eps=1e-3))
    expected = oracle.ghost_batch_norm(x.numpy(), GAIN, SHIFT, 1e-3, ghost_size)
    np.testing.assert_allclose(layer(x).detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_it_is_batch_norm_with_accumulation(dims, is_masked, momentum):
    # Outputs, gradients and buffers, over two forward passes of three chunks each.
    ghost = with_affine(build_ghost_batch_norm(C, dims=dims, ghost_size=4, momentum=momentum))
    plain = with_affine(build_batch_norm(C, dims=dims, momentum=momentum))
    for step in range(2):
        shape = (12, *TAIL[dims])
        x, upstream = draw(shape, step, 0).requires_grad_(), draw(shape, step, 1)
        mask = draw(shape[:2], step, 2) > 2.0 if is_masked and dims == 1 else None
        y = ghost(x) if mask is None else ghost(x, mask)
        (y * upstream).sum().backward()
        for start in range(0, 12, 4):
            chunk = slice(start, start + 4)
            part = x.detach()[chunk].requires_grad_()
            expected = plain(part) if mask is None else plain(part, mask[chunk])
            (expected * upstream[chunk]).sum().backward()
            torch.testing.assert_close(y[chunk], expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(x.grad[chunk], part.grad, rtol=0, atol=1e-10)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(
            ghost.get_parameter(key).grad, parameter.grad, rtol=0, atol=1e-10
        )
    for key, buffer in plain.named_buffers():
        torch.testing.assert_close(ghost.get_buffer(key), buffer, rtol=0, atol=1e-10)
    assert ghost.num_batches_tracked == 6


def test_a_chunk_without_valid_positions_is_passed_over():
    ghost, plain = (
        build(C, dims=1).double() for build in (build_ghost_batch_norm, build_batch_norm)
    )
    ghost.ghost_size = 2
    x, mask = draw((6, *TAIL[1])), torch.ones(6, 3, dtype=torch.bool)
    mask[2:4] = False
    y = ghost(x, mask)
    for chunk in (slice(0, 2), slice(4, 6)):
        torch.testing.assert_close(y[chunk], plain(x[chunk]), rtol=0, atol=1e-10)
    assert not y[2:4].any()
    for key, buffer in plain.named_buffers():
        torch.testing.assert_close(ghost.get_buffer(key), buffer, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_small_micro_batch_is_one_chunk(dims):
    ghost, plain = build_ghost_batch_norm(C, dims=dims), build_batch_norm(C, dims=dims)
    x = draw((7, *TAIL[dims])).float()
    assert torch.equal(ghost(x), plain(x))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_micro_batch_that_does_not_divide_is_refused_in_training_only(dims):
    layer, x = build_ghost_batch_norm(C, dims=dims, ghost_size=4), draw((6, *TAIL[dims])).float()
    line = "ghost_size=4 does not divide the 6 samples of a micro-batch"
    with pytest.raises(ValueError, match=f"^{line}"):
        layer(x)
    assert layer.eval()(x).shape == x.shape


def test_the_check_before_training_tells_the_layer():
    model = torch.nn.Sequential(
        NormFactory("ghost_batch_norm", {"ghost_size": 4})(C, role="block", dims=0)
    )
    for num_samples in (3, 4, 8):
        check_statistic_sets(describe_norm_layers(model, (C,), num_samples))
    with pytest.raises(UserError, match="layer 0: ghost_size=4 does not divide the 6 samples"):
        check_statistic_sets(describe_norm_layers(model, (C,), 6))


@pytest.mark.parametrize("num_samples", [3, 16, 32])
def test_the_statistic_set_size_is_that_of_a_chunk(num_samples):
    model = torch.nn.Sequential(NormFactory("ghost_batch_norm")(C, role="block", dims=2))
    (layer,) = describe_norm_layers(model, TAIL[2], num_samples)
    assert layer.statistic_set_size == min(num_samples, 16) * 6


def test_channels_last_chunks_match_the_formula():
    x = draw((8, C, 3, 5)).to(memory_format=torch.channels_last)
    layer = with_affine(build_ghost_batch_norm(C, dims=2, ghost_size=2))
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    expected = oracle.ghost_batch_norm(x.contiguous().numpy(), GAIN, SHIFT, 1e-5, 2)
    np.testing.assert_allclose(y.detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ghost_size", [0, -3])
def test_a_bad_ghost_size_is_named(ghost_size):
    line = f"norm.params.ghost_size={ghost_size}: a whole number of 1 or more"
    with pytest.raises(UserError, match="^" + re.escape(line)):
        build_ghost_batch_norm(C, dims=2, ghost_size=ghost_size)


def test_state_is_declared():
    layer = build_ghost_batch_norm(C, dims=2)
    assert tuple(name for name, _ in layer.named_buffers()) == CARD.state
    assert "ghost_size=16" in str(layer)


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 2, 3)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_large_and_small_chunks_are_computed_alike(monkeypatch, shape, momentum):
    results = []
    for min_elements in (0, 10**9):  # each alone, then side by side
        monkeypatch.setattr(_batch, "MIN_CHUNK_ELEMENTS", min_elements)
        layer = build_ghost_batch_norm(
            6, dims=len(shape) - 2, ghost_size=2, momentum=momentum
        ).double()
        x = torch.from_numpy(np.random.default_rng(0).normal(2.0, 3.0, shape)).requires_grad_()
        y = layer(x)
        y.square().mul(torch.arange(y.numel()).view(shape)).sum().backward()
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()])
    for alone, side_by_side in zip(*results, strict=True):
        torch.testing.assert_close(alone, side_by_side, rtol=1e-12, atol=1e-12)
