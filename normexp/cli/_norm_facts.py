"""What inspect tells of each norm layer of a model: its statistics, its cost, its traps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from normexp.errors import UserError
from normexp.norms import (
    NORMS,
    NormCard,
    NormLayer,
    NormRecord,
    count_channels,
)
from normexp.training.positions import find_leak, gets_mask, kernel_of, mixes_positions

# Of M values, their mean and variance are two: what is left has M - 2 degrees of freedom, and no
# output lies beyond sqrt(M - 1) standard deviations. At M = 2 nothing is left but a sign; at 4 the
# two statistics still take half of what there is.
NEARLY_FIXED_M = 4
# The variance of M independent normal values has a relative standard deviation of
# sqrt(2 / (M - 1)): still more than half at 8. (Positions of one image are not independent, so it
# is rather more.)
NOISY_M = 8

# With momentum m running statistics still are (1 - m)^n of what they started as after n batches.
MUCH_OF_THE_START = 0.05

# Their statistics are over the samples of all ranks; every other norm sees one rank's.
_SYNCHRONIZED = ("sync_batch_norm",)

Scope = Literal["layer", "model"]


@dataclass(frozen=True)
class Finding:
    """Something that a user may not have meant.

    Attributes:
        code: What it is, in one word, for programs.
        scope: Whether it is about the layer or about the whole model, and then told at each layer
            that it concerns.
        message: What it is, in one line.
    """

    code: str
    scope: Scope
    message: str


@dataclass(frozen=True)
class StatisticFacts:
    """One statistic of a layer: its axes, its M, and M where ``world_size`` ranks train."""

    axes: tuple[str, ...]
    size: int
    size_at_world_size: int


@dataclass(frozen=True)
class NormFacts:
    """All that inspect tells of a norm layer or a normalized weight.

    Attributes:
        path: Dotted name of the module.
        role: Its place in the model.
        norm: The norm.
        acts_on: Whether it normalizes its input or the weight of a convolution or linear layer.
        shape: Of the input in one micro-step, the micro-batch first; or of the weight.
        statistics: Its statistics; a weight's are over the fan-in of one output.
        M: Elements of the smallest statistic set; None without a statistic.
        M_at_world_size: The same where so many ranks train with this micro-batch each.
        world_size: Ranks.
        kernel: One fused kernel, a composite of several, or none, on the device of the cell; None
            for a weight.
        kernel_words: What computes it; the formula of a weight.
        num_parameters: Numbers to learn.
        params: Options of the norm.
        warnings: What the user may not have meant.
        refusal: What training would answer, if it would refuse this layer.
    """

    path: str
    role: str
    norm: str
    acts_on: Literal["input", "weight"]
    shape: tuple[int, ...]
    statistics: tuple[StatisticFacts, ...]
    M: int | None
    M_at_world_size: int | None
    world_size: int
    kernel: str | None
    kernel_words: str
    num_parameters: int
    params: dict[str, Any]
    warnings: tuple[Finding, ...]
    refusal: str | None


@dataclass(frozen=True)
class Setting:
    """What the facts of a layer depend on beside the layer.

    Attributes:
        device: "cpu" or "cuda".
        micro_batch_size: Samples in one forward pass of one rank.
        accumulation_steps: Micro-batches in an update.
        num_micro_batches: Micro-batches of the whole budget.
        world_size: Ranks to tell M for.
        has_padding: Whether the data are texts with positions that are not valid.
        is_trimmed: Whether a batch of texts is cut to its longest text.
    """

    device: Literal["cpu", "cuda"]
    micro_batch_size: int
    accumulation_steps: int
    num_micro_batches: int
    world_size: int
    has_padding: bool
    is_trimmed: bool


def describe_layer(
    layer: NormLayer, model: nn.Module, setting: Setting, refusal: UserError | None
) -> NormFacts:
    """Return the facts of a norm layer, and the answer of training if it would refuse it."""
    card = NORMS.get(layer.name).card
    ranks = setting.world_size if layer.name in _SYNCHRONIZED else 1
    statistics = tuple(
        StatisticFacts(axes, size, size * ranks if "batch" in axes else size)
        for axes, size in zip(layer.statistic_sets, layer.statistic_set_sizes, strict=True)
    )
    module = model.get_submodule(layer.path)
    return NormFacts(
        path=layer.path,
        role=layer.role,
        norm=layer.name,
        acts_on="input",
        shape=layer.input_shape,
        statistics=statistics,
        M=layer.statistic_set_size,
        M_at_world_size=min((s.size_at_world_size for s in statistics), default=None),
        world_size=setting.world_size,
        kernel=kernel_of(module, card, model, setting.device),
        kernel_words=card.kernel,
        num_parameters=sum(p.numel() for p in module.parameters()),
        params=layer.params,
        warnings=tuple(_find_warnings(layer, card, model, setting)),
        refusal=None if refusal is None else str(refusal),
    )


def describe_weights(model: nn.Module, setting: Setting) -> list[NormFacts]:
    """Return the facts of every weight that a norm acts on, in the order of the model."""
    found = []
    for path, module in model.named_modules():
        record = getattr(module, "weight_norm_record", None)
        if not isinstance(record, NormRecord):
            continue
        card = NORMS.get(record.name).card
        assert card.weight is not None
        fan_in = math.prod(module.weight.shape[1:])
        own = sum(p.numel() for name, p in module.named_parameters() if not name.endswith("bias"))
        raw = math.prod(module.weight.shape)
        found.append(
            NormFacts(
                path=path,
                role=record.role,
                norm=record.name,
                acts_on="weight",
                shape=tuple(module.weight.shape),
                statistics=(StatisticFacts(("fan-in",), fan_in, fan_in),),
                M=fan_in,
                M_at_world_size=fan_in,
                world_size=setting.world_size,
                kernel=None,
                kernel_words=card.weight.formula,
                num_parameters=own - raw,
                params=record.params,
                warnings=tuple(_find_weight_warnings(fan_in, card.weight.is_centring)),
                refusal=None,
            )
        )
    return found


def _find_weight_warnings(fan_in: int, is_centring: bool) -> Iterator[Finding]:
    if fan_in == 1:
        left = "zero" if is_centring else "its sign"
        yield Finding("single_value", "layer", f"M = 1: of each weight only {left} is left")
    elif fan_in == 2 and is_centring:
        yield Finding("fixed_output", "layer", "M = 2: of two weights only the larger's place")


def _find_warnings(
    layer: NormLayer, card: NormCard, model: nn.Module, setting: Setting
) -> Iterator[Finding]:
    """Yield what the user may not have meant with a layer."""
    sizes = list(zip(layer.statistic_sets, layer.statistic_set_sizes, strict=True))
    for axes, size in sizes:
        yield from _find_few_values(axes, size, card, is_only=len(sizes) == 1)
    yield from _find_other_name(layer)
    if find_leak([layer], model) is not None:
        yield Finding(
            "leak", "model", "mixes positions in a causal model: each one sees what follows it"
        )
    yield from _find_padding(layer, model, setting)
    is_by_batch = any({"batch", "ghost"} & set(axes) for axes, _ in sizes)
    if is_by_batch and setting.accumulation_steps > 1:
        micro, steps = setting.micro_batch_size, setting.accumulation_steps
        yield Finding(
            "statistics_per_micro_batch",
            "model",
            f"statistics are over each micro-batch of {micro}, not over the {micro * steps} "
            "samples of an update",
        )
    ghost = layer.params.get("ghost_size")
    if ghost is not None and ghost > setting.micro_batch_size:
        yield Finding(
            "one_ghost",
            "model",
            f"ghost_size = {ghost} is larger than the micro-batch of {setting.micro_batch_size}: "
            "one chunk, as in batch_norm",
        )
    yield from _find_short_budget(layer, card, setting)
    module = model.get_submodule(layer.path)
    if kernel_of(module, card, model, setting.device) == "composite":
        yield Finding(
            "composite_kernel",
            "model",
            f"no fused kernel on {setting.device}: a time measured here is of several kernels",
        )


def _find_padding(layer: NormLayer, model: nn.Module, setting: Setting) -> Iterator[Finding]:
    """Yield what the shape and M of a layer on padded texts do not tell."""
    if setting.is_trimmed:
        yield Finding(
            "longest_text",
            "model",
            "shape and M are of the longest text of all; each batch is cut to its own longest",
        )
    if not setting.has_padding or not mixes_positions(layer):
        return
    if gets_mask(model.get_submodule(layer.path), model):
        message = "M counts padding too: statistics are over the valid positions, which are fewer"
        yield Finding("valid_positions", "model", message)
    else:
        yield Finding("sees_padding", "model", "no mask: statistics are over padding too")


def _find_short_budget(layer: NormLayer, card: NormCard, setting: Setting) -> Iterator[Finding]:
    """Yield a warning where the budget ends before the norm is what its name says."""
    num_batches = setting.num_micro_batches
    warmup = layer.params.get("warmup_micro_batches")
    if warmup is not None and warmup >= num_batches:
        yield Finding(
            "warmup_beyond_budget",
            "model",
            f"warmup_micro_batches = {warmup:,} is no less than the {num_batches:,} micro-batches "
            "of the budget: the norm stays in its warm-up",
        )
    momentum = layer.params.get("momentum")
    if card.is_same_in_eval or momentum is None or "running_var" not in card.state:
        return
    ghost = layer.params.get("ghost_size")
    chunks = 1 if ghost is None else max(1, setting.micro_batch_size // ghost)
    left = (1.0 - momentum) ** (num_batches * chunks)
    if left > MUCH_OF_THE_START:
        yield Finding(
            "slow_running_statistics",
            "model",
            f"after the {num_batches:,} micro-batches of the budget, running statistics with "
            f"momentum {momentum:g} still are {left:.0%} of what they started as",
        )


def _find_few_values(
    axes: tuple[str, ...], size: int, card: NormCard, *, is_only: bool
) -> Iterator[Finding]:
    """Yield a warning where a statistic is over few values, by the first rule that holds."""
    over = " x ".join(axes)
    # A function of two values that neither a shift nor a positive factor changes knows no more
    # than which is larger.
    is_invariant = card.is_shift_invariant and card.is_scale_invariant
    if size == 2 and is_invariant and is_only and not card.includes_activation:
        level = "+1 or -1" if card.divisor == "M" else "one of two numbers"
        yield Finding(
            "fixed_output",
            "layer",
            f"M = 2 ({over}): every output is {level} before gain and shift, whatever the input",
        )
    elif 1 < size <= NOISY_M and {"batch", "ghost"} & set(axes):
        spread = f"the variance of {size} values scatters by {math.sqrt(2 / (size - 1)):.0%}"
        if size <= NEARLY_FIXED_M:
            yield Finding(
                "nearly_fixed_output", "layer", f"M = {size} ({over}): nearly fixed; {spread}"
            )
        else:
            yield Finding("noisy_statistics", "layer", f"M = {size} ({over}): noisy; {spread}")


def _find_other_name(layer: NormLayer) -> Iterator[Finding]:
    """Yield a warning where groups are so many or so few that the norm is another one."""
    groups, is_features = layer.params.get("num_groups"), len(layer.input_shape) == 2
    if groups is None or not any("group" in axes for axes in layer.statistic_sets):
        return
    channels = count_channels(layer.input_shape)
    is_group_norm = layer.name == "group_norm"
    if groups == channels:
        told = ": this is instance_norm" if is_group_norm and not is_features else ""
        message = f"as many groups as channels ({groups}){told}"
        yield Finding("one_channel_a_group", "layer", message)
    elif groups == 1:
        other = "layer_norm" if is_features else "layer_norm_chw"
        told = f": this is {other}" if is_group_norm else ""
        yield Finding("one_group", "layer", f"one group of all {channels} channels{told}")
