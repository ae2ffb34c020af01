"""scaled_weight_standardization against its formula in NumPy, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle.weights import scaled_weight_standardization
from torch import nn

from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.scaled_weight_standardization import (
    build_scaled_weight_standardization,
    parametrize_weight,
)


@given(
    shape=st.sampled_from([(3, 4), (5, 2), (4, 2, 3, 3), (1, 6, 1, 1)]),
    # The last bound is above the sum of squares of the small weights below.
    weight_eps=st.sampled_from([1e-4, 5.0]),
    activation_gain=st.sampled_from(["relu", "none"]),
    scale=st.sampled_from([0.1, 3.0]),
    seed=st.integers(0, 9),
)
def test_matches_the_formula(shape, weight_eps, activation_gain, scale, seed):
    rng = np.random.default_rng(seed)
    weight, gain = rng.normal(0.5, scale, shape), rng.normal(1.0, 0.5, shape[0])
    layer = (
        nn.Conv2d(shape[1], shape[0], shape[2], bias=False)
        if len(shape) == 4
        else nn.Linear(shape[1], shape[0])
    )
    parametrize_weight(layer.double(), weight_eps=weight_eps, activation_gain=activation_gain)
    layer.weight = torch.from_numpy(weight)
    with torch.no_grad():
        layer.parametrizations.weight[0].gain.copy_(torch.from_numpy(gain))
    expected = scaled_weight_standardization(
        weight, gain, weight_eps, relu=activation_gain == "relu"
    )
    np.testing.assert_allclose(layer.weight.detach(), expected, rtol=0, atol=1e-10)


def test_the_gain_is_one_an_output_and_starts_at_one():
    layer = NormFactory("scaled_weight_standardization").parametrize(
        nn.Conv2d(3, 4, 3), role="stem"
    )
    gain = layer.parametrizations.weight[0].gain
    assert torch.equal(gain, torch.ones(4))
    assert list(layer.state_dict()) == [
        "bias",
        "parametrizations.weight.original",
        "parametrizations.weight.0.gain",
    ]


def test_variance_passes_through_relu_and_layer():
    torch.manual_seed(0)
    layer = parametrize_weight(nn.Linear(512, 512, bias=False))
    y = layer(F.relu(torch.randn(4096, 512)))
    # Mean over 512 outputs of the variance over 4096 samples.
    assert y.var(0).mean().item() == pytest.approx(1.0, abs=0.02)


def test_its_place_in_the_network_holds_the_identity():
    layer = build_scaled_weight_standardization(8, dims=1)
    assert type(layer) is nn.Identity
    with pytest.raises(UserError, match=r"^norm=scaled_weight_standardization: .*dims=3"):
        build_scaled_weight_standardization(8, dims=3)


def test_unknown_activations_are_refused():
    with pytest.raises(UserError, match=r"activation_gain=gelu: a value of type relu \| none"):
        NormFactory("scaled_weight_standardization", {"activation_gain": "gelu"})
