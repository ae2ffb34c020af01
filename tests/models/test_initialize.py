"""Initial weights depend on the seed, the name and the shape, and on nothing else."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from normexp.models import build_model, initialize, parameter_roles
from normexp.norms import NORMS, NormFactory

IMAGE_NORMS = [e.name for e in NORMS if 2 in e.card.dims and not e.card.takes_condition]
WEIGHT_NORMS = [entry.name for entry in NORMS if entry.card.weight is not None]


def build(norm="batch_norm", placement="res_post", seed=0, name="cifar_resnet", **params):
    model = build_model(
        name,
        params,
        input_shape=(1, 8, 8),
        num_classes=10,
        norm=NormFactory(norm),
        placement=placement,
    )
    initialize(model, seed)
    return model


def weights(model):
    """Return the weights by their plain names: the raw ones where a norm acts on them."""
    roles = parameter_roles(model)
    return {
        re.sub(r"parametrizations\.weight\.original\d?$", "weight", name): p
        for name, p in model.named_parameters()
        if roles[name] == "weight"
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_all_norms_and_placements_share_every_weight():
    reference = weights(build())
    # Stem, 2 a block, 2 projections, the classifier.
    assert len(reference) == 10
    for norm in IMAGE_NORMS:
        for placement in ("res_post", "pre", "post", "rezero_pre", "layer_scale"):
            assert_same(weights(build(norm, placement)), reference)
    for placement in ("none", "rezero", "skip_init"):
        assert_same(weights(build("no_norm", placement)), reference)


@pytest.mark.parametrize("name", ["cifar_resnet", "mlp"])
def test_weight_norm_starts_from_the_effective_weights_of_any_norm(name):
    placement = None if name == "mlp" else "res_post"
    reference = build("batch_norm", placement, name=name).double()
    model = build("weight_norm", placement, name=name).double()
    initialize(reference, 3)
    initialize(model, 3)
    compared = 0
    for path, module in reference.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            effective = model.get_submodule(path).weight
            torch.testing.assert_close(effective, module.weight, rtol=1e-14, atol=0)
            compared += 1
    assert compared == (4 if name == "mlp" else 10)


@pytest.mark.parametrize("norm", WEIGHT_NORMS)
def test_parameters_of_a_norm_of_weights_have_its_role(norm):
    model = build(norm)
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    card = NORMS.get(norm).card.weight
    for name, role in roles.items():
        if "parametrizations" in name:
            assert role == ("norm" if name.split(".")[-1] in card.parameters else "weight"), name
    assert list(roles.values()).count("weight") == 10
    assert roles["classifier.weight"] == "weight"


def test_initializing_again_gives_the_same_model():
    for norm in WEIGHT_NORMS:
        model = build(norm)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        initialize(model, 1)
        initialize(model, 0)
        assert_same(model.state_dict(), before)


def test_fixup_scales_the_draws_that_all_placements_share():
    reference, model = weights(build("no_norm", "none")), build("no_norm", "fixup")
    scales = {"conv1": 3**-0.5, "conv2": 0.0}
    for name, weight in weights(model).items():
        layer = name.split(".")[-2]
        scale = 0.0 if name == "classifier.weight" else scales.get(layer, 1.0)
        torch.testing.assert_close(weight, reference[name] * scale, rtol=1e-6, atol=0)


def test_initial_scale_of_a_normalized_weight_is_the_layers_own():
    model = nn.Sequential(nn.Linear(5, 4))
    NormFactory("weight_norm").parametrize(model[0], role="block")
    plain = nn.Sequential(nn.Linear(5, 4))
    vars(model[0])["initial_scale"] = 0.25
    initialize(model, 0)
    initialize(plain, 0)
    torch.testing.assert_close(model[0].weight, plain[0].weight / 4)


def test_all_norms_of_an_mlp_share_every_weight():
    reference = weights(build(name="mlp", placement=None))
    for norm in ("layer_norm", "no_norm", "rms_norm", "group_norm"):
        assert_same(weights(build(norm, None, name="mlp")), reference)


def test_another_seed_gives_other_weights():
    one, other = weights(build(seed=0)), weights(build(seed=1))
    assert not any(torch.equal(value, other[name]) for name, value in one.items())


def test_weights_of_one_seed_differ_from_layer_to_layer():
    model = build()
    assert not torch.equal(model.stages[0][0].conv1.weight, model.stages[0][0].conv2.weight)


def test_order_of_construction_and_global_seed_do_not_matter():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.a = nn.Linear(3, 4), nn.Linear(5, 6)

    class Forward(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(3, 4)

    torch.manual_seed(1)
    one = Forward()
    torch.manual_seed(2)
    other = Reversed()
    initialize(one, 0)
    initialize(other, 0)
    assert_same(dict(sorted(one.named_parameters())), dict(sorted(other.named_parameters())))


@pytest.mark.parametrize("placement", ["res_post", "pre"])
def test_standard_deviation_is_he_in_fan_in_form(placement):
    model = build(placement=placement, width=64)
    for name, weight in weights(model).items():
        expected = math.sqrt(2.0 / weight[0].numel())
        # The sample deviation of k normal draws has a relative error of 1 / sqrt(2k): 5 of them.
        tolerance = 5 / math.sqrt(2 * weight.numel())
        assert weight.std().item() == pytest.approx(expected, rel=tolerance), name


def test_biases_and_shifts_are_zero_and_gains_one():
    model = build("batch_norm", "pre")
    roles = parameter_roles(model)
    for name, parameter in model.named_parameters():
        if roles[name] != "weight":
            expected = float(roles[name] == "norm" and name.endswith("weight"))
            assert (parameter == expected).all(), name


def test_zero_initialized_last_gains_stay_zero():
    model = build(zero_init_last_gain=True)
    for stage in model.stages:
        assert not stage[0].norm2.weight.any()
        assert (stage[0].norm1.weight == 1).all()


def test_other_precisions_are_the_rounded_draw():
    single, double = build(), build().double()
    initialize(double, 0)
    for name, weight in weights(double).items():
        assert torch.equal(weight.float(), weights(single)[name])
        assert not torch.equal(weight, weight.float().double())


def test_initializing_leaves_the_global_random_state_alone():
    state = torch.random.get_rng_state()
    build()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_parameter_without_a_rule_is_an_error():
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="scale"):
        initialize(model, 0)


def test_every_parameter_has_one_role_from_its_owner():
    model = build("group_norm", "pre")
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    # 3 blocks of 2 norms and a final one, gain and shift each; 10 weights; biases of the stem, 3
    # conv2, 2 projections and the classifier.
    counts = {role: list(roles.values()).count(role) for role in ("norm", "weight", "bias")}
    assert counts == {"norm": 14, "weight": 10, "bias": 7}
    owners = dict(model.named_modules())
    for name, role in roles.items():
        is_norm = isinstance(owners[name.rpartition(".")[0]], nn.GroupNorm)
        assert (role == "norm") == is_norm


def test_parameters_below_a_norm_layer_are_the_norms():
    layer = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    tagged = NormFactory("no_norm")(4, role="block", dims=2)
    vars(layer)["norm_record"] = tagged.norm_record
    assert parameter_roles(nn.Sequential(layer, nn.Linear(2, 2))) == {
        "0.0.weight": "norm",
        "0.0.bias": "norm",
        "0.1.weight": "norm",
        "0.1.bias": "norm",
        "1.weight": "weight",
        "1.bias": "bias",
    }
