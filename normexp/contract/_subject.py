"""A norm under experiment: layers of small size, called without lasting effects."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normexp.norms import RESERVED, NormCard, count_channels
from normexp.random import random_stream
from normexp.registry import Entry

Shape = tuple[int, ...]
State = dict[str, Tensor]

# No two axes of one input have the same extent: a norm that reduces another axis than it says
# cannot hide here.
DISTINCT: dict[int, Shape] = {0: (6, 8), 1: (6, 5, 8), 2: (6, 8, 2, 7)}
# A norm that finds its axes by their extents can hide only here.
EQUAL: dict[int, Shape] = {0: (6, 6), 1: (6, 6, 6), 2: (3, 4, 4, 4)}

# Options that must fit such small inputs; every other one stays at its default.
SMALL_OPTIONS: dict[str, Any] = {
    "num_groups": 2,
    "channels_per_group": None,
    "ghost_size": 3,
    "fraction": 0.5,
    "num_bands": 2,
}
CONDITION_SIZE = 3


class Specimen:
    """One layer, whose calls leave its buffers as they were.

    Args:
        entry: The norm.
        shape: Shape of its inputs.
        is_generic: Whether parameters are moved off the values that they start at, where a gain
            of 0 could hide what goes on.
        is_plain: Whether the parameters that ``plain_at`` names have the values it says.
        dtype: Type of parameters and buffers.
        **options: Options of the builder, over those for small inputs.

    Attributes:
        module: The layer.
        shape: Shape of its inputs.
        options: All options with their values.
        parameters: What it is called with; replace entries at will.
        state: Its buffers; every call works on a copy.
    """

    def __init__(
        self,
        entry: Entry[NormCard],
        shape: Shape,
        *,
        is_generic: bool = True,
        is_plain: bool = False,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        self.card, self.shape, self.dtype = entry.card, shape, dtype
        given = find_small_options(entry) | options
        if self.card.includes_activation:
            given.setdefault("is_activated", True)
        # Whatever a builder draws is the same each time, and leaves the global generator alone.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = entry.build(count_channels(shape), dims=len(shape) - 2, **given)
        self.module: nn.Module = module
        self.module.to(dtype)
        plain = {key: value for key, value in given.items() if key not in RESERVED}
        self.options = entry.complete_params(plain, reserved=RESERVED)
        self.options |= getattr(self.module, "resolved_params", {})
        self.parameters = {k: p.detach().clone() for k, p in self.module.named_parameters()}
        self.state: State = {key: value.clone() for key, value in self.module.named_buffers()}
        if is_generic:
            for key, value in self.parameters.items():
                self.parameters[key] = value + 0.3 * draw(tuple(value.shape), key).to(dtype)
        if is_plain:
            for key in self.card.plain_at.keys() & self.parameters.keys():
                self.parameters[key] = torch.full_like(
                    self.parameters[key], self.card.plain_at[key]
                )

    def __call__(self, x: Tensor, **call: Any) -> Tensor:
        """Return the output; see ``run``."""
        return self.run(x, **call)[0]

    def run(
        self,
        x: Tensor,
        *,
        training: bool = True,
        mask: Tensor | None = None,
        condition: Tensor | None = None,
        state: State | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, State]:
        """Return the output and the buffers after the call.

        Args:
            x: An input.
            training: The mode.
            mask: Valid positions of sequences; None for a call without.
            condition: For norms that take one; by default always the same for a sample.
            state: Buffers before the call instead of the specimen's; they are not changed.
            parameters: Instead of the specimen's.
        """
        after = {key: value.clone() for key, value in (state or self.state).items()}
        arguments: list[Tensor] = [x]
        if self.card.takes_condition:
            arguments.append(self.condition(x) if condition is None else condition)
        keywords = {} if mask is None else {"mask": mask}
        self.module.train(training)
        tensors = {**(self.parameters if parameters is None else parameters), **after}
        y = functional_call(self.module, tensors, tuple(arguments), keywords)
        return y, after

    def condition(self, x: Tensor) -> Tensor:
        """Return a condition for every sample of an input."""
        return draw((x.shape[0], CONDITION_SIZE), "condition").to(x.dtype)

    def stir(self) -> State:
        """Return buffers after some training on data with another mean and scale."""
        state = self.state
        for step in range(3):
            x = 2.0 + 1.5 * draw(self.shape, "stir", step).to(self.dtype)
            y, state = self.run(x.requires_grad_(), state=state)
            if y.requires_grad:  # some buffers change in the backward pass
                torch.autograd.backward(y.square().sum())
        return {key: value.detach() for key, value in state.items()}

    def age(self) -> State:
        """Return buffers after some training, with counters so high that no warm-up is left."""
        return {
            key: value if value.is_floating_point() else torch.full_like(value, 10_000_000)
            for key, value in self.stir().items()
        }


@dataclass(frozen=True)
class Call:
    """One way to call a norm: a specimen, and a mask where it takes one.

    Attributes:
        specimen: The layer.
        mask: Valid positions; None for none.
        where: Shape and mask in words.
    """

    specimen: Specimen
    mask: Tensor | None
    where: str


class Subject:
    """A norm under experiment, with what several checks need computed once.

    Args:
        entry: The norm.

    Attributes:
        is_callable: Whether no call on a declared input has failed so far.
        known: Results that several checks use.
    """

    def __init__(self, entry: Entry[NormCard]) -> None:
        self.entry, self.card, self.name = entry, entry.card, entry.name
        self.option_names = set(entry.parameters()) - RESERVED
        self.is_callable = True
        self.known: dict[Any, Any] = {}

    def specimens(self, **settings: Any) -> list[Specimen]:
        """Return one specimen for each of the norm's ``dims``, no two extents alike."""
        return [self.specimen(DISTINCT[dims], **settings) for dims in self.card.dims]

    def calls(self, **settings: Any) -> list[Call]:
        """Return the ways to call the norm: each of its ``dims``, sequences also with a mask."""
        calls = []
        for specimen in self.specimens(**settings):
            calls.append(Call(specimen, None, tell(specimen.shape)))
            if len(specimen.shape) == 3 and self.card.takes_mask and self.has_mask_argument():
                mask = make_mask(specimen.shape)
                calls.append(Call(specimen, mask, f"{tell(specimen.shape)} with a mask"))
        return calls

    def specimen(self, shape: Shape, **settings: Any) -> Specimen:
        """Return a specimen for inputs of that shape."""
        return Specimen(self.entry, shape, **settings)

    def has_mask_argument(self) -> bool:
        """Tell whether the forward pass of its sequence form has an argument ``mask``."""
        module = self.specimen(DISTINCT[1]).module
        return "mask" in inspect.signature(module.forward).parameters


def find_small_options(entry: Entry[NormCard]) -> dict[str, Any]:
    """Return those options of a norm that must fit small inputs."""
    names = entry.parameters()
    given = getattr(entry.build, "keywords", {})  # of a partial: the user's own
    small = {k: v for k, v in SMALL_OPTIONS.items() if k in names and k not in given}
    if "num_groups" not in small:
        small.pop("channels_per_group", None)
    return small | dict.fromkeys(find_condition_options(entry), CONDITION_SIZE)


def find_condition_options(entry: Entry[NormCard]) -> list[str]:
    """Return the options that say how many numbers a condition has."""
    return [
        name
        for name, parameter in entry.parameters().items()
        if "condition" in name and parameter.annotation in (int, int | None)
    ]


def resolve_shape(symbols: tuple[str, ...], sizes: Mapping[str, Any]) -> Shape:
    """Return the shape that a card writes in symbols.

    Args:
        symbols: One an axis: a number, a name, or a product such as ``2C`` or ``C*num_bands``.
        sizes: What the names stand for.

    Examples:
        >>> resolve_shape(("2C", "Z"), {"C": 8, "Z": 3})
        (16, 3)
    """
    return tuple(_resolve_symbol(symbol, sizes) for symbol in symbols)


def _resolve_symbol(symbol: str, sizes: Mapping[str, Any]) -> int:
    product = 1
    for factor in re.sub(r"^(\d+)(?=[A-Za-z_])", r"\1*", symbol).split("*"):
        product *= int(factor) if factor.isdigit() else int(sizes[factor.strip()])
    return product


def make_mask(shape: Shape) -> Tensor:
    """Return a mask with holes, of sequences of that shape; three or four of five are valid."""
    return (torch.arange(shape[0])[:, None] + torch.arange(shape[1])[None]) % 3 != 0


def draw(shape: Shape, *names: str | int) -> Tensor:
    """Return standard normal numbers in float64 that depend on the names alone."""
    numbers = random_stream(0, "contract", *names).standard_normal(shape)
    return torch.from_numpy(numbers) if shape else torch.tensor(float(numbers))


def tell(shape: Shape | torch.Size) -> str:
    """Return a shape as messages show it."""
    return str(list(shape))


def max_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; NaN counts as infinite."""
    return float((a - b).abs().nan_to_num(nan=float("inf")).max())
