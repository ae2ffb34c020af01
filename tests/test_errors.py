"""The one line that bad input is told in."""

from __future__ import annotations

import pickle

from normexp.errors import UserError, choices_hint


def test_an_error_is_one_line_whatever_its_parts_hold():
    error = UserError("norm", "a\nb", "two\n  lines")
    assert str(error) == "norm=a b: two lines"


def test_an_error_survives_the_way_out_of_a_process():
    error = pickle.loads(pickle.dumps(UserError("norm", [1, 2], "one")))
    assert (error.key, error.value, error.expected) == ("norm", [1, 2], "one")
    assert str(error) == "norm=[1, 2]: one"


def test_close_matches_come_before_all_choices():
    hint = choices_hint("grup_norm", ["instance_norm", "group_norm"])
    assert hint.startswith("did you mean group_norm")
    assert hint.endswith("choices: group_norm, instance_norm")


def test_nothing_close_is_not_guessed():
    assert choices_hint("xyz", ["mlp"]) == "choices: mlp"
    assert choices_hint(7, []) == "there are no choices"
