"""NormFactory: which norm with which options for which role, and what it refuses."""

from __future__ import annotations

import pytest
from torch import nn

from normexp.errors import UserError
from normexp.norms import NormFactory, NormRecord


def test_layer_carries_a_record_with_every_option():
    layer = NormFactory("batch_norm", {"momentum": 0.3})(8, role="stem", dims=2)
    params = {"eps": 1e-5, "affine": True, "momentum": 0.3}
    assert layer.norm_record == NormRecord("batch_norm", "stem", params)


def test_a_role_may_have_another_norm():
    roles = {"stem": {"name": "batch_norm", "params": {"eps": 0.5}}, "final": {"name": "no_norm"}}
    factory = NormFactory("group_norm", {"num_groups": 2}, roles)
    stem, block = (factory(8, role=role, dims=2) for role in ("stem", "block"))
    assert (type(stem), stem.eps) == (nn.BatchNorm2d, 0.5)
    assert (block.norm_record.name, block.num_groups) == ("group_norm", 2)
    assert factory.is_centring("block")
    assert not factory.is_centring("final")
    assert factory.norm_names() == {"batch_norm", "group_norm", "no_norm"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("grup_norm",), "norm=grup_norm: did you mean group_norm"),
        (("group_norm", {"num_group": 4}), "norm.params.num_group=4: norm group_norm has no such"),
        (("batch_norm", {"eps": [1e-5]}), "norm.params.eps=[1e-05]: a value of type float"),
        (("batch_norm", {"dims": 2}), "norm.params.dims=2: norm batch_norm has no such"),
        (("no_norm", {}, {"stm": {"name": "no_norm"}}), "norm.roles.stm="),
        (("no_norm", {}, {"stem": "batch_norm"}), "norm.roles.stem=batch_norm: a mapping"),
        (("no_norm", {}, {"stem": {"name": "bn"}}), "norm.roles.stem=bn: "),
        (
            ("no_norm", {}, {"stem": {"name": "batch_norm", "params": {"epz": 1}}}),
            "norm.roles.stem.params.epz=1: norm batch_norm has no such parameter; did you mean eps",
        ),
    ],
)
def test_bad_choices_are_named_in_one_line(arguments, line):
    with pytest.raises(UserError) as caught:
        NormFactory(*arguments)
    assert str(caught.value).startswith(line)


def test_an_error_while_building_names_the_role():
    roles = {"stem": {"name": "group_norm", "params": {"num_groups": 3}}}
    with pytest.raises(UserError, match=r"^norm\.roles\.stem\.params\.num_groups=3: "):
        NormFactory("no_norm", {}, roles)(8, role="stem", dims=2)
