"""The verbs train and sweep: a Hydra program."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from normexp.config.choices import conf_dir, list_choices
from normexp.config.compose import (
    CONFIG_NAME,
    HYDRA_VERSION_BASE,
    check_overrides,
    load_plugins,
    register_schema,
    split_overrides,
)
from normexp.config.translate import translate
from normexp.errors import UserError
from normexp.launch.task import TrainTask
from normexp.records import read_summary


def train_program(arguments: Sequence[str], *, verb: str) -> int:
    """Run Hydra on the arguments of ``train`` or ``sweep``.

    Args:
        arguments: Overrides and Hydra's flags.
        verb: For the record of the command.

    Returns:
        The exit code.
    """
    task = run_hydra(arguments, verb=verb)
    counts = count_statuses(task)
    if counts:
        ends = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        print(f"{ends}; records: {task.folder}")
        print(f"tables and figures: normexp report {task.folder}")
    return exit_code(counts)


def run_hydra(arguments: Sequence[str], *, verb: str, task: TrainTask | None = None) -> TrainTask:
    """Hand the arguments to Hydra, and return the task with what it learnt.

    Args:
        arguments: Overrides and Hydra's flags.
        verb: For the record of the command.
        task: What Hydra runs; training by default.

    Raises:
        UserError: If the arguments cannot be composed or a cell cannot work.
    """
    # Hydra would catch errors and print them its own way; here they are ours to tell.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    shown = [word for word in arguments if word != "--multirun"]
    task = task or TrainTask(shlex.join(["normexp", verb, *shown]))
    register_schema()
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parsed = parser.parse_args(list(arguments))
    overrides = parsed.overrides
    if parsed.cfg or parsed.info or parsed.shell_completion:
        # Hydra refuses to show the configuration of a sweep; that of its base is meant.
        arguments = [word for word in arguments if word not in ("-m", "--multirun")]
    if parsed.cfg:
        fixed, swept = split_overrides(overrides)
        shown_only = [word for word in arguments if word not in overrides or word in fixed]
        arguments = shown_only if swept else arguments
        overrides = fixed
    check_overrides(overrides)
    _load_plugins_early(overrides, parsed.config_dir)
    before = sys.argv
    sys.argv = [f"normexp {verb}", *arguments]
    errors: list[BaseException] = []

    def catching(composed: DictConfig) -> None:
        # Hydra prints the overrides of a job that raises; the error line says more.
        try:
            task(composed)
        except BaseException as error:
            errors.append(error)

    task_function = task if _is_multirun(arguments) else catching
    program = hydra.main(
        config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base=HYDRA_VERSION_BASE
    )(task_function)
    try:
        program()
    except (HydraException, OmegaConfBaseException) as error:
        raise translate(error, overrides) from error
    except yaml.YAMLError as error:
        raise UserError("--config-dir", "", f"no YAML: {error}") from error
    finally:
        sys.argv = before
    if errors:
        raise errors[0]
    return task


def count_statuses(task: TrainTask) -> dict[str, int]:
    """Return how many of a sweep's runs ended in which way, from their records."""
    counts: dict[str, int] = {}
    for cell in task.cells:
        for seed in cell.config.seeds:
            summary = read_summary(cell.facts.run_dir(cell.config, seed))
            status = summary["status"] if summary else "not run"
            counts[status] = counts.get(status, 0) + 1
    return counts


def exit_code(counts: dict[str, int]) -> int:
    """Return 1 if some runs failed or did not run, else 0."""
    return 1 if any(counts.get(word) for word in ("failed", "interrupted", "not run")) else 0


def _refuse(message: str) -> NoReturn:
    """Tell a fault in the flags in one line, where argparse would print its usage."""
    word = message.rpartition(": ")[2]
    raise UserError(
        "command line", word, f"{message.partition(':')[0]}; overrides come before flags"
    )


def _is_multirun(arguments: Sequence[str]) -> bool:
    return any(word in ("-m", "--multirun") for word in arguments)


def _load_plugins_early(overrides: Sequence[str], config_dir: str | None) -> None:
    """Import the plugins of the command line or the experiment; their entries become choices.

    Hydra composes only after this, so the experiment's file is read by itself here.
    """
    paths: list[str] = []
    for word in overrides:
        key, _, text = word.lstrip("+").partition("=")
        if key == "plugins":
            value = OverridesParser.create().parse_override(word).value()
            if not isinstance(value, list):
                raise UserError(key, value, f"a list is needed, as in plugins=[{value}]")
            paths += value
        if key == "experiment":
            paths += _plugins_of_experiment(text, config_dir)
    if not paths:
        return
    load_plugins(paths)
    from normexp.data import DATASETS
    from normexp.models import MODELS
    from normexp.norms import NORMS

    for group, registry in (("norm", NORMS), ("model", MODELS), ("data", DATASETS)):
        for name in set(registry.names()) - set(list_choices(group)):
            params = {
                key: parameter.default
                for key, parameter in registry.get(name).parameters().items()
                if parameter.default is not parameter.empty
            }
            ConfigStore.instance().store(
                group=group, name=name, node={"name": name, "params": params}, provider="plugin"
            )


def _plugins_of_experiment(name: str, config_dir: str | None) -> list[str]:
    """Return the plugins that an experiment's file names."""
    for folder in (*filter(None, [config_dir]), str(conf_dir())):
        path = Path(folder) / "experiment" / f"{name}.yaml"
        if path.is_file():
            try:
                content = yaml.safe_load(path.read_text()) or {}
            except yaml.YAMLError as error:
                raise UserError("experiment", path, f"is no YAML: {error}") from error
            return list(content.get("plugins") or [])
    return []
