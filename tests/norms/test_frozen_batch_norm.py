"""frozen_batch_norm: constants that stay constants, and a batch_norm that becomes one."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from oracle import batch as oracle
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from normexp.errors import UserError
from normexp.norms import NormFactory, describe_norm_layers
from normexp.norms.batch_norm import build_batch_norm
from normexp.norms.frozen_batch_norm import CARD, build_frozen_batch_norm

C = 4
SHAPES = {0: (6, C), 1: (3, 5, C), 2: (3, C, 2, 4)}


def draw(dims, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(3.0, 2.0, SHAPES[dims]))


def trained_batch_norm(dims, **params):
    """Return a batch_norm with statistics, gain and shift off their start."""
    layer = build_batch_norm(C, dims=dims, **params).double()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2.0, C))
        layer.bias.copy_(torch.linspace(-1.0, 1.0, C))
    for seed in range(10, 13):
        layer(draw(dims, seed))
    return layer


def load(dims, state, **params):
    layer = build_frozen_batch_norm(C, dims=dims, **params).double()
    layer.load_state_dict(state, strict=True)
    return layer


@pytest.mark.parametrize("train_affine", [True, False])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_it_takes_the_state_of_a_batch_norm_and_is_its_evaluation(dims, train_affine):
    source, x = trained_batch_norm(dims), draw(dims)
    layer = load(dims, source.state_dict(), train_affine=train_affine)
    torch.testing.assert_close(layer.train()(x), source.eval()(x), rtol=0, atol=1e-12)
    arrays = {key: value.numpy() for key, value in source.state_dict().items()}
    expected = oracle.frozen_batch_norm(
        x.numpy(),
        arrays["weight"],
        arrays["bias"],
        1e-5,
        arrays["running_mean"],
        arrays["running_var"],
    )
    np.testing.assert_allclose(layer(x).detach(), expected, rtol=0, atol=1e-10)


def test_it_is_torchvisions_with_a_frozen_affine():
    state, x = trained_batch_norm(2).state_dict(), draw(2)
    reference = FrozenBatchNorm2d(C, eps=1e-5).double()
    reference.load_state_dict({k: v for k, v in state.items() if k != "num_batches_tracked"})
    layer = load(2, state, train_affine=False)
    torch.testing.assert_close(layer(x), reference(x), rtol=0, atol=1e-12)
    gradients = []
    for module in (layer, reference):
        inputs = draw(2).requires_grad_()
        (module(inputs) * draw(2, 1)).sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("train_affine", [True, False])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_the_statistics_stay_through_modes_copies_and_training(dims, train_affine):
    layer = load(dims, trained_batch_norm(dims).state_dict(), train_affine=train_affine)
    buffers = {key: value.clone() for key, value in layer.named_buffers()}
    layer.eval().train().requires_grad_(True)
    twin = copy.deepcopy(layer)
    twin.load_state_dict(layer.state_dict())
    for module in (layer, twin):
        parameters = list(module.parameters())
        assert len(parameters) == (2 if train_affine else 0)
        if train_affine:
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            module(draw(dims)).square().sum().backward()
            optimizer.step()
        for mode in (True, False, True):
            module.train(mode)(draw(dims))
        assert all(torch.equal(buffers[key], value) for key, value in module.named_buffers())
    # One sample is enough, and batch mates do not count.
    x = draw(dims)
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]), rtol=0, atol=1e-13)


def test_fresh_statistics_are_zero_and_one():
    x = draw(2)
    layer = build_frozen_batch_norm(C, dims=2).double()
    torch.testing.assert_close(layer(x), x / np.sqrt(1 + 1e-5), rtol=0, atol=1e-12)


def test_the_affine_is_a_parameter_or_a_buffer_of_the_same_name():
    trained = build_frozen_batch_norm(C, dims=2)
    constant = build_frozen_batch_norm(C, dims=2, train_affine=False)
    without = build_frozen_batch_norm(C, dims=2, affine=False)
    assert {key for key, _ in trained.named_parameters()} == {"weight", "bias"}
    assert tuple(key for key, _ in trained.named_buffers()) == CARD.state
    assert not list(constant.parameters())
    assert set(constant.state_dict()) == set(trained.state_dict())
    assert set(without.state_dict()) == set(CARD.state)
    assert "train_affine=False" in str(constant)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_it_is_batch_norm_until_it_freezes(dims, momentum):
    plain = trained_batch_norm(dims, momentum=momentum)
    plain.reset_running_stats()
    params = {"momentum": momentum, "freeze_after_micro_batches": 3}
    layer = load(dims, plain.state_dict(), **params)
    for seed in range(6):
        if seed == 2:  # a resumed training goes on counting
            layer = load(dims, layer.state_dict(), **params)
        plain.train(seed < 3)
        found = []
        for module in (layer, plain):
            module.zero_grad()
            x = draw(dims, seed).requires_grad_()
            y = module(x)
            (y * draw(dims, seed + 20)).sum().backward()
            found.append([y, x.grad, module.weight.grad, module.bias.grad, *module.buffers()])
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    assert layer.num_batches_tracked == 3


def test_evaluation_does_not_count():
    layer = build_frozen_batch_norm(C, dims=0, freeze_after_micro_batches=2).double().eval()
    layer(draw(0))
    assert layer.num_batches_tracked == 0


def test_the_statistic_sets_are_those_of_the_time_before():
    for params, size in (({}, None), ({"freeze_after_micro_batches": 5}, 3 * 8)):
        model = nn.Sequential(NormFactory("frozen_batch_norm", params)(C, role="block", dims=2))
        (layer,) = describe_norm_layers(model, SHAPES[2][1:], 3)
        assert layer.statistic_set_size == size


def test_a_negative_number_is_named():
    line = "norm.params.freeze_after_micro_batches=-1: a whole number of 0 or more"
    with pytest.raises(UserError, match="^" + re.escape(line)):
        build_frozen_batch_norm(C, dims=2, freeze_after_micro_batches=-1)
