"""Registries: found by import, choices in every error, parameters checked by their types."""

from __future__ import annotations

import sys
from typing import Any, Literal

import pytest

from normexp.errors import UserError
from normexp.registry import Registry


def build_thing(
    size: int,
    *,
    width: int,
    eps: float = 1e-5,
    is_on: bool = True,
    mode: Literal["fast", "exact"] = "fast",
    tags: list[str] | None = None,
    _hidden: int = 0,
) -> Any:
    return size, width, eps, is_on, mode, tags


@pytest.fixture
def things() -> Registry[str]:
    registry: Registry[str] = Registry("thing")
    registry.register("first_thing", "its card")(build_thing)
    return registry


def test_an_entry_is_what_was_registered(things):
    entry = things.get("first_thing")
    assert (entry.kind, entry.name, entry.card) == ("thing", "first_thing", "its card")
    assert entry.build is build_thing
    assert [found.name for found in things] == ["first_thing"]
    assert "first_thing" in things
    assert "other" not in things


def test_parameters_are_the_public_keyword_only_ones(things):
    names = ["width", "eps", "is_on", "mode", "tags"]
    assert list(things.get("first_thing").parameters()) == names


def test_an_unknown_name_is_told_with_key_and_choices(things):
    with pytest.raises(UserError) as caught:
        things.get("frst_thing", key="model.thing")
    line = "model.thing=frst_thing: did you mean first_thing? choices: first_thing"
    assert str(caught.value) == line
    with pytest.raises(UserError, match=r"^thing=x: "):
        things.get("x")


def test_a_name_cannot_be_taken_twice(things):
    def build_other(*, width: int) -> int:
        return width

    with pytest.raises(ValueError, match="registered twice"):
        things.register("first_thing", "card")(build_other)
    # The same builder again is a module that was imported again.
    things.register("first_thing", "card")(build_thing)


@pytest.mark.parametrize(
    "params",
    [
        {"width": 1, "eps": 1, "is_on": False, "mode": "exact", "tags": ["a"]},
        {"width": 0, "tags": None},
        {"width": 3, "tags": []},
    ],
)
def test_fitting_parameters_pass(things, params):
    things.get("first_thing").check_params(params, key="thing.params")


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (
            {"width": 1, "epz": 2},
            "epz=2: thing first_thing has no such parameter; did you mean eps",
        ),
        ({"width": 1, "_hidden": 2}, "_hidden=2: thing first_thing has no such parameter"),
        ({"width": 1, "size": 2}, "size=2: thing first_thing has no such parameter"),
        ({}, "width=: thing first_thing needs this parameter"),
        ({"width": "8"}, "width=8: a value of type int is needed"),
        ({"width": 8.0}, "width=8.0: a value of type int is needed"),
        ({"width": True}, "width=True: a value of type int is needed"),
        ({"width": [8]}, "width=[8]: a value of type int is needed"),
        ({"width": None}, "width=None: a value of type int is needed"),
        ({"width": 1, "eps": "1e-5"}, "eps=1e-5: a value of type float is needed"),
        ({"width": 1, "eps": True}, "eps=True: a value of type float is needed"),
        ({"width": 1, "is_on": 1}, "is_on=1: a value of type bool is needed"),
        ({"width": 1, "mode": "slow"}, "mode=slow: a value of type fast | exact is needed"),
        ({"width": 1, "tags": "a"}, "tags=a: a value of type list[str] | null is needed"),
        ({"width": 1, "tags": [1]}, "tags=[1]: a value of type list[str] | null is needed"),
    ],
)
def test_bad_parameters_are_told_with_key_value_and_type(things, params, line):
    with pytest.raises(UserError) as caught:
        things.get("first_thing").check_params(params, key="thing.params")
    assert str(caught.value).startswith(f"thing.params.{line}")


def test_what_normexp_fills_in_is_no_parameter(things):
    entry = things.get("first_thing")
    entry.check_params({}, key="thing.params", reserved=frozenset({"width"}))
    with pytest.raises(UserError, match="no such parameter"):
        entry.check_params({"width": 1}, key="thing.params", reserved=frozenset({"width"}))


def test_public_modules_of_a_package_register_themselves_on_first_use(tmp_path, monkeypatch):
    package = tmp_path / "shop_of_things"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_shelf.py").write_text(
        "from normexp.registry import Registry\nTHINGS = Registry('thing', 'shop_of_things')\n"
    )
    for stem in ("first", "second", "_private"):
        (package / f"{stem}.py").write_text(
            "from shop_of_things._shelf import THINGS\n"
            f"@THINGS.register('{stem}', None)\ndef build_{stem}(): pass\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    from shop_of_things._shelf import THINGS

    assert "shop_of_things.first" not in sys.modules
    assert THINGS.names() == ["first", "second"]


def test_a_card_of_another_kind_is_refused():
    registry: Registry[str] = Registry("thing", card_type=str)
    with pytest.raises(ValueError, match="thing 'bare' needs a card: a str, not NoneType"):
        registry.register("bare", None)
    registry.register("first_thing", "its card")(build_thing)
