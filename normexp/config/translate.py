"""Hydra's and OmegaConf's complaints as one line: key, value, what would be right."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from normexp.config.choices import list_choices, list_params
from normexp.config.schema import CellConfig
from normexp.errors import UserError, choices_hint

_LISTS = ("seeds", "probes", "plugins", "logger")
_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def translate(error: Exception, overrides: Sequence[str] = ()) -> UserError:
    """Return a complaint as an error of the user's input.

    Args:
        error: What Hydra or OmegaConf raised.
        overrides: The command line's, for the value at fault.
    """
    text = "\n".join(str(link) for link in _chain(error))
    for read in (
        _missing_choice,
        _several_values,
        _role_without_name,
        _value_of_group,
        _wrong_type,
        _unknown_key,
        _unset_group,
    ):
        found = read(text, overrides)
        if found is not None:
            return found
    return UserError("command line", *_unreadable(text))


def _missing_choice(text: str, _: Sequence[str]) -> UserError | None:
    found = re.search(r"Could not (?:find|load) '([\w/]+)/([^'/]*)'", text)
    if found is None:
        return None
    options = re.search(rf"Available options in '{found[1]}':((?:\n\t.*)*)", text)
    choices = options[1].split() if options else list_choices(found[1])
    return UserError(found[1], found[2], choices_hint(found[2], choices))


def _several_values(text: str, _: Sequence[str]) -> UserError | None:
    found = re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", text)
    if found is None:
        return None
    key, values = found[1], found[2]
    if key in _LISTS:
        return UserError(key, values, f"a list is written {key}=[{values}]")
    return UserError(key, values, f"several values need a sweep: normexp sweep {key}={values}")


def _role_without_name(text: str, overrides: Sequence[str]) -> UserError | None:
    found = re.search(r"Error merging override (norm\.roles\.\w+)=", text)
    if found is None:
        return None
    value = _value_of(found[1], overrides)
    return UserError(found[1], value, f"a norm is named by {found[1]}.name={value}")


def _value_of_group(text: str, overrides: Sequence[str]) -> UserError | None:
    found = re.search(r"Error merging override ([\w.]+)=(.*)", text)
    if found is None:
        return None
    node: Any = CellConfig()
    for part in found[1].split("."):
        node = getattr(node, part, None)
    if not is_dataclass(node):
        return None
    key = f"{found[1]}.{fields(node)[0].name}"
    expected = f"a group of keys; set one of them, as in {key}={found[2]}"
    return UserError(found[1], found[2], expected)


def _wrong_type(text: str, overrides: Sequence[str]) -> UserError | None:
    key = re.search(r"full_key: (\S+)", text)
    if key is None or "not in '" in text or "not in struct" in text:
        return None
    name = key[1].partition("[")[0]
    value = _value_of(name, overrides)
    wanted = re.search(r"could not be converted to (\w+)|is not a valid (bool)", text)
    if wanted is not None:
        kind = wanted[1] or "Boolean"
        expected = f"{_TYPES.get(kind, kind)} is needed"
        if value.startswith("["):
            expected += f"; several need a sweep: normexp sweep {name}={value.strip('[]')}"
        return UserError(name, value, expected)
    if "is not Optional" in text:
        return UserError(name, "null", "a value is needed")
    if "is not a ListConfig" in text:
        return UserError(name, value, f"a list is needed, as in {name}=[{value}]")
    complaint = next((line for line in text.splitlines() if "full_key" not in line), "")
    return UserError(name, value, complaint)


def _unknown_key(text: str, overrides: Sequence[str]) -> UserError | None:
    found = re.search(r"Could not override '(?:[^']*@)?([^']+)'", text) or re.search(
        r"full_key: (\S+)", text
    )
    if found is None:
        return None
    key = found[1]
    parent, _, last = key.rpartition(".")
    group, _, rest = parent.partition(".")
    if rest == "params":
        by_choice = list_params(group, overrides)
        lacking = [name for name, params in by_choice.items() if last not in params]
        if 0 < len(lacking) < len(by_choice):
            expected = f"{', '.join(lacking)} has no such parameter; set it in a grid block of the "
            return UserError(key, _value_of(key, overrides), f"{expected}others (experiment.grid)")
        names = sorted({name for params in by_choice.values() for name in params})
    else:
        node: Any = CellConfig()
        known: list[str] = []
        names = []
        for part in key.split("."):
            names = [field.name for field in fields(node)] if is_dataclass(node) else []
            if part not in names:
                break
            known.append(part)
            node = getattr(node, part)
        if names and len(known) < key.count("."):
            wrong = key.split(".")[len(known)]
            expected = f"there is no {'.'.join([*known, wrong])}; {choices_hint(wrong, names)}"
            return UserError(key, _value_of(key, overrides), expected)
    if key.startswith("experiment.experiment") or key.startswith("experiment.defaults"):
        expected = "the first line of an experiment's file must be: # @package _global_"
        return UserError(key, "", expected)
    if ".roles." in key and parent.endswith(".params"):
        return UserError(key, _value_of(key, overrides), f"a role's parameter is added: +{key}=...")
    if not parent:
        names.remove("plugins_sha256")
        deep = " or ".join(_deep_keys(last))
        if deep:
            return UserError(key, _value_of(key, overrides), f"did you mean {deep}?")
    hint = f"; {choices_hint(last, names)}" if names else ""
    return UserError(key, _value_of(key, overrides), f"there is no such key{hint}")


def _deep_keys(name: str) -> list[str]:
    """Return the dotted keys that end in a name, as optimizer.lr for lr."""
    base = CellConfig()
    found = []
    for group in fields(base):
        node = getattr(base, group.name)
        if is_dataclass(node) and name in {field.name for field in fields(node)}:
            found.append(f"{group.name}.{name}")
    return found


def _unset_group(text: str, _: Sequence[str]) -> UserError | None:
    found = re.search(r"You must specify '([^']+)'", text)
    return found and UserError(found[1], "", choices_hint("", list_choices(found[1])))


def _unreadable(text: str) -> tuple[str, str]:
    """Return what could not be read, and why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = re.search(r"Error parsing override '(.*)'", text)
    if found is None:
        shown = lines[:1] if lines and not lines[0].endswith(":") else lines[:2]
        return "", " ".join(shown) or "cannot be read"
    return found[1], f"cannot be read as key=value ({lines[1] if len(lines) > 1 else 'syntax'})"


def _value_of(key: str, overrides: Sequence[str]) -> str:
    """Return the value that the command line gives to a key."""
    for word in overrides:
        name, _, value = word.lstrip("+~").partition("=")
        if name == key:
            return value
    return ""


def _chain(error: BaseException) -> Iterable[BaseException]:
    """Yield an exception and what caused it."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
