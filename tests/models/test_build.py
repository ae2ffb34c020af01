"""build_model: what it refuses, and that it leaves the global random state alone."""

from __future__ import annotations

import re

import pytest
import torch

from normexp.errors import UserError
from normexp.models import build_model
from normexp.norms import NormFactory


def build(
    name="cifar_resnet",
    params=None,
    norm="batch_norm",
    placement="res_post",
    roles=None,
    shape=(1, 8, 8),
):
    if name == "mlp" and placement == "res_post":
        placement = None
    return build_model(
        name,
        params or {},
        input_shape=shape,
        num_classes=10,
        norm=NormFactory(norm, {}, roles or {}),
        placement=placement,
    )


NO_NORM = {"name": "no_norm"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"name": "cifar_resnt"}, "model=cifar_resnt: did you mean cifar_resnet?"),
        ({"params": {"dept": 8}}, "model.params.dept=8: model cifar_resnet has no such parameter"),
        ({"params": {"norm": 8}}, "model.params.norm=8: model cifar_resnet has no such parameter"),
        ({"params": {"width": [16]}}, "model.params.width=[16]: a value of type int is needed"),
        ({"params": {"shortcut": "pad"}}, "model.params.shortcut=pad: a value of type projection"),
        ({"placement": "res_pst"}, "placement=res_pst: did you mean res_post"),
        ({"placement": None}, "placement=null: "),
        ({"name": "mlp", "placement": "pre"}, "placement=pre: model mlp has no residual branch"),
        ({"placement": "none"}, "placement=none: builds no norm layer, so norm must be no_norm"),
        (
            {"placement": "none", "norm": "no_norm", "roles": {"stem": {"name": "batch_norm"}}},
            "placement=none: builds no norm layer, so norm must be no_norm or a norm of weights "
            "alone, not batch_norm",
        ),
        (
            {"placement": "rezero", "norm": "weight_standardization"},
            "placement=rezero: builds no norm layer, so norm must be no_norm or a norm of weights "
            "alone, not weight_standardization",
        ),
        (
            {"placement": "skip_init", "norm": "dynamic_tanh"},
            "placement=skip_init: builds no norm layer, so norm must be no_norm or a norm of",
        ),
        (
            {"placement": "fixup", "norm": "weight_norm"},
            "placement=fixup: builds no norm layer, so norm must be no_norm, not weight_norm",
        ),
        (
            {"placement": "none", "norm": "weight_norm", "roles": {"final": NO_NORM}},
            "norm.roles.final=no_norm: model cifar_resnet has no norm layer of this role here; "
            "its roles are block, downsample, stem",
        ),
        (
            {"norm": "scaled_weight_standardization", "name": "mlp", "shape": (1, 1, 1)},
            "norm=scaled_weight_standardization: 2 or more products an output are needed",
        ),
        ({"norm": "layer_norm"}, "norm=layer_norm: not defined for images"),
        (
            {"placement": "pre", "roles": {"downsample": NO_NORM}},
            "norm.roles.downsample=no_norm: model cifar_resnet has no norm layer of this role",
        ),
    ],
)
def test_bad_choices_are_named_in_one_line(arguments, line):
    with pytest.raises(UserError, match="^" + re.escape(line)) as caught:
        build(**arguments)
    assert "\n" not in str(caught.value)


def test_building_leaves_the_global_random_state_alone():
    state = torch.random.get_rng_state()
    build()
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("norm", ["weight_norm", "scaled_weight_standardization"])
@pytest.mark.parametrize("placement", ["none", "rezero", "skip_init"])
def test_norms_of_weights_alone_go_where_no_norm_layer_is(norm, placement):
    model = build(norm=norm, placement=placement)
    records = [m.weight_norm_record for m in model.modules() if hasattr(m, "weight_norm_record")]
    assert {record.name for record in records} == {norm}
    # Stem, two a block, two projections; not the classifier.
    assert len(records) == 9
    assert not hasattr(model.classifier, "parametrizations")


def test_one_role_may_have_a_norm_of_weights_and_another_be_spared():
    def roles(**arguments):
        return {
            record.role
            for module in build(**arguments).modules()
            if (record := getattr(module, "weight_norm_record", None)) is not None
        }

    weight_norm = {"name": "weight_norm"}
    assert roles(placement="none", norm="no_norm", roles={"stem": weight_norm}) == {"stem"}
    assert roles(placement="pre", roles={"downsample": weight_norm}) == {"downsample"}
    spared = roles(placement="pre", norm="weight_norm", roles={"downsample": NO_NORM})
    assert spared == {"stem", "block"}


@pytest.mark.parametrize("norm", ["weight_norm", "weight_standardization"])
def test_an_mlp_has_the_norm_on_all_linear_layers_but_the_classifier(norm):
    model = build("mlp", norm=norm)
    assert all(hasattr(linear, "weight_norm_record") for linear in model.linears)
    assert not hasattr(model.classifier, "weight_norm_record")
