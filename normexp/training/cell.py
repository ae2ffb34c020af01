"""Train the seeds of one cell, each to a record on disk."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from normexp.config.schema import CellConfig
from normexp.data import Dataset, Split, load_dataset
from normexp.data.batches import IndexStream
from normexp.records import (
    FINAL_STATUSES,
    Status,
    clear_partial,
    cut_journal,
    describe_environment,
    hold_lock,
    read_json,
    read_summary,
    run_id,
    write_json,
    write_yaml,
)
from normexp.records.environment import describe_cpu
from normexp.records.schema import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    JOURNAL_FILE,
    SUMMARY_FILE,
)
from normexp.training.build import build_start
from normexp.training.check import CellFacts, check_cell
from normexp.training.checkpoint import TimedCheckpoint, restore
from normexp.training.evaluation import evaluation_statistics
from normexp.training.optim import ParameterGroup, build_lr
from normexp.training.probes import run_initial_probes, run_probes
from normexp.training.recorder import Recorder
from normexp.training.solo import Diverged, SoloModule, quiet_lightning
from normexp.training.summary import build_summary
from normexp.training.totals import count_texts
from normexp.training.trackers import build_trackers, close_trackers
from normexp.training.windows import EvaluationSource, WindowSource

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class Ending:
    """How a run ended and, unless it is as planned, why."""

    status: Status
    reason: str | None = None


def train_cell(
    config: CellConfig,
    seeds: Sequence[int] | None = None,
    *,
    on_progress: ProgressCallback | None = None,
) -> list[str]:
    """Train the runs of one cell that are not yet on disk.

    A run that fails is recorded as failed and does not stop the others.

    Args:
        config: The composed cell; see ``check_cell`` for what is refused.
        seeds: Seeds to run; those of the configuration by default.
        on_progress: Told (seed, updates done) now and then.

    Returns:
        The run ids, in the order of the seeds.

    Raises:
        UserError: If the configuration cannot work; nothing was trained then.
        KeyboardInterrupt: After the run that was interrupted has been recorded so.
    """
    torch.set_num_threads(config.trainer.num_threads)
    facts = check_cell(config)
    data = load_dataset(config.data.name, config.data.params)
    ids = []
    for seed in config.seeds if seeds is None else seeds:
        ids.append(run_id(seed, config.to_plain(), facts.data_fingerprint))
        folder = facts.run_dir(config, seed)
        with hold_lock(
            folder / ".lock",
            key="seeds",
            held=f"seed {seed} is being trained by another process",
            timeout_s=20.0,
        ):
            summary = read_summary(folder)
            if summary is not None and summary["status"] in FINAL_STATUSES:
                continue
            (folder / SUMMARY_FILE).unlink(missing_ok=True)
            clear_partial(folder)
            _Run(config, facts, data, seed, folder, ids[-1], on_progress).train()
    return ids


class _Run:
    """One seed of a cell, from its first file to its summary."""

    def __init__(
        self,
        config: CellConfig,
        facts: CellFacts,
        data: Dataset,
        seed: int,
        folder: Path,
        identifier: str,
        on_progress: ProgressCallback | None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.data = data
        self.seed = seed
        self.folder = folder
        self.identifier = identifier
        self.groups: list[ParameterGroup] = []
        self.reports: dict[str, Any] = {}
        self._on_progress = on_progress
        self.plain = {**config.to_plain(), "seeds": [seed]}

    def train(self) -> None:
        """Train, then write history and summary."""
        module, resumed_from = self._prepare()
        write_yaml(self.folder / CONFIG_FILE, self.plain)
        interrupt: BaseException | None = None
        extra: dict[str, float] = {}
        trackers: list[Logger] = []
        try:
            trackers = self._build_trackers()
            module.recorder.trackers = trackers
            trainer = self._build_trainer(module, trackers)
            extra = self._probe_start(trainer)
            ending = self._fit(trainer, module)
            if ending.status == "completed":
                extra |= self._probe(module)
        except (KeyboardInterrupt, SystemExit, SIGTERMException) as exception:
            interrupt = exception
            ending = Ending("interrupted", "stopped by a signal")
        except Exception as exception:
            ending = _describe_failure(exception, self.folder)
        module.recorder.close()
        close_trackers(trackers, ending.status)
        self._write_summary(module, ending, extra, resumed_from)
        if interrupt is not None:
            raise KeyboardInterrupt from interrupt

    def _build_trackers(self) -> list[Logger]:
        """Return the run's own trackers; a service that refuses makes the run a failed one."""
        return build_trackers(
            self.config.logger.trackers,
            run_dir=self.folder,
            run_name=f"{self.facts.cell}-seed{self.seed}",
            run_id=self.identifier,
            group=self.config.name,
            config=self.plain,
        )

    def _prepare(self) -> tuple[SoloModule, int]:
        """Return the module, at the last checkpoint if there is one, and its update."""
        checkpoint = self.folder / CHECKPOINT_FILE
        (self.folder / "error.txt").unlink(missing_ok=True)
        if not self._keeps_environment():
            checkpoint.unlink(missing_ok=True)
        module = self._build()
        if checkpoint.exists():
            try:
                restore(module, checkpoint)
            except Exception:
                # Torn by a power cut, or of code whose layers had other names; what torch raises
                # on that is of many kinds. The run starts anew, and gives the same numbers.
                checkpoint.rename(checkpoint.with_suffix(".unreadable"))
                module = self._build()
        wall_s = cut_journal(self.folder, module.update)
        module.recorder = Recorder(
            self.folder,
            num_train=self.facts.plan.num_train,
            on_progress=self._report,
            wall_s=wall_s,
        )
        return module, module.update

    def _keeps_environment(self) -> bool:
        """Tell whether an earlier attempt ran under the present conditions, and note them.

        A run is of one commit, one device and one set of versions; else it starts anew.
        """
        path = self.folder / ENVIRONMENT_FILE
        is_gpu = self.config.trainer.accelerator == "gpu"
        now = describe_environment(
            device=torch.cuda.get_device_name() if is_gpu else describe_cpu(),
            num_threads=self.config.trainer.num_threads,
            precision=self.config.precision,
            data_fingerprint=self.facts.data_fingerprint,
        )
        if path.exists():
            before = read_json(path)
            before["started_at"] = now["started_at"]
            if before == now:
                return True
        write_json(path, now)
        return False

    def _build(self) -> SoloModule:
        """Return the module at its first update."""
        config, plan = self.config, self.facts.plan
        model, self.groups, optimizer, clip = build_start(
            config, self.data, seed=self.seed, lr=config.scaled_lr
        )
        lr = build_lr(
            config.schedule.name,
            peak_lr=config.scaled_lr,
            warmup_fraction=config.schedule.warmup_fraction,
            num_updates=plan.num_updates,
            params=config.schedule.params,
        )
        return SoloModule(
            model,
            plan=plan,
            optimizer=optimizer,
            clip=clip,
            lr=lr,
            evaluation_context=self._evaluation_context,
            text_bytes={"val": self.data.val.text_bytes, "test": self.data.test.text_bytes},
        )

    def _evaluation_context(self, module: SoloModule) -> AbstractContextManager[None]:
        """Return what the configured statistics of an evaluation need."""
        train_inputs = module.split_on_device(self.data.train).inputs
        return evaluation_statistics(self.config.evaluation, module.model, train_inputs)

    def _evaluation_source(self, module: SoloModule, split: Split) -> EvaluationSource:
        """Return the batches of a split."""
        evaluation = self.config.evaluation
        if evaluation.statistics != "batch":
            size = self.config.trainer.eval_batch_size
            return EvaluationSource(module, split, size, is_trimmed=self.data.is_trimmed)
        assert evaluation.batch_size is not None
        return EvaluationSource(
            module,
            split,
            evaluation.batch_size,
            is_filled=True,
            is_trimmed=self.data.is_trimmed,
        )

    def _report(self, update: int) -> None:
        if self._on_progress is not None:
            self._on_progress(self.seed, update)

    def _build_trainer(self, module: SoloModule, trackers: list[Logger]) -> pl.Trainer:
        """Return Lightning's Trainer for what is left of the run."""
        trainer = self.config.trainer
        checkpoint = TimedCheckpoint(self.folder / CHECKPOINT_FILE, trainer.checkpoint_interval_s)
        with quiet_lightning():
            return pl.Trainer(
                accelerator=trainer.accelerator,
                devices=1,
                precision=self.config.precision,  # type: ignore[arg-type] # checked before
                max_epochs=self.facts.plan.num_evaluations - module.evaluation,
                logger=trackers,
                callbacks=[checkpoint],
                default_root_dir=self.folder,
                deterministic=True,
                num_sanity_val_steps=0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )

    def _fit(self, trainer: pl.Trainer, module: SoloModule) -> Ending:
        """Run Lightning's loops; a divergence is an ending like any other."""
        config = self.config
        source = WindowSource(
            module,
            IndexStream(self.facts.plan, self.seed),
            self.data,
            {
                "crop_padding": config.data.augment.crop_padding,
                "horizontal_flip": config.data.augment.horizontal_flip,
            },
            config.trainer.window_updates,
        )
        with quiet_lightning():
            try:
                trainer.fit(module, source, self._evaluation_source(module, self.data.val))
                test = self._evaluation_source(module, self.data.test)
                trainer.test(module, test, verbose=False)
            except Diverged as outcome:
                return Ending("diverged", outcome.reason)
            finally:
                module.end_evaluation()
        return Ending("completed")

    def _probe_start(self, trainer: pl.Trainer) -> dict[str, float]:
        """Return what the configured probes find in the initial model, and note their reports.

        The model is built anew, also where the run goes on from a checkpoint: what is found
        follows from seed and data, so a resumed run finds the same.
        """
        if "initial_gradients" not in self.config.probes:
            return {}
        start = build_start(self.config, self.data, seed=self.seed, lr=self.config.scaled_lr)
        with trainer.precision_plugin.forward_context():
            metrics, reports = run_initial_probes(
                self.config.probes,
                start.model.to(trainer.strategy.root_device),
                self.data.train,
                micro_batch_size=self.config.micro_batch_size,
                is_trimmed=self.data.is_trimmed,
            )
        self.reports |= reports
        return metrics

    def _probe(self, module: SoloModule) -> dict[str, float]:
        """Return what the configured probes find in the trained model, and note their reports."""
        metrics, reports = run_probes(
            self.config.probes,
            module.model,
            module.split_on_device(self.data.train).inputs,
            batch_size=self.config.trainer.eval_batch_size,
        )
        self.reports |= reports
        return metrics

    def _write_summary(
        self, module: SoloModule, ending: Ending, extra: dict[str, float], resumed_from: int
    ) -> None:
        """Write the last file of a run: with it, the run has ended."""
        summary = build_summary(
            self.facts,
            run_id=self.identifier,
            seed=self.seed,
            status=ending.status,
            reason=ending.reason,
            metrics={**module.recorder.latest, **extra},
            updates=module.update,
            texts=count_texts(self.data, self.facts.plan, seed=self.seed, updates=module.update),
            wall_s=module.recorder.wall_s,
            resumed_from_update=resumed_from,
            parameter_groups=[group.describe() for group in self.groups],
            probes=self.reports,
        )
        write_json(self.folder / SUMMARY_FILE, summary)
        if ending.status in FINAL_STATUSES:
            (self.folder / CHECKPOINT_FILE).unlink(missing_ok=True)
            (self.folder / JOURNAL_FILE).unlink(missing_ok=True)


def _describe_failure(exception: Exception, folder: Path) -> Ending:
    """Return the ending of a run that raised; the traceback goes beside the record."""
    (folder / "error.txt").write_text("".join(traceback.format_exception(exception)))
    lines = str(exception).strip().splitlines() or ["no message"]
    return Ending("failed", f"{type(exception).__name__}: {lines[0]}")
