"""The verb inspect: every norm layer of a configured model, without training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normexp.cli.train import run_hydra
from normexp.config.compose import load_plugins, pins_one_cell, split_overrides, to_cell
from normexp.config.schema import CellConfig
from normexp.errors import UserError
from normexp.launch.task import TrainTask

if TYPE_CHECKING:
    from normexp.cli._norm_facts import NormFacts

# Columns that a table does without where it does not fit, the first first.
_LESS_NEEDED = ("params", "role")


def inspect_model(arguments: Sequence[str], *, as_json: bool, world_size: int) -> int:
    """Print what every norm layer of a cell's model will see.

    Args:
        arguments: Hydra overrides, as train takes them.
        as_json: Print a JSON list of layers.
        world_size: Number of ranks to tell M for.

    Returns:
        The exit code: 0 also where there are warnings or layers that training would refuse.

    Raises:
        UserError: If the cell cannot be composed or its model not be built.
    """
    if world_size < 1:
        raise UserError("--world-size", world_size, "1 or more is needed")
    for word in arguments:
        if word in ("-m", "--multirun"):
            raise UserError("command line", word, "inspect shows one cell, not a sweep")
    _, swept = split_overrides([word for word in arguments if not word.startswith("-")])
    for key, values in swept.items():
        names = ",".join(value.partition("=")[2] for value in values)
        raise UserError(key, names, "inspect shows one cell, not a sweep; name one value")
    task = _InspectTask("normexp inspect")
    run_hydra(arguments, verb="inspect", task=task)
    if task.config is None:  # --cfg: Hydra has printed what was asked
        return 0
    facts = describe_cell(task.config, world_size)
    if as_json:
        print(json.dumps([dataclasses.asdict(layer) for layer in facts], indent=1))
    elif not facts:
        print(f"{task.config.model.name} has no norm layer here")
    else:
        _show(task.config, facts, world_size)
    return 0


class _InspectTask(TrainTask):
    """Hydra's task function: keep the cell of a composed configuration."""

    config: CellConfig | None = None

    def __call__(self, composed: DictConfig) -> None:
        from normexp.training.resolve import resolve_cell

        cell = to_cell(composed)
        load_plugins(cell.plugins)
        cell = resolve_cell(cell)
        experiment = cell.experiment
        if not pins_one_cell(experiment.grid, HydraConfig.get().overrides.task):
            axes = ", ".join(dict.fromkeys(key for block in experiment.grid for key in block))
            expected = f"is a grid of cells, and inspect takes one; set its axes: {axes}"
            raise UserError("experiment", experiment.name, expected)
        self.config = cell


def describe_cell(config: CellConfig, world_size: int) -> list[NormFacts]:
    """Return the facts of a cell's norm layers in forward order, then of its normalized weights.

    The model is built and run on the meta device. Of images no file is opened; texts are loaded,
    since only they tell how long they are and how many symbols they have.

    Args:
        config: A composed cell in its one spelling.
        world_size: Number of ranks to tell M for.
    """
    import torch

    from normexp.cli._norm_facts import Setting, describe_layer, describe_weights
    from normexp.config.validate import budget_samples
    from normexp.data import describe_dataset
    from normexp.norms import describe_norm_layers
    from normexp.training.check import build_cell_model, find_refusals

    data = describe_dataset(config.data.name, config.data.params)
    with torch.device("meta"):
        model = build_cell_model(config, data)
    setting = Setting(
        device="cuda" if config.trainer.accelerator == "gpu" else "cpu",
        micro_batch_size=config.micro_batch_size,
        accumulation_steps=config.accumulation_steps,
        num_micro_batches=budget_samples(config, data.num_train) // config.micro_batch_size,
        world_size=world_size,
        has_padding=data.tokens is not None and data.tokens.has_padding,
        is_trimmed=data.is_trimmed,
    )
    layers = describe_norm_layers(model, data.input_shape, config.micro_batch_size)
    refusals = find_refusals(layers, model, data, allow_leak=config.allow_leak)
    facts = [describe_layer(layer, model, setting, refusals.get(layer.path)) for layer in layers]
    return facts + describe_weights(model, setting)


def _show(config: CellConfig, facts: Sequence[NormFacts], world_size: int) -> None:
    """Print a table of the layers, and below it what is the same for many of them."""
    placement = "" if config.placement is None else f", placement {config.placement.name}"
    above = (
        f"{config.model.name} on {config.data.name}{placement}; micro_batch_size "
        f"{config.micro_batch_size}, accumulation_steps {config.accumulation_steps}"
    )
    console = Console()
    console.print(escape(above), highlight=False)
    messages = [_messages(layer) for layer in facts]
    for_all = [message for message in messages[0] if all(message in some for some in messages[1:])]
    marks: dict[str, int] = {}
    for message in (message for some in messages for message in some if message not in for_all):
        marks.setdefault(message, len(marks) + 1)
    numbers = [[marks[m] for m in some if m in marks] for some in messages]
    unbounded = console.options.update(width=1000)
    for num_left_out in range(len(_LESS_NEEDED) + 1):
        left_out = _LESS_NEEDED[:num_left_out]
        table = _draw(facts, numbers, left_out)
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    console.print(table)
    device = "cuda" if config.trainer.accelerator == "gpu" else "cpu"
    below = [f"no room for {' and '.join(left_out)}: --json, or more columns"] if left_out else []
    below += list(
        dict.fromkeys(
            f"{layer.norm} on {device}: {layer.kernel}; {layer.kernel_words}"
            if layer.acts_on == "input"
            else f"{layer.norm} of weights: {layer.kernel_words}"
            for layer in facts
        )
    )
    if not _ranks_matter(facts):
        below.append(f"M with {world_size} ranks of this micro-batch: the same")
    below += [f"all: {message}" for message in for_all]
    below += [f"({mark}) {message}" for message, mark in marks.items()]
    refusals = [layer.refusal for layer in facts if layer.refusal is not None]
    answer = f"training would refuse {refusals[0]}" if refusals else "training refuses no layer"
    below.append(answer)
    for line in below:
        console.print(escape(line), highlight=False)


def _draw(
    facts: Sequence[NormFacts], marks: Sequence[Sequence[int]], left_out: Sequence[str]
) -> Table:
    """Return the table, without the columns that would say the same in every row."""
    columns: dict[str, Callable[[NormFacts], Any]] = {
        "layer": lambda layer: escape(layer.path),
        "role": lambda layer: layer.role,
        "norm": lambda layer: layer.norm,
        "shape": lambda layer: "x".join(map(str, layer.shape)),
        "statistics over": lambda layer: [" x ".join(item.axes) for item in layer.statistics],
        "M": lambda layer: [item.size for item in layer.statistics],
        f"M at {facts[0].world_size} ranks": lambda layer: [
            item.size_at_world_size for item in layer.statistics
        ],
        "params": lambda layer: layer.num_parameters,
    }
    if not _ranks_matter(facts):
        del columns[f"M at {facts[0].world_size} ranks"]
    if len({layer.norm for layer in facts}) == 1:
        del columns["norm"]
    for name in left_out:
        del columns[name]
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        is_number = name.startswith("M") or name in ("shape", "params")
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name != "layer")
    table.add_column("see", justify="right")
    for layer, numbers in zip(facts, marks, strict=True):
        cells = []
        for tell in columns.values():
            told = tell(layer)
            lines = told if isinstance(told, list) else [told]
            cells.append("\n".join(map(str, lines)) or "-")
        table.add_row(*cells, " ".join(map(str, sorted(numbers))))
    return table


def _ranks_matter(facts: Sequence[NormFacts]) -> bool:
    """Tell whether a statistic of some layer is over the samples of several ranks."""
    return any(item.size != item.size_at_world_size for f in facts for item in f.statistics)


def _messages(layer: NormFacts) -> list[str]:
    """Return the lines that a layer's row refers to."""
    refused = ["refused in training, see the last line"] if layer.refusal else []
    return refused + [finding.message for finding in layer.warnings]
