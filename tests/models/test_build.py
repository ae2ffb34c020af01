"""build_model: what it refuses, and that it leaves the global random state alone."""

from __future__ import annotations

import re

import pytest
import torch

from normexp.errors import UserError
from normexp.models import build_model
from normexp.norms import NormFactory


def build(name="cifar_resnet", params=None, norm="batch_norm", placement="res_post", roles=None):
    return build_model(
        name,
        params or {},
        input_shape=(1, 8, 8),
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
            "placement=none: builds no norm layer, so norm must be no_norm, not batch_norm",
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
