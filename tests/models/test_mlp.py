"""mlp: sizes by hand, biases, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from normexp.errors import UserError
from normexp.models import build_model
from normexp.norms import NormFactory, describe_norm_layers


def build(norm="batch_norm", **params):
    return build_model(
        "mlp",
        params,
        input_shape=(1, 8, 8),
        num_classes=10,
        norm=NormFactory(norm),
        placement=None,
    )


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        # 64*128 + 2*128*128 weights, 3*2*128 gains and shifts, 128*10+10 in the classifier.
        ("batch_norm", 8192 + 32768 + 768 + 1290),
        # A gain only, but a bias in the linear layer: nothing else shifts.
        ("rms_norm", 8192 + 32768 + 768 + 1290),
        # No gain, a bias.
        ("no_norm", 8192 + 32768 + 384 + 1290),
    ],
)
def test_parameter_count(norm, count):
    assert sum(p.numel() for p in build(norm).parameters()) == count


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", "rms_norm", "no_norm"])
def test_bias_exactly_where_no_centring_norm_follows(norm):
    model = build(norm)
    has_bias = norm in ("rms_norm", "no_norm")
    assert [linear.bias is not None for linear in model.linears] == [has_bias] * 3
    assert model.classifier.bias is not None


def test_statistic_set_is_the_micro_batch():
    layers = describe_norm_layers(build(num_hidden_layers=2), (1, 8, 8), 4)
    assert [(layer.path, layer.statistic_set_size) for layer in layers] == [
        ("norms.0", 4),
        ("norms.1", 4),
    ]


def test_forward_is_the_formula():
    model = build("layer_norm", num_hidden_layers=1, width=4).double()
    x = torch.linspace(-1, 1, 2 * 64, dtype=torch.float64).reshape(2, 1, 8, 8)
    hidden = x.flatten(1) @ model.linears[0].weight.T
    normalized = (hidden - hidden.mean(1, keepdim=True)) / torch.sqrt(
        hidden.var(1, keepdim=True, correction=0) + 1e-5
    )
    expected = normalized.clamp(min=0) @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("key", ["num_hidden_layers", "width"])
def test_sizes_below_one_are_refused(key):
    with pytest.raises(UserError, match=rf"^model\.params\.{key}=0: "):
        build(**{key: 0})
