"""Where the YAML files lie, and which choices they offer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

import normexp


def conf_dir() -> Path:
    """Return the folder of the YAML files: inside an installed package, beside it in a clone."""
    package = Path(normexp.__file__).resolve().parent
    inside = package / "_conf"
    return inside if inside.exists() else package.parent / "conf"


def list_choices(group: str) -> list[str]:
    """Return the choices of a configuration group; empty if there is no such group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def default_choice(group: str) -> str | None:
    """Return the choice that the base configuration makes in a group."""
    base = yaml.safe_load((conf_dir() / "config.yaml").read_text())
    for entry in base["defaults"]:
        if isinstance(entry, dict) and group in entry:
            return str(entry[group])
    return None


def list_params(group: str, overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the parameters of the choices that overrides make in a group, by choice.

    Args:
        group: A configuration group, such as norm.
        overrides: The command line's; without one for the group, the default choice counts. A
            choice that has no file, such as a plugin's, is left out.
    """
    words = [word.partition("=")[2] for word in overrides if word.startswith(f"{group}=")]
    chosen = [name for word in words for name in word.split(",")]
    chosen = chosen or [name for name in [default_choice(group)] if name]
    params: dict[str, list[str]] = {}
    for name in (name for name in list_choices(group) if not chosen or name in chosen):
        loaded = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text()) or {}
        params[name] = sorted(loaded.get("params") or {})
    return params
