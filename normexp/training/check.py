"""All that can be known of a cell before it trains: its model, its accounting, its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from normexp.config.metrics import TEXT_METRICS
from normexp.config.schema import CellConfig, NormConfig
from normexp.config.validate import budget_samples, check_fields
from normexp.data import Dataset, DatasetFacts, load_dataset
from normexp.data.batches import UpdatePlan
from normexp.errors import UserError
from normexp.models import MODELS, build_model
from normexp.norms import (
    NormFactory,
    NormLayer,
    check_statistic_sets,
    describe_norm_layers,
)
from normexp.records import cell_name, run_dir
from normexp.training.clipping import build_adaptive_clip
from normexp.training.evaluation import check_evaluation
from normexp.training.optim import (
    OPTIMIZERS,
    SCHEDULES,
    ParameterGroup,
    build_optimizer,
    check_decay_roles,
)
from normexp.training.positions import (
    check_causality,
    check_padding,
    check_pooling,
    find_leak,
    measure_leak,
)
from normexp.training.trackers import check_trackers


@dataclass(frozen=True)
class CellFacts:
    """What a checked cell is.

    Attributes:
        cell: Name of the cell's folder.
        plan: Accounting of its runs.
        norm_layers: Every norm layer with its statistic set at this micro-batch.
        num_parameters: Numbers that the optimizer changes.
        data_fingerprint: Hash over the data set's tensors.
        input_shape: Channels, height and width of an image, or the positions of a text.
        is_leaking: Whether positions of a causal model see later ones through a norm.
    """

    cell: str
    plan: UpdatePlan
    norm_layers: tuple[NormLayer, ...]
    num_parameters: int
    data_fingerprint: str
    input_shape: tuple[int, ...]
    is_leaking: bool = False

    @property
    def min_statistic_set(self) -> int | None:
        """Size of the smallest statistic set of the model; None without a norm."""
        sizes = [layer.statistic_set_size for layer in self.norm_layers]
        return min((size for size in sizes if size is not None), default=None)

    def run_dir(self, config: CellConfig, seed: int) -> Path:
        """Return the folder of one of the cell's runs."""
        return run_dir(config.output_root, config.name, self.cell, seed)


def check_cell(config: CellConfig) -> CellFacts:
    """Check a cell as far as it can be checked without training, and tell what it is.

    The model is built and run once on the meta device, which computes shapes but no numbers.

    Args:
        config: A composed cell.

    Raises:
        UserError: On the first thing that cannot work.
    """
    check_fields(config)
    _check_optimization(config)
    check_decay_roles(config.optimizer.decay_roles)
    check_trackers(config.logger.trackers)
    _check_device(config)
    data = load_dataset(config.data.name, config.data.params)
    _check_augmentation(config, data)
    _check_target(config, data)
    plan = build_plan(config, data)
    with torch.device("meta"):
        model = build_cell_model(config, data)
    layers = describe_norm_layers(model, data.input_shape, config.micro_batch_size)
    for refusal in find_refusals(layers, model, data, allow_leak=config.allow_leak).values():
        raise refusal
    is_leaking = tell_leak(config, data, layers, model)
    if is_leaking and not config.allow_leak:
        expected = "its card says that positions do not mix, but this causal model's logits change "
        expected += f"with tokens that come later; normexp check {config.norm.name} says more"
        raise UserError("norm", config.norm.name, expected)
    if config.optimizer.adaptive_clip is not None:
        build_adaptive_clip(model, config.optimizer.adaptive_clip)
    check_evaluation(config, data, model)
    return CellFacts(
        cell=cell_name(config.to_plain(), data.fingerprint),
        plan=plan,
        norm_layers=tuple(layers),
        num_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        data_fingerprint=data.fingerprint,
        input_shape=data.input_shape,
        is_leaking=is_leaking,
    )


def tell_leak(
    config: CellConfig, data: Dataset, layers: Sequence[NormLayer], model: nn.Module
) -> bool:
    """Tell whether positions of a causal model see later ones; own norms are put to the test."""
    if find_leak(layers, model) is not None:
        return True
    if not config.plugins or data.tokens is None or not getattr(model, "is_causal", False):
        return False
    return measure_leak(
        build_cell_model(config, data), data.tokens.vocabulary_size, data.input_shape[0]
    )


def find_refusals(
    layers: Sequence[NormLayer],
    model: nn.Module,
    data: Dataset | DatasetFacts,
    *,
    allow_leak: bool,
) -> dict[str, UserError]:
    """Return why norm layers cannot do their work on the data, by path and in their order.

    Args:
        layers: All norm layers of a model, in the order of the forward pass.
        model: Their model.
        data: Its data set, or what is known of it.
        allow_leak: Whether positions of a causal model may see later ones.
    """
    found = {}
    for layer in layers:
        try:
            check_statistic_sets([layer])
            check_padding([layer], model, data)
            if layer is layers[-1]:
                check_pooling(layer, model)
            if not allow_leak:
                check_causality([layer], model)
        except UserError as error:
            found[layer.path] = error
    return found


def build_plan(config: CellConfig, data: Dataset) -> UpdatePlan:
    """Return the accounting of a cell's runs.

    Raises:
        UserError: If an update needs more samples than there are, or evaluations outnumber
            updates.
    """
    num_train = len(data.train)
    if config.micro_batch_size > num_train:
        raise UserError(
            "micro_batch_size",
            config.micro_batch_size,
            f"the training split of {data.name} has {num_train} samples; {num_train} or fewer",
        )
    if config.effective_batch_size > num_train:
        most = num_train // config.micro_batch_size
        raise UserError(
            "accumulation_steps",
            config.accumulation_steps,
            f"{config.micro_batch_size} x {config.accumulation_steps} samples an update, but the "
            f"training split of {data.name} has {num_train}; {most} or fewer",
        )
    plan = UpdatePlan(
        num_train=num_train,
        micro_batch_size=config.micro_batch_size,
        accumulation_steps=config.accumulation_steps,
        budget_samples=budget_samples(config, num_train),
        num_evaluations=config.num_evaluations,
    )
    if config.num_evaluations > plan.num_updates:
        raise UserError(
            "num_evaluations",
            config.num_evaluations,
            f"the budget gives {plan.num_updates} updates; {plan.num_updates} or fewer",
        )
    return plan


def build_cell_model(config: CellConfig, data: Dataset | DatasetFacts) -> nn.Module:
    """Return the cell's model, not yet initialised.

    Raises:
        UserError: If the choices do not fit each other.
    """
    return build_model(
        config.model.name,
        config.model.params,
        input_shape=data.input_shape,
        num_classes=data.num_classes,
        norm=build_norm_factory(config.norm),
        placement=placement_of(config),
        tokens=data.tokens,
    )


def build_norm_factory(norm: NormConfig) -> NormFactory:
    """Return what builds the norm layers of a model."""
    return NormFactory(norm.name, norm.params, norm.roles.chosen())


def placement_of(config: CellConfig) -> str | None:
    """Return the placement that a model uses: None if it has no residual branch."""
    card = MODELS.get(config.model.name, key="model").card
    if not card.placements or config.placement is None:
        return None
    return config.placement.name


def _check_optimization(config: CellConfig) -> None:
    """Raise unless optimizer and schedule can be built with these numbers."""
    optimizer, schedule = config.optimizer, config.schedule
    OPTIMIZERS.get(optimizer.name, key="optimizer").check_params(
        optimizer.params, key="optimizer.params"
    )
    entry = SCHEDULES.get(schedule.name, key="schedule")
    entry.check_params(schedule.params, key="schedule.params")
    weight = torch.zeros(1, requires_grad=True)
    group = ParameterGroup("weight", optimizer.weight_decay, (weight,))
    try:
        build_optimizer(optimizer.name, [group], lr=config.scaled_lr, params=optimizer.params)
    except ValueError as error:
        raise UserError("optimizer.params", optimizer.params, str(error)) from error
    try:
        entry.build(**schedule.params)
    except ValueError as error:
        raise UserError("schedule.params", schedule.params, str(error)) from error


def _check_augmentation(config: CellConfig, data: Dataset) -> None:
    if data.tokens is None:
        return
    for key, value in asdict(config.data.augment).items():
        if value:
            raise UserError(f"data.augment.{key}", value, f"{data.name} has texts, not images")


def _check_target(config: CellConfig, data: Dataset) -> None:
    """Raise on a target that no run can reach, as nothing measures it."""
    metric = (config.experiment.plain_target() or {}).get("metric")
    if metric not in TEXT_METRICS:
        return
    if data.tokens is None or not data.tokens.is_language_modeling:
        expected = f"{data.name} has labels; val/loss or val/accuracy is needed"
        raise UserError("experiment.target.metric", metric, expected)


def _check_device(config: CellConfig) -> None:
    if config.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer.accelerator", "gpu", "no CUDA device here; cpu or auto")
