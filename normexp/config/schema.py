"""What a cell's configuration may hold, typed. Hydra checks YAML and command line against it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

# OmegaConf reads these annotations at run time and knows Optional[...] but not "X | None".
# ruff: noqa: UP045


@dataclass
class AugmentConfig:
    """Random changes of training images, drawn per sample from (seed, update)."""

    crop_padding: int = 0
    horizontal_flip: bool = False


@dataclass
class DataConfig:
    """A data set and how its training images are changed."""

    name: str = MISSING
    params: dict[str, Any] = field(default_factory=dict)
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass
class ModelConfig:
    """A model family and its sizes."""

    name: str = MISSING
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class RoleNormConfig:
    """The norm of one layer role; without a name the role has the norm of all."""

    name: Optional[str] = None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolesConfig:
    """Exceptions by layer role."""

    stem: RoleNormConfig = field(default_factory=RoleNormConfig)
    block: RoleNormConfig = field(default_factory=RoleNormConfig)
    downsample: RoleNormConfig = field(default_factory=RoleNormConfig)
    final: RoleNormConfig = field(default_factory=RoleNormConfig)
    attention: RoleNormConfig = field(default_factory=RoleNormConfig)
    mlp: RoleNormConfig = field(default_factory=RoleNormConfig)
    qk: RoleNormConfig = field(default_factory=RoleNormConfig)

    def chosen(self) -> dict[str, dict[str, Any]]:
        """Return the roles that have a norm of their own."""
        return {role: own for role, own in dataclasses.asdict(self).items() if own["name"]}


@dataclass
class NormConfig:
    """The norm of every layer; ``roles`` says otherwise for a layer role."""

    name: str = MISSING
    params: dict[str, Any] = field(default_factory=dict)
    roles: RolesConfig = field(default_factory=RolesConfig)


@dataclass
class PlacementConfig:
    """Where the norm stands in a residual block, by formula."""

    name: str = MISSING


@dataclass
class LrFactorsConfig:
    """What the learning rate is multiplied with, by the role of a parameter."""

    weight: float = 1.0
    bias: float = 1.0
    norm: float = 1.0
    skip: float = 1.0


@dataclass
class OptimizerConfig:
    """The rule of an update. ``lr`` is the rate before ``lr_scaling``.

    ``adaptive_clip`` is the largest ratio of a gradient's norm to its weight's; null for none.
    """

    name: str = MISSING
    lr: float = MISSING
    weight_decay: float = MISSING
    decay_roles: list[str] = field(default_factory=lambda: ["weight"])
    params: dict[str, Any] = field(default_factory=dict)
    lr_factors: LrFactorsConfig = field(default_factory=LrFactorsConfig)
    adaptive_clip: Optional[float] = None


@dataclass
class ScheduleConfig:
    """The learning rate over the budget: linear warm-up over a fraction of it, then a shape."""

    name: str = MISSING
    warmup_fraction: float = 0.0
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class LrScalingConfig:
    """How the rate follows the effective batch: none, linear or sqrt of it over the base."""

    rule: str = "none"
    base_batch_size: int = 32


@dataclass
class BudgetConfig:
    """How long to train; exactly one is set. An epoch is the size of the training split."""

    epochs: Optional[float] = None
    samples: Optional[int] = None
    updates: Optional[int] = None


@dataclass
class EvaluationConfig:
    """The statistics that batch norms use in evaluations.

    ``running``: as training left them. ``reestimated``: computed anew before each evaluation, in
    batches of ``batch_size`` of the first ``num_samples`` training samples, then put back.
    ``batch``: those of each batch of ``batch_size``; the last one is filled up with the samples
    before it, which do not count twice. Keys without effect are null in a resolved cell.
    """

    statistics: str = "running"
    estimator: Optional[str] = "population"
    num_samples: Optional[int] = None
    batch_size: Optional[int] = 128


@dataclass
class TrainerConfig:
    """How the work is carried out."""

    accelerator: str = "cpu"
    num_threads: int = 1
    window_updates: int = 50
    eval_batch_size: int = 512
    checkpoint_interval_s: float = 60.0


@dataclass
class LoggerConfig:
    """Trackers that mirror a run's rows: name to parameters."""

    trackers: dict[str, Any] = field(default_factory=dict)


@dataclass
class SelectConfig:
    """Which level of a factor stands for an arm: the best mean of a validation metric.

    Without a factor nothing is selected; without a metric, by val/accuracy.
    """

    factor: Optional[str] = None
    metric: Optional[str] = None


@dataclass
class TargetConfig:
    """What a run is to reach to count as a success, at any evaluation; null for no target."""

    metric: Optional[str] = None
    value: Optional[float] = None


@dataclass
class ExperimentConfig:
    """A named set of cells with a question.

    ``grid`` is a list of blocks; a block maps override keys to the values they take, and
    stands for all their combinations.
    """

    name: Optional[str] = None
    title: Optional[str] = None
    question: Optional[str] = None
    expected: Optional[str] = None
    grid: list[Any] = field(default_factory=list)
    select: Optional[SelectConfig] = field(default_factory=SelectConfig)
    target: Optional[TargetConfig] = field(default_factory=TargetConfig)
    figures: list[str] = field(default_factory=list)

    def plain_select(self) -> Optional[dict[str, Any]]:
        """Return what is selected by in plain containers, None where nothing is."""
        plain = dataclasses.asdict(self.select) if self.select else {}
        return {name: value for name, value in plain.items() if value is not None} or None

    def plain_target(self) -> Optional[dict[str, Any]]:
        """Return the target in plain containers, None without one."""
        plain = dataclasses.asdict(self.target) if self.target else {}
        return plain if any(value is not None for value in plain.values()) else None


@dataclass
class CellConfig:
    """One full configuration: a cell and the seeds to run it with."""

    name: str = "scratch"
    output_root: str = "results"
    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    plugins: list[str] = field(default_factory=list)
    plugins_sha256: list[str] = field(default_factory=list)  # filled in: what the plugins say
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    norm: NormConfig = field(default_factory=NormConfig)
    placement: Optional[PlacementConfig] = field(default_factory=PlacementConfig)
    allow_leak: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lr_scaling: LrScalingConfig = field(default_factory=LrScalingConfig)
    micro_batch_size: int = 32
    accumulation_steps: int = 1
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    num_evaluations: int = 8
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    precision: str = "32-true"
    probes: list[str] = field(default_factory=list)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    @property
    def effective_batch_size(self) -> int:
        """Samples of one update on one device: derived, never set."""
        return self.micro_batch_size * self.accumulation_steps

    @property
    def scaled_lr(self) -> float:
        """Peak learning rate after ``lr_scaling``."""
        ratio = self.effective_batch_size / self.lr_scaling.base_batch_size
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scaling.rule]
        return float(self.optimizer.lr * ratio**power)

    def to_plain(self) -> dict[str, Any]:
        """Return plain containers, as ``config.yaml`` of a run holds them."""
        plain = dataclasses.asdict(self)
        plain["experiment"] = self.experiment.name
        plain["norm"]["roles"] = self.norm.roles.chosen()
        return plain
