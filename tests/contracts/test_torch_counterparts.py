"""Norms that torch has too agree with it: output, gradients, buffers, state-dict keys."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from normexp.norms import NormFactory

SHAPES = {0: (6, 8), 1: (3, 5, 8), 2: (3, 8, 4, 5)}


class ChannelsSecond(nn.Module):
    """torch's layer for ``[N, C, L]``, given ``[N, L, C]``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


COUNTERPARTS = [
    ("batch_norm", 0, {}, lambda: nn.BatchNorm1d(8)),
    ("batch_norm", 0, {"momentum": None}, lambda: nn.BatchNorm1d(8, momentum=None)),
    ("batch_norm", 1, {}, lambda: nn.BatchNorm1d(8)),
    ("batch_norm", 1, {"momentum": None}, lambda: nn.BatchNorm1d(8, momentum=None)),
    ("batch_norm", 2, {"eps": 1e-3, "momentum": 0.3}, lambda: nn.BatchNorm2d(8, 1e-3, 0.3)),
    ("batch_norm", 2, {"affine": False}, lambda: nn.BatchNorm2d(8, affine=False)),
    ("sync_batch_norm", 0, {}, lambda: nn.SyncBatchNorm(8)),
    ("sync_batch_norm", 1, {}, lambda: nn.SyncBatchNorm(8)),
    ("sync_batch_norm", 2, {}, lambda: nn.SyncBatchNorm(8)),
    ("ghost_batch_norm", 2, {"ghost_size": 3}, lambda: nn.BatchNorm2d(8)),
    ("layer_norm", 0, {}, lambda: nn.LayerNorm(8)),
    ("layer_norm", 1, {"eps": 0.1}, lambda: nn.LayerNorm(8, eps=0.1)),
    ("layer_norm", 1, {"affine": False}, lambda: nn.LayerNorm(8, elementwise_affine=False)),
    ("layer_norm_chw", 2, {}, lambda: nn.GroupNorm(1, 8)),
    ("layer_norm_chw", 1, {}, lambda: nn.GroupNorm(1, 8)),
    ("group_norm", 0, {"num_groups": 4}, lambda: nn.GroupNorm(4, 8)),
    ("group_norm", 1, {"num_groups": 4}, lambda: nn.GroupNorm(4, 8)),
    ("group_norm", 2, {"channels_per_group": 4}, lambda: nn.GroupNorm(2, 8)),
    ("instance_norm", 1, {}, lambda: nn.InstanceNorm1d(8, affine=True)),
    ("instance_norm", 2, {"affine": False}, lambda: nn.InstanceNorm2d(8)),
    (
        "instance_norm",
        2,
        {"track_running_stats": True},
        lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    ),
    (
        "instance_norm",
        1,
        {"track_running_stats": True},
        lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
    ),
    ("rms_norm", 0, {}, lambda: nn.RMSNorm(8, eps=1e-6)),
    ("rms_norm", 1, {"eps": 0.1}, lambda: nn.RMSNorm(8, eps=0.1)),
]
IDS = [f"{name}-{dims}-{params}" for name, dims, params, _ in COUNTERPARTS]


def draw(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("name", "dims", "params", "build"), COUNTERPARTS, ids=IDS)
def test_agrees_with_torch(name, dims, params, build):
    theirs = build().double()
    ours = NormFactory(name, params)(8, role="block", dims=dims).double()
    with torch.no_grad():
        for seed, parameter in enumerate(theirs.parameters()):
            parameter.copy_(draw(parameter.shape, seed))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)

    is_channels_last = dims == 1 and not isinstance(theirs, nn.LayerNorm | nn.RMSNorm)
    call = ChannelsSecond(theirs) if is_channels_last else theirs
    for seed in (10, 20):  # two batches: the buffers of the first enter those of the second
        x, g = draw(SHAPES[dims], seed), draw(SHAPES[dims], seed + 1)
        results = []
        for layer in (ours, call):
            inputs = [x.clone().requires_grad_(), *layer.parameters()]
            y = layer(inputs[0])
            results.append([y, *torch.autograd.grad(y, inputs, g)])
        for mine, torchs in zip(*results, strict=True):
            torch.testing.assert_close(mine, torchs, rtol=0, atol=1e-10)
        for (key, mine), torchs in zip(
            ours.state_dict().items(), theirs.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine, torchs, rtol=0, atol=1e-10, msg=key)
    torch.testing.assert_close(ours.eval()(x), call.eval()(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("build", [lambda: nn.Linear(6, 8), lambda: nn.Conv2d(3, 8, 3)])
def test_weight_norm_agrees_with_torch(build):
    ours = build().double()
    theirs = parametrizations.weight_norm(copy.deepcopy(ours))
    NormFactory("weight_norm").parametrize(ours, role="block")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = draw((2, 6) if isinstance(ours, nn.Linear) else (2, 3, 5, 5), 0)
    results = [
        [y := layer(x), *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]
        for layer in (ours, theirs)
    ]
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0, atol=1e-10)
