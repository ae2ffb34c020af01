"""From YAML and overrides to cells. Beside cli/ and launch/, the only place that knows Hydra."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from normexp.config.choices import list_choices
from normexp.config.paths import DATA_PATHS
from normexp.config.schema import CellConfig
from normexp.config.translate import translate
from normexp.errors import UserError, choices_hint

_WORD = re.compile(r"[A-Za-z0-9_./-]+")
CONFIG_NAME = "config"
HYDRA_VERSION_BASE = "1.3"


def register_schema() -> None:
    """Make the dataclass schema known to Hydra as ``cell_schema``."""
    ConfigStore.instance().store(name="cell_schema", node=CellConfig)


def to_cell(composed: DictConfig) -> CellConfig:
    """Return the typed cell of a composed configuration, without Hydra's own part.

    Paths become absolute here, in the parent, so that every job sees the same.

    Args:
        composed: What Hydra composed.

    Raises:
        UserError: If a value is missing or of the wrong type.
    """
    plain = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    for key in sorted(OmegaConf.missing_keys(plain)):
        raise UserError(key, "???", "a value is needed")
    try:
        # Untyped first: a typed node would take a key that its schema does not have.
        untyped = OmegaConf.create(OmegaConf.to_container(plain, resolve=True))
        cell = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CellConfig), untyped))
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        raise translate(error, [f"{key}={OmegaConf.select(plain, key)}"]) from error
    assert isinstance(cell, CellConfig)
    cell.plugins = [str(_absolute("plugins", path)) for path in cell.plugins]
    cell.plugins_sha256 = sorted(
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in map(Path, cell.plugins)
        if path.is_file()
    )
    cell.output_root = str(_absolute("output_root", cell.output_root))
    for key in DATA_PATHS:
        path = cell.data.params.get(key)
        if isinstance(path, str):
            cell.data.params[key] = str(_absolute(f"data.params.{key}", path))
    return cell


def _absolute(key: str, path: str) -> Path:
    """Return a path as the user means it; ``~`` is a home folder."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~name of nobody
        raise UserError(key, path, "there is no such home folder") from error


def load_plugins(paths: Iterable[str]) -> None:
    """Import a user's Python files, whose decorators register own choices.

    Args:
        paths: Files, relative to the working folder.

    Raises:
        UserError: If a file is missing or cannot be imported.
    """
    for path in paths:
        file = _absolute("plugins", path)
        if not file.is_file():
            raise UserError("plugins", path, "there is no such file")
        name = f"normexp_plugin_{file.stem}"
        if name in sys.modules and sys.modules[name].__file__ == str(file):
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UserError("plugins", path, "a Python file (.py) is needed")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise UserError("plugins", path, f"{type(error).__name__}: {error}") from error


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise on overrides that Hydra would take but not as meant.

    Args:
        overrides: The command line's, without flags.

    Raises:
        UserError: If an override cannot be read, or a list stands where one choice belongs:
            Hydra would merge the list's files into one.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise translate(error) from error
    for override in parsed:
        key, value = override.key_or_group, override.value()
        if value is None and not override.is_delete() and list_choices(key):
            raise UserError(key, "null", choices_hint("", list_choices(key)))
        if isinstance(value, list) and key != "logger" and list_choices(key):
            names = ",".join(str(item) for item in value)
            raise UserError(
                key, f"[{names}]", f"one choice; several need a sweep: normexp sweep {key}={names}"
            )


def expand_grid(
    grid: Sequence[Mapping[str, Any]],
    overrides: Sequence[str],
    config_loader: ConfigLoader | None = None,
) -> tuple[list[list[str]], list[str]]:
    """Return the override lists of all cells, and the keys that vary.

    A sweep on the command line (``norm=batch_norm,group_norm``) takes the place of the axis of
    the same key in every block of the grid that has it, and is a further axis elsewhere; a
    single value pins the axis.

    Args:
        grid: Blocks of the experiment; each maps an override key to its values.
        overrides: The command line's.
        config_loader: Hydra's, which knows the choices that ``glob(*)`` stands for.

    Returns:
        (overrides of each cell, without the experiment's duplicates; keys of all axes in order).

    Raises:
        UserError: If the grid or an override cannot be read.
    """
    fixed, swept = split_overrides(overrides, config_loader)
    fixed_keys = {_key_of(text) for text in fixed}
    blocks = [dict(block) for block in grid] or [{}]
    cells: dict[tuple[str, ...], None] = {}
    axes: dict[str, None] = {}
    for block in blocks:
        for key, values in block.items():
            if not isinstance(values, list | tuple) or not values:
                raise UserError(f"experiment.grid.{key}", values, "a list of values is needed")
        spelled = {
            key: [f"{key}={_spell(value)}" for value in values]
            for key, values in block.items()
            if key not in fixed_keys
        }
        spelled.update(swept)
        axes.update(dict.fromkeys(spelled))
        for combination in itertools.product(*spelled.values()):
            cells[(*fixed, *combination)] = None
    return [list(cell) for cell in cells], list(axes)


def pins_one_cell(grid: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> bool:
    """Tell whether overrides alone choose one cell of a grid: each axis of some block is set.

    Args:
        grid: Blocks of an experiment; without any there is nothing to choose.
        overrides: The command line's, without sweeps.
    """
    pinned = {_key_of(word) for word in overrides}
    return not grid or any(set(block) <= pinned for block in grid)


def split_overrides(
    overrides: Sequence[str], config_loader: ConfigLoader | None = None
) -> tuple[list[str], dict[str, list[str]]]:
    """Return single overrides as they are, and sweeps as key to their spelled values.

    Args:
        overrides: The command line's.
        config_loader: Hydra's, which knows the choices that ``glob(*)`` stands for.

    Raises:
        UserError: If an override cannot be read, or is a sweep that has no end.
    """
    try:
        parsed = OverridesParser.create(config_loader).parse_overrides(list(overrides))
    except HydraException as error:
        raise translate(error) from error
    fixed, swept = [], {}
    for override in parsed:
        if override.is_sweep_override():
            key = override.get_key_element()
            values = (override.input_line or "").partition("=")[2]
            if key == "logger":
                raise UserError(key, values, f"several trackers are a list: logger=[{values}]")
            if not override.is_discrete_sweep():
                expected = "a list of values is needed, as in 0.01,0.1 or range(1,5)"
                raise UserError(key, values, expected)
            swept[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            assert override.input_line is not None
            fixed.append(override.input_line)
    return fixed, swept


def _key_of(override: str) -> str:
    """Return the key of an override as written: without +, ++, ~ and package."""
    return override.split("=", 1)[0].lstrip("+~").split("@", 1)[0]


def _spell(value: Any) -> str:
    """Return a YAML value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(_spell(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_spell(v)}" for k, v in value.items()) + "}"
    text = str(value)
    if isinstance(value, str) and not (_WORD.fullmatch(text) and _is_text(text)):
        # In Hydra's quotes a backslash is itself, but for those right before a quote.
        escaped = re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text)
        return f"'{escaped}'"
    return text


def _is_text(word: str) -> bool:
    """Tell whether Hydra reads a bare word as text, unlike ``1``, ``1e-3`` or ``null``."""
    return isinstance(OverridesParser.create().parse_override(f"key={word}").value(), str)
