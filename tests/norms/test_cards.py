"""Every field of every card, by experiment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normexp.norms import NORMS, NormFactory, compute_statistic_set_size

N, C, H, W = 3, 6, 2, 3
CASES = [(entry.name, dims) for entry in NORMS for dims in entry.card.dims]
# 6 channels have no 8 groups.
PARAMS = {"group_norm": {"num_groups": 3}}


def build(name, dims):
    layer = NormFactory(name, PARAMS.get(name, {}))(C, role="block", dims=dims).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, C))
    return layer


def images(dims, seed=0):
    shape = (N, C, H, W) if dims == 2 else (N, C)
    return torch.from_numpy(np.random.default_rng(seed).normal(0.5, 2.0, shape))


def dependencies(name, dims):
    """Return which input elements each output element depends on: the Jacobian's pattern."""
    x = images(dims)
    jacobian = torch.autograd.functional.jacobian(build(name, dims), x)
    return jacobian.reshape(*(N, C, H * W) * 2 if dims == 2 else (N, C, 1) * 2).abs() > 1e-9


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_statistic_axes_are_what_an_output_depends_on(name, dims):
    card = NORMS.get(name).card
    axes = card.statistic_sets[dims][0] if card.statistic_sets[dims] else ()
    # Without the axis, only elements at the same place along it are connected.
    batch = torch.ones(N, N) if "batch" in axes else torch.eye(N)
    if "channel" in axes:
        channel = torch.ones(C, C)
    elif "group" in axes:
        channel = torch.block_diag(*[torch.ones(2, 2)] * 3)
    else:
        channel = torch.eye(C)
    extent = H * W if dims == 2 else 1
    position = torch.ones(extent, extent) if "position" in axes else torch.eye(extent)
    expected = torch.einsum("nm,cd,pq->ncpmdq", batch, channel, position) > 0
    assert torch.equal(dependencies(name, dims), expected)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_statistic_set_size_is_the_number_of_inputs_an_output_depends_on(name, dims):
    layer, sets = build(name, dims), NORMS.get(name).card.statistic_sets[dims]
    counts = dependencies(name, dims).flatten(3).sum(3)
    params = layer.norm_record.params
    sizes = [compute_statistic_set_size(axes, tuple(images(dims).shape), params) for axes in sets]
    assert counts.unique().tolist() == (sizes or [1])


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_mixing_is_declared(name, dims):
    card = NORMS.get(name).card
    pattern = dependencies(name, dims)
    other_samples = ~torch.eye(N, dtype=torch.bool)[:, None, None, :, None, None]
    assert bool((pattern & other_samples).any()) == card.mixes_samples
    if dims == 2:
        other_positions = ~torch.eye(H * W, dtype=torch.bool)[None, None, :, None, None, :]
        assert bool((pattern & other_positions).any()) == card.mixes_positions


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_centring_takes_a_constant_out(name, dims):
    layer, x = build(name, dims), images(dims)
    shift = (layer(x + 10.0) - layer(x)).abs().max().item()
    if NORMS.get(name).card.is_centring:
        assert shift < 1e-10
    else:
        assert shift > 0.1


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_evaluation_behaves_as_declared(name, dims):
    card, layer, x = NORMS.get(name).card, build(name, dims), images(dims)
    trained = layer(x)
    layer.eval()
    difference = (layer(x) - trained).abs().max().item()
    assert (difference == 0.0) if card.is_same_in_eval else (difference > 0.1)
    # In evaluation no norm looks at batch mates; the kernels may round by the batch's size.
    torch.testing.assert_close(layer(x[:1]), layer(x)[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_state_is_declared_and_round_trips(name, dims):
    layer, other, x = build(name, dims), build(name, dims), images(dims)
    assert tuple(key for key, _ in layer.named_buffers()) == NORMS.get(name).card.state
    layer(x)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), other.eval()(x))


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_bfloat16_is_close_to_float32(name, dims):
    x = images(dims).bfloat16()
    single, half = build(name, dims).float()(x.float()), build(name, dims).bfloat16()(x)
    assert half.dtype == torch.bfloat16
    # Statistics are float32; gain, shift and result are rounded to 8 bits: half of 2^-8 each.
    # torch's CPU kernel for batch_norm of features folds the mean into the shift before it
    # rounds, which costs |mean| / std times more.
    tolerance = 2**-5 if (name, dims) == ("batch_norm", 0) else 3 * 2**-9
    torch.testing.assert_close(half.float(), single, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_constant_inputs_stay_finite_with_finite_gradients(name, dims):
    layer = build(name, dims)
    x = torch.full_like(images(dims), 7.0).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_declared_text_is_there(name, dims):
    card = NORMS.get(name).card
    assert set(card.statistic_sets) == set(card.dims)
    assert all((card.formula, card.source, card.kernel))
