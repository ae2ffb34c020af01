"""Every norm in every model at every placement: it trains, or it is refused in one line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normexp.data import PAD_ID, TokenTask
from normexp.errors import UserError
from normexp.models import MODELS, PLACEMENTS, build_model, initialize, parameter_roles
from normexp.norms import NORMS, NormFactory, check_statistic_sets, describe_norm_layers

# Small, and other sizes than the default ones.
MODEL_PARAMS = {
    "mlp": {"num_hidden_layers": 2, "width": 12},
    "cifar_resnet": {"width": 4},
    "transformer": {
        "depth": 2,
        "width": 8,
        "num_heads": 2,
        "mlp_ratio": 2,
        "activation": "relu",
        "positions": "rotary",
    },
}
MODEL_DIMS = {"mlp": 0, "cifar_resnet": 2, "transformer": 1}
# Norm layers: one in every hidden layer; of a ResNet stem + 2 a block + projections; 2 a block +
# final; stem + 2 a block; of a Transformer one or two a branch, of which it has four, + final.
NUM_LAYERS = {
    ("mlp", None): 2,
    ("cifar_resnet", "res_post"): 9,
    ("cifar_resnet", "pre"): 7,
    ("cifar_resnet", "post"): 7,
    ("cifar_resnet", "rezero_pre"): 7,
    ("cifar_resnet", "layer_scale"): 7,
    ("transformer", "res_post"): 5,
    ("transformer", "pre"): 5,
    ("transformer", "post"): 4,
    ("transformer", "rezero_pre"): 5,
    ("transformer", "layer_scale"): 5,
    ("transformer", "sandwich"): 9,
    ("transformer", "deepnorm"): 4,
}
# Convolutions and linear layers whose weight belongs to a norm: all but the classifier.
NUM_WEIGHTS = {"mlp": 2, "cifar_resnet": 9, "transformer": 12}
OPTIONS = {"eps": 0.125, "momentum": 0.625, "affine": False, "num_groups": 2, "fraction": 0.5}
# The defaults do not divide so few channels or samples, or leave one of them.
FITTING = {"num_groups": 2, "fraction": 0.5, "ghost_size": 2}
# Gain and shift alone where no activation follows a norm directly.
WITHOUT_ACTIVATION = ("evo_norm_b0", "evo_norm_s0")
# Images by their shape; texts by what they ask for, as token ids of 4 samples.
TASKS = {
    "causal": TokenTask(9, is_language_modeling=True, has_padding=False),
    "padded": TokenTask(9, is_language_modeling=False, has_padding=True),
}
NUM_OUTPUTS = 9
LENGTH = 6
IMAGES = [(1, 8, 8), (3, 32, 32)]
SAMPLES = {"mlp": IMAGES, "cifar_resnet": IMAGES, "transformer": list(TASKS)}


def options_of(norm, options):
    return {k: v for k, v in options.items() if k in NORMS.get(norm).parameters()}


def is_weight_norm(norm):
    card = NORMS.get(norm).card
    return card.weight is not None and not any(card.statistic_sets.values())


def is_admitted(model, norm, placement):
    card = NORMS.get(norm).card
    if card.takes_condition or MODEL_DIMS[model] not in card.dims:
        return False
    if model == "transformer" and norm in WITHOUT_ACTIVATION:
        return False
    if placement is None or norm == "no_norm":
        return True
    if PLACEMENTS[placement].sets_weight_scale and card.weight is not None:
        return False
    return PLACEMENTS[placement].has_norm_layers or is_weight_norm(norm)


TRIPLES = [
    (model.name, norm.name, placement)
    for model in MODELS
    for norm in NORMS
    for placement in model.card.placements or (None,)
]
CASES = [triple for triple in TRIPLES if is_admitted(*triple)]
REFUSED = [triple for triple in TRIPLES if not is_admitted(*triple)]


def build(model, norm, placement, sample, options=FITTING):
    tokens = TASKS.get(sample)
    built = build_model(
        model,
        MODEL_PARAMS[model],
        input_shape=shape_of(sample),
        num_classes=NUM_OUTPUTS,
        norm=NormFactory(norm, options_of(norm, options)),
        placement=placement,
        tokens=tokens,
    )
    initialize(built, 0)
    return built


def shape_of(sample):
    return (LENGTH,) if sample in TASKS else sample


def draw(sample):
    """Return 4 inputs, as many targets, and the shape of the logits."""
    generator = torch.Generator().manual_seed(0)
    if sample not in TASKS:
        return torch.randn(4, *sample, generator=generator), torch.arange(4), (4, NUM_OUTPUTS)
    tokens = torch.randint(3, 9, (4, LENGTH), generator=generator)
    if sample == "causal":
        return tokens, tokens.roll(-1, 1), (4, LENGTH, NUM_OUTPUTS)
    valid = torch.arange(LENGTH) < torch.tensor([6, 3, 2, 5])[:, None]
    return torch.where(valid, tokens, PAD_ID), torch.arange(4), (4, NUM_OUTPUTS)


QUADRUPLES = [(*triple, sample) for triple in CASES for sample in SAMPLES[triple[0]]]


@pytest.mark.parametrize(("model", "norm", "placement", "sample"), QUADRUPLES)
def test_trains_one_micro_step(model, norm, placement, sample):
    built = build(model, norm, placement, sample)
    layers = describe_norm_layers(built, shape_of(sample), 4)
    check_statistic_sets(layers)
    assert len(layers) == NUM_LAYERS.get((model, placement), 0)
    assert {layer.name for layer in layers} <= {norm}

    x, targets, shape = draw(sample)
    logits = built(x)
    assert logits.shape == shape
    F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    # A branch that starts at zero passes nothing on to its convolutions yet.
    has_closed_branch = "skip" in parameter_roles(built).values() and placement != "layer_scale"
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # One gain for a whole layer does nothing where another such norm follows.
        assert parameter.grad.any() or has_closed_branch or parameter.numel() == 1, name


@pytest.mark.parametrize(("model", "norm", "placement"), CASES)
def test_no_other_norm_remains_and_every_option_reaches_every_layer(model, norm, placement):
    options = options_of(norm, OPTIONS)
    built = build(model, norm, placement, SAMPLES[model][0], options)
    tagged = [module for module in built.modules() if hasattr(module, "norm_record")]
    assert len(tagged) == NUM_LAYERS.get((model, placement), 0)
    # Whatever looks like a norm is one that the factory built, or a part of one.
    looks = [m for m in built.modules() if "norm" in type(m).__name__.lower()]
    looks = [m for m in looks if "parametriz" not in type(m).__module__]
    parts = {id(part) for module in tagged for part in module.modules()}
    weights = [m for m in built.modules() if hasattr(m, "weight_norm_record")]
    parts |= {id(part) for module in weights for part in module.modules()}
    assert {id(module) for module in looks} <= parts
    for module in tagged:
        assert module.norm_record.name == norm
        assert module.norm_record.params.items() >= options.items()
        for option in ("eps", "momentum", "num_groups"):
            if option in options and hasattr(module, option):
                assert getattr(module, option) == OPTIONS[option]
        if "affine" in options:
            assert not {"weight", "bias"} & {name for name, _ in module.named_parameters()}
    has_weight_norm = NORMS.get(norm).card.weight is not None
    assert len(weights) == (NUM_WEIGHTS[model] if has_weight_norm else 0)
    assert all(module.weight_norm_record.name == norm for module in weights)


@pytest.mark.parametrize(("model", "norm", "placement"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(model, norm, placement):
    with pytest.raises(UserError, match=r"^(norm|placement)=[^\n]+$"):
        build(model, norm, placement, SAMPLES[model][0])


def test_every_layer_type_that_looks_like_a_norm_is_found():
    # The search by name above must know each of our classes that is one.
    layer = NormFactory("batch_renorm")(4, role="block", dims=2)
    assert "norm" in type(layer).__name__.lower()
    assert "norm" in nn.SyncBatchNorm.__name__.lower()
