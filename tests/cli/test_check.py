"""The verb check: what a norm declares, and the faults that experiments find, in plain words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import normexp

from normexp.contract import CHECKS

PLANTED = Path(__file__).parents[1] / "contracts" / "planted_norms.py"


@pytest.fixture
def plugin(tmp_path):
    """A copy of the planted norms: a file that this process has not imported yet."""
    return shutil.copy(PLANTED, tmp_path)


def check_json(name, *arguments):
    outcome = normexp("check", name, *arguments, "--json")
    assert outcome.err == ""
    return outcome.code, {row["check"]: row for row in json.loads(outcome.out)}


# What a user is told, by the check that finds it; every other check must pass.
FAULTS = {
    "wrong_axis": {
        "statistic_sets": "the card says statistics over channel, so that an output depends on 8 "
        "of the inputs, across channel; found on shape [6, 5, 8]: an output depends on 5 of the "
        "inputs, across position",
        "statistic_set_size": "channel has 8 elements on shape [6, 5, 8], but an output depends on "
        "5 inputs",
        "mixes_positions": "mixes_positions=False is declared, but on shape [6, 5, 8] an output "
        "depends on 5 of the inputs, across position",
        "statistic_parts": "found on shape [6, 5, 8] none over channel; statistic_sets: the card "
        "says statistics over channel; found on shape [6, 5, 8] also one over position",
        "single_value": "single_value=zero is declared; found finite where channel has one value",
    },
    "transposed_axes": {
        "dims": "though not on [6, 6, 6]: it takes one axis for another",
    },
    "ignores_eps": {
        "eps_place": "eps_place=inside_sqrt is declared; found on an input [6, 5, 8]: the option "
        "eps has no effect at all",
    },
    "updates_in_eval": {
        "evaluation_is_pure": "evaluation changes running_mean; only training may",
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name, plugin):
    code, rows = check_json(name, "--plugin", plugin)
    assert code == 1
    found = {key: row["message"] for key, row in rows.items() if row["verdict"] == "fault"}
    expected = FAULTS[name]
    assert found.keys() == expected.keys(), found
    for check, message in expected.items():
        assert message in found[check]


def test_the_wrong_axis_goes_unnoticed_only_where_the_extents_agree(plugin):
    _, rows = check_json("wrong_axis", "--plugin", plugin)
    assert "[6, 5, 8]" in rows["statistic_set_size"]["message"]
    assert "[6, 6, 6]" not in rows["statistic_set_size"]["message"]


def test_faults_are_printed_below_their_check(plugin):
    outcome = normexp("check", "ignores_eps", "--plugin", plugin)
    assert (outcome.code, outcome.err) == (1, "")
    lines = outcome.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("FAULT  eps_place"))
    assert lines[at + 1].strip().endswith("the option eps has no effect at all")
    assert lines[-1] == "ignores_eps: 1 fault"


@pytest.mark.parametrize("name", ["sound", "layer_norm", "weight_norm"])
def test_a_sound_norm_is_confirmed(name, plugin):
    outcome = normexp("check", name, "--plugin", plugin)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[-1] == f"{name}: experiments confirm the card"
    assert "FAULT" not in outcome.out
    for check in CHECKS:
        assert f" {check} " in outcome.out
    for field in ("formula", "statistic_sets", "single_value", "kernel_cuda", "weight"):
        assert f" {field}" in outcome.out


def test_an_option_makes_a_norm_fit_the_small_inputs(plugin):
    code, rows = check_json("many_groups", "--plugin", plugin)
    assert code == 1
    assert "16 groups do not fit" in rows["dims"]["message"]
    assert rows["divisor"]["message"] == "the layer cannot be called, see dims"
    code, rows = check_json("many_groups", "--plugin", plugin, "--option", "groups=1")
    assert code == 0, rows


def test_an_option_goes_before_the_small_one():
    # One channel a group of 4 to 8 is instance norm, and no longer over several channels.
    code, rows = check_json("group_norm", "--option", "num_groups=1")
    assert code == 0, rows


def test_json_has_one_object_a_check():
    code, rows = check_json("no_norm")
    assert code == 0
    assert list(rows) == list(CHECKS)
    for row in rows.values():
        assert set(row) == {"check", "fields", "verdict", "message"}
        assert row["verdict"] in {"pass", "does not apply"}
        assert bool(row["message"]) == (row["verdict"] == "does not apply")
    assert rows["divisor"]["fields"] == ["divisor"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["grup_norm"], "normexp: norm=grup_norm: did you mean group_norm"),
        (["group_norm", "--plugin", "gone.py"], "normexp: plugins=gone.py: there is no such file"),
        ([], "normexp: name=: A norm"),
        (["layer_norm", "--option", "eps"], "normexp: option=eps: name=value is needed"),
        (["layer_norm", "--option", "eps=big"], "normexp: option.eps=big: a value of type float"),
        (["layer_norm", "--option", "eps=-1"], "normexp: option.eps=-1: a number above 0"),
        (["batch_norm", "--option", "momentum=2"], "normexp: option.momentum=2: the weight of"),
        (["layer_norm", "--option", "ep=1"], "normexp: option.ep=1: norm layer_norm has no such"),
    ],
)
def test_bad_input_is_one_line(arguments, line):
    outcome = normexp("check", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(line)
    assert len(outcome.err.splitlines()) == 1


def test_a_plugin_that_cannot_be_imported_is_one_line(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import nothing_of_the_kind\n")
    outcome = normexp("check", "group_norm", "--plugin", str(file))
    assert (outcome.code, outcome.out) == (2, "")
    assert "ModuleNotFoundError: No module named 'nothing_of_the_kind'" in outcome.err
    assert len(outcome.err.splitlines()) == 1
