"""Mirror a run to wandb, TensorBoard or a CSV file, through Lightning's logger interface.

The record of a run is its own folder; a tracker only shows it elsewhere, and no table is ever
read back from one. Every run gets a tracker run of its own, also when several runs share a
process, one after the other or at once.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from normexp.errors import UserError, choices_hint
from normexp.registry import Entry
from normexp.training.csv_tracker import CsvTracker

_KEY = "logger.trackers"
_LOG = logging.getLogger(__name__)

# A diverged run is an outcome, not a crash: its process did what it should.
_EXIT_CODES = {"completed": 0, "diverged": 0, "failed": 1, "interrupted": 130}


@dataclass(frozen=True)
class TrackerCard:
    """What is declared about a tracker.

    Attributes:
        description: What it writes, and where.
        package: Optional package that it needs, which is also the name of the pip extra; None
            if it needs none.
    """

    description: str
    package: str | None


@dataclass(frozen=True)
class _Place:
    """The run that a tracker mirrors."""

    run_dir: Path
    run_name: str
    run_id: str
    group: str
    config: Mapping[str, Any]


def check_trackers(trackers: Mapping[str, Any]) -> None:
    """Raise unless every tracker exists, has proper parameters and finds its package.

    Args:
        trackers: Tracker name to its parameters; null stands for no parameters.

    Raises:
        UserError: On an unknown tracker or parameter, a value of the wrong type, or a package
            that is not installed.
    """
    for name, params in trackers.items():
        if name not in TRACKERS:
            raise UserError(f"{_KEY}.{name}", params, choices_hint(name, TRACKERS))
        if not isinstance(params, Mapping | None):
            raise UserError(f"{_KEY}.{name}", params, "a mapping of parameters is needed")
        entry = TRACKERS[name]
        entry.check_params(params or {}, key=f"{_KEY}.{name}")
        package = entry.card.package
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                _KEY, name, f'it needs a package; install it with pip install "normexp[{package}]"'
            )


def build_trackers(
    trackers: Mapping[str, Any],
    *,
    run_dir: Path,
    run_name: str,
    run_id: str,
    group: str,
    config: Mapping[str, Any],
) -> list[Logger]:
    """Return one started logger for each tracker, each with a run of its own.

    Args:
        trackers: Tracker name to its parameters; null stands for no parameters.
        run_dir: Folder of the run; trackers write below it and nowhere else.
        run_name: Name to show.
        run_id: Id of the run; the same when the run is resumed.
        group: What runs are shown together under.
        config: Resolved configuration of the run, as plain nested data.

    Returns:
        Loggers in the order of ``trackers``; none in a process that is not the first of a
        distributed run.

    Raises:
        UserError: As :func:`check_trackers`.
    """
    check_trackers(trackers)
    if getattr(rank_zero_only, "rank", 0) != 0:
        return []
    place = _Place(run_dir, run_name, run_id, group, config)
    return [TRACKERS[name].build(place, **(params or {})) for name, params in trackers.items()]


def close_trackers(loggers: Sequence[Logger], status: str) -> None:
    """End every tracker run with the status of the run; a failing tracker fails alone.

    An offline wandb run is complete on disk a moment later: its service writes on by itself,
    also when this process is gone.

    Args:
        loggers: What :func:`build_trackers` returned.
        status: ``completed``, ``diverged``, ``failed`` or ``interrupted``. wandb's exit code
            for them is 0, 0, 1 and 130, and the word stands in its summary.
    """
    exit_code = _EXIT_CODES[status]
    for logger in loggers:
        try:
            logger.save()
            logger.finalize("success" if exit_code == 0 else "failed")
            if isinstance(logger, WandbLogger):
                logger.experiment.summary["status"] = status
                logger.experiment.finish(exit_code=exit_code)
        except Exception as exception:
            # The run itself is safe on disk; it must not end as failed for its mirror's sake.
            _LOG.warning("tracker %s could not be closed: %s", type(logger).__name__, exception)


def _build_wandb(
    place: _Place,
    *,
    project: str = "normexp",
    mode: Literal["offline", "online"] = "offline",
    entity: str | None = None,
    tags: list[str] | None = None,
) -> WandbLogger:
    """Start a wandb run that shares nothing with another run of this process."""
    if mode == "offline":
        # Even offline, wandb's service looks up the host that it reports its own errors to.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    place.run_dir.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            tags=tags,
            dir=place.run_dir,
            id=place.run_id,
            name=place.run_name,
            group=place.group,
            config=dict(place.config),
            # Else a second run of the process is merged into the first, or ends it.
            reinit="create_new",
            # A resumed run goes on in its own wandb run; offline, `wandb sync` decides that.
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,  # its sampling would run beside the training
            ),
        )
    except wandb.Error as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise UserError(
            f"{_KEY}.wandb.mode",
            mode,
            f"wandb did not start ({reason}); run wandb login, or use mode offline",
        ) from error
    # Runs with different batch sizes are comparable at equal samples, not at equal updates.
    run.define_metric("samples")
    run.define_metric("*", step_metric="samples")
    # Given a run, the logger starts none; by itself it would join one that the user has open.
    return WandbLogger(
        name=place.run_name,
        project=project,
        id=place.run_id,
        save_dir=place.run_dir,
        experiment=run,
    )


def _build_tensorboard(place: _Place) -> TensorBoardLogger:
    """Return a logger that writes event files to ``tensorboard/`` in the run's folder."""
    logger = TensorBoardLogger(
        save_dir=place.run_dir, name="", version="tensorboard", default_hp_metric=False
    )
    logger.log_hyperparams(dict(place.config))
    return logger


def _build_csv(place: _Place) -> CsvTracker:
    """Return a logger that appends to ``metrics.csv`` in the run's folder."""
    return CsvTracker(place.run_dir, run_id=place.run_id)


TRACKERS: dict[str, Entry[TrackerCard]] = {
    entry.name: entry
    for entry in (
        Entry(
            "tracker",
            "wandb",
            _build_wandb,
            TrackerCard("a wandb run in wandb/, offline unless asked", "wandb"),
        ),
        Entry(
            "tracker",
            "tensorboard",
            _build_tensorboard,
            TrackerCard("event files in tensorboard/, against updates", "tensorboard"),
        ),
        Entry("tracker", "csv", _build_csv, TrackerCard("metrics.csv, long form", None)),
    )
}
