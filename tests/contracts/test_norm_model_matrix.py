"""Every norm in every model at every placement it admits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normexp.models import MODELS, build_model, initialize
from normexp.norms import NORMS, NormFactory, check_statistic_sets, describe_norm_layers

# Small, and every option away from its default.
MODEL_PARAMS = {"mlp": {"num_hidden_layers": 2, "width": 12}, "cifar_resnet": {"width": 4}}
MODEL_DIMS = {"mlp": 0, "cifar_resnet": 2}
# Norm layers: a norm in every hidden layer; stem + 2 a block + projections; 2 a block + final;
# stem + 2 a block.
NUM_LAYERS = {None: 2, "res_post": 9, "pre": 7, "post": 7, "none": 0}
LAYER_TYPES = {
    "no_norm": {"Identity"},
    "batch_norm": {"BatchNorm1d", "BatchNorm2d"},
    "group_norm": {"GroupNorm"},
    "layer_norm": {"LayerNorm"},
    "layer_norm_chw": {"GroupNorm"},
    "layer_norm_channel": {"LayerNormChannel", "LayerNorm"},
    "instance_norm": {"InstanceNorm2d"},
    "layer_norm_std_outside": {"LayerNormStdOutside"},
    "rms_norm": {"RMSNorm"},
    "partial_rms_norm": {"PartialRmsNorm"},
    "scale_norm": {"ScaleNorm"},
}
OPTIONS = {"eps": 0.125, "momentum": 0.625, "affine": False, "num_groups": 2, "fraction": 0.5}
PARAMS = {
    entry.name: {k: v for k, v in OPTIONS.items() if k in entry.parameters()} for entry in NORMS
}
CASES = [
    (model.name, norm.name, placement)
    for model in MODELS
    for norm in NORMS
    if MODEL_DIMS[model.name] in norm.card.dims
    for placement in model.card.placements or (None,)
    if placement != "none" or norm.name == "no_norm"
]


def build(model, norm, placement, shape, params=None):
    if params is None:
        # The defaults do not divide so few channels, or leave one of them.
        params = {"group_norm": {"num_groups": 2}, "partial_rms_norm": {"fraction": 0.5}}.get(norm)
    built = build_model(
        model,
        MODEL_PARAMS[model],
        input_shape=shape,
        num_classes=5,
        norm=NormFactory(norm, params or {}),
        placement=placement,
    )
    initialize(built, 0)
    return built


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)], ids=str)
@pytest.mark.parametrize(("model", "norm", "placement"), CASES)
def test_trains_one_micro_step(model, norm, placement, shape):
    built = build(model, norm, placement, shape)
    layers = describe_norm_layers(built, shape, 4)
    check_statistic_sets(layers)
    assert len(layers) == NUM_LAYERS[placement]
    assert {layer.name for layer in layers} <= {norm}
    assert all((layer.statistic_set_size is None) == (norm == "no_norm") for layer in layers)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *shape, generator=generator)
    logits = built(x)
    assert logits.shape == (4, 5)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(("model", "norm", "placement"), CASES)
def test_no_other_norm_remains_and_every_option_reaches_every_layer(model, norm, placement):
    built = build(model, norm, placement, (1, 8, 8), PARAMS[norm])
    tagged = [module for module in built.modules() if hasattr(module, "norm_record")]
    assert len(tagged) == NUM_LAYERS[placement]
    # Whatever looks like a norm is one that the factory built.
    looks = [m for m in built.modules() if "Norm" in type(m).__name__ or type(m) is nn.Identity]
    assert {id(module) for module in looks} == {id(module) for module in tagged}
    for module in tagged:
        assert type(module).__name__ in LAYER_TYPES[norm]
        assert module.norm_record.name == norm
        assert module.norm_record.params.items() >= PARAMS[norm].items()
        for option in ("eps", "momentum", "num_groups"):
            if option in PARAMS[norm]:
                assert getattr(module, option) == OPTIONS[option]
        assert list(module.parameters()) == []
