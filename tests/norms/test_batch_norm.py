"""batch_norm against its formula in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import batch as oracle
from torch import nn

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.batch_norm import CARD, build_batch_norm

GAIN = np.linspace(0.5, 2.0, 8)
SHIFT = np.linspace(-1.0, 1.0, 8)


def with_affine(layer):
    """Give the layer a gain and shift that differ by channel, in float64."""
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(GAIN))
        if hasattr(layer, "bias"):
            layer.bias.copy_(torch.from_numpy(SHIFT))
    return layer


@pytest.mark.parametrize(
    ("dims", "shape"), [(2, (4, 8, 3, 5)), (1, (4, 3, 8)), (0, (6, 8))], ids=str
)
def test_training_matches_the_formula(dims, shape):
    x = np.random.default_rng(0).normal(3.0, 2.0, shape)
    expected = oracle.batch_norm(x, GAIN, SHIFT, 1e-3)
    layer = with_affine(build_batch_norm(8, dims=dims, eps=1e-3))
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


def test_evaluation_uses_the_running_statistics():
    layer = build_batch_norm(8, dims=0, momentum=None).double()
    x = np.random.default_rng(1).normal(3.0, 2.0, (16, 8))
    layer(torch.from_numpy(x))
    other = np.random.default_rng(2).normal(size=(1, 8))
    expected = (other - x.mean(0)) / np.sqrt(x.var(0, ddof=1) + 1e-5)
    actual = layer.eval()(torch.from_numpy(other)).detach()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dims", "layer"), [(0, nn.BatchNorm1d), (2, nn.BatchNorm2d)])
def test_features_and_images_have_torchs_own_layer(dims, layer):
    assert type(build_batch_norm(8, dims=dims)) is layer


def test_sequences_are_features_of_all_positions_without_a_copy():
    x = torch.from_numpy(np.random.default_rng(0).normal(3.0, 2.0, (4, 3, 8)))
    sequences, features = build_batch_norm(8, dims=1).double(), nn.BatchNorm1d(8).double()
    assert torch.equal(sequences(x).flatten(0, 1), features(x.flatten(0, 1)))
    state = features.state_dict()
    assert all(torch.equal(state[key], value) for key, value in sequences.state_dict().items())


def test_state_is_declared():
    assert tuple(name for name, _ in build_batch_norm(8, dims=2).named_buffers()) == CARD.state


def test_momentum_null_is_admitted():
    assert NormFactory("batch_norm", {"momentum": None})(8, role="stem", dims=2).momentum is None


def test_affine_false_has_no_parameters():
    layer = build_batch_norm(8, dims=2, affine=False)
    assert list(layer.parameters()) == []


def test_affine_is_one_gain_and_one_shift_a_channel():
    layer = build_batch_norm(8, dims=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (8,),
        "bias": (8,),
    }


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=batch_norm: .*dims=3"):
        build_batch_norm(8, dims=3)
