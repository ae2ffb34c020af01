"""The verb list: for people and for programs."""

from __future__ import annotations

import json

import pytest
from command_line import normexp

from normexp.cli.list import KINDS
from normexp.config.choices import list_choices

GROUPS = {
    "norms": "norm",
    "models": "model",
    "data": "data",
    "placements": "placement",
    "experiments": "experiment",
}


def test_every_kind_is_tested():
    assert set(KINDS) == set(GROUPS)


@pytest.mark.parametrize("kind", GROUPS)
def test_every_choice_of_the_configuration_is_listed(kind):
    outcome = normexp("list", kind, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    rows = json.loads(outcome.out)
    assert sorted(row["name"] for row in rows) == list_choices(GROUPS[kind])
    assert len({frozenset(row) for row in rows}) == 1, "rows with different keys"


@pytest.mark.parametrize("kind", GROUPS)
def test_a_person_sees_every_name_unbroken(kind):
    outcome = normexp("list", kind)
    assert (outcome.code, outcome.err) == (0, "")
    for name in list_choices(GROUPS[kind]):
        assert name in outcome.out
    # A column more than a terminal holds would squeeze the others.
    assert "source" not in "".join(outcome.out.splitlines()[:3])
