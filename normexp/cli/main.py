"""The verbs of ``normexp`` and its exit codes.

Exit codes: 0 all is well; 1 some runs failed, or a norm has faults; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from normexp.errors import UserError, choices_hint

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compare normalizations in training.",
)

# The base of typer's own errors: typer carries a click of its own since 0.20 or so, so the name
# "click" would be the wrong class there.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

# Hydra parses what stands behind these verbs itself.
_HYDRA = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command(context_settings=_HYDRA)
def run(context: typer.Context) -> None:
    """Train an experiment's grid, measure its cost, write its report.

    Takes Hydra overrides: normexp run experiment=quickstart seeds=[0,1,2]
    """
    from normexp.cli.run import run_experiment

    raise typer.Exit(run_experiment(context.args))


@app.command(context_settings=_HYDRA)
def train(context: typer.Context) -> None:
    """Train one cell in this process. A Hydra program: overrides, -m, --cfg job, --help.

    normexp train norm=group_norm micro_batch_size=8
    """
    from normexp.cli.train import train_program

    raise typer.Exit(train_program(context.args, verb="train"))


@app.command(context_settings=_HYDRA)
def sweep(context: typer.Context) -> None:
    """Train every combination of the values given: the same as train -m.

    normexp sweep norm=batch_norm,group_norm micro_batch_size=2,8
    """
    from normexp.cli.train import train_program

    raise typer.Exit(train_program(["--multirun", *context.args], verb="sweep"))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="An experiment's folder, as results/quickstart.")],
) -> None:
    """Write tables, figures, REPORT.md and report.html from the records of an experiment."""
    from normexp.cli.report import report_experiment

    raise typer.Exit(report_experiment(folder))


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="An experiment's folder, as results/quickstart.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Show how the runs of an experiment stand."""
    from normexp.cli.status import show_status

    raise typer.Exit(show_status(folder, as_json=as_json))


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="norms, models, data, placements or experiments.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Show what can be chosen."""
    from normexp.cli.list import show_list

    raise typer.Exit(show_list(kind, as_json=as_json))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def inspect(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    world_size: Annotated[
        int, typer.Option(help="Ranks that train, with one micro-batch each.")
    ] = 2,
) -> None:
    """Show what every norm layer of a model will see, and what may not be meant. Trains nothing.

    Takes the overrides of train: normexp inspect norm=batch_norm micro_batch_size=2
    """
    from normexp.cli.inspect import inspect_model

    raise typer.Exit(inspect_model(context.args, as_json=as_json, world_size=world_size))


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="A norm, as group_norm.")],
    plugin: Annotated[
        list[str] | None, typer.Option("--plugin", help="A Python file with norms of your own.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="NAME=VALUE instead of a default, to fit 4 to 8 channels."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Show what a norm declares, and test every word of it by experiment."""
    from normexp.cli.check import check_card

    code = check_card(name, plugins=plugin or [], options=option or [], as_json=as_json)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line, and turn bad input into one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        print(f"normexp: {error}", file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except _CommandLineError as error:
        line = _tell(error)
        if line:  # empty after a bare "normexp", which has printed its help
            print(f"normexp: {line}", file=sys.stderr)
        code = 2
    if code == 130:  # some versions of typer return it and raise nothing
        print("normexp: interrupted; start again to do what is missing", file=sys.stderr)
    sys.exit(code)


def _tell(error: Exception) -> str:
    """Return typer's complaint as key, value and what would be right, where it can be told so."""
    message = str(error.format_message())  # type: ignore[attr-defined]
    unknown = re.match(r"No such command '(.*?)'", message)
    if unknown is not None:
        verbs = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
        return str(UserError("command", unknown[1], choices_hint(unknown[1], verbs)))
    parameter = getattr(error, "param", None)
    if message.startswith("Missing argument") and parameter is not None:
        return str(UserError(parameter.name, "", str(parameter.help)))
    return message
