"""What a card and a builder must be at all: kinds of values, inputs, parameters, options."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

import torch

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import (
    DISTINCT,
    EQUAL,
    Shape,
    Subject,
    draw,
    find_condition_options,
    find_small_options,
    resolve_shape,
    tell,
)
from normexp.errors import UserError
from normexp.norms import NormCard, WeightCard, compute_statistic_set_size, count_channels

_DIMS = (0, 1, 2)


@contract_check(
    "Every field holds a value of its kind, and what is text says something.",
    fields=tuple(field.name for field in dataclasses.fields(NormCard)),
)
def try_well_formed(subject: Subject) -> Iterator[str]:
    """Look at the card itself."""
    card = subject.card
    yield from _check_kinds(card, "")
    if card.weight is not None:
        yield from _check_kinds(card.weight, "weight.")
    if set(card.statistic_sets) != set(card.dims):
        yield (
            f"statistic_sets is declared for dims {sorted(card.statistic_sets)}, dims for "
            f"{sorted(card.dims)}; they must be the same"
        )
    if ("none" in (card.kernel_cpu, card.kernel_cuda)) and card.kernel_cpu != card.kernel_cuda:
        yield (
            f"kernel_cpu={card.kernel_cpu}, kernel_cuda={card.kernel_cuda}: with nothing to "
            "compute on one device there is nothing on the other"
        )


def _check_kinds(card: NormCard | WeightCard, prefix: str) -> Iterator[str]:
    """Yield what has a value of another kind than its annotation, or is empty text."""
    hints = typing.get_type_hints(type(card))
    for field in dataclasses.fields(card):
        value = getattr(card, field.name)
        if not _fits(value, hints[field.name]):
            kind = _tell_kind(hints[field.name])
            yield f"{prefix}{field.name}={value!r} is not a value of its kind: {kind}"
        elif hints[field.name] is str and not value.strip():
            yield f"{prefix}{field.name} is empty; a reader needs it"


def _tell_kind(hint: Any) -> str:
    """Return in words what fits an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_tell_kind(option) for option in arguments)
    if origin is typing.Literal:
        return " or ".join(repr(value) for value in arguments)
    if origin is tuple:
        return f"a tuple of ({_tell_kind(arguments[0])})"
    if origin is dict:
        return f"a dict from {_tell_kind(arguments[0])} to {_tell_kind(arguments[1])}"
    return "None" if hint is type(None) else getattr(hint, "__name__", "a function")


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a value fits an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        key, item = arguments
        return isinstance(value, dict) and all(
            _fits(k, key) and _fits(v, item) for k, v in value.items()
        )
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint) if isinstance(hint, type) else callable(value)


@contract_check(
    "It builds and keeps shape and type for the declared inputs, and refuses all others in one "
    "line.",
    fields=("dims",),
)
def try_dims(subject: Subject) -> Iterator[str]:
    """Build and call the norm for every kind of input."""
    for dims in _DIMS:
        shape = DISTINCT[dims]
        if dims not in subject.card.dims:
            yield from _check_refusal(subject, dims)
            continue
        problem = _find_call_problem(subject, shape)
        if problem is not None:
            subject.is_callable = False
            works = _find_call_problem(subject, EQUAL[dims]) is None
            equal = f", though not on {tell(EQUAL[dims])}: it takes one axis for another"
            yield (
                f"dims={subject.card.dims} is declared, but an input {tell(shape)} ends in "
                f"{problem}{equal if works else ''}"
            )
            continue
        for dtype in (torch.float32, torch.float64):
            y = subject.specimen(shape, dtype=dtype)(draw(shape, "dims").to(dtype))
            if tuple(y.shape) != shape or y.dtype != dtype:
                yield (
                    f"dims={subject.card.dims}: an input {tell(shape)} of {dtype} came out as "
                    f"{tell(y.shape)} of {y.dtype}"
                )
    yield from _check_refusal(subject, 3)


def _find_call_problem(subject: Subject, shape: tuple[int, ...]) -> str | None:
    """Return the error that building and calling the layer ends in; None if it works."""
    try:
        subject.specimen(shape)(draw(shape, "dims"))
    except Exception as error:  # a user's layer may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _check_refusal(subject: Subject, dims: int) -> Iterator[str]:
    """Yield unless the builder refuses inputs with so many position axes, in one line."""
    try:
        subject.entry.build(8, dims=dims, **find_small_options(subject.entry))
    except UserError as error:
        if len(str(error).splitlines()) != 1:
            yield f"dims: the refusal of dims={dims} is not one line"
    except Exception as error:
        yield (
            f"dims={subject.card.dims} is declared; a builder refuses dims={dims} with a "
            f"UserError, this one raised {type(error).__name__}: {error}"
        )
    else:
        yield f"dims={subject.card.dims} is declared, but the builder also takes dims={dims}"


@contract_check(
    "The parameters have the declared names and shapes; affine=False leaves no gain and shift.",
    fields=("parameters",),
)
def try_parameters(subject: Subject) -> Iterator[str]:
    """Compare the layer's parameters with the card's."""
    for specimen in subject.specimens():
        sizes = specimen.options | {"C": count_channels(specimen.shape)}
        for option in find_condition_options(subject.entry):
            sizes["Z"] = specimen.options[option]
        found = {key: tuple(p.shape) for key, p in specimen.parameters.items()}
        declared = {}
        for key, symbols in subject.card.parameters.items():
            try:
                declared[key] = resolve_shape(symbols, sizes)
            except (KeyError, TypeError, ValueError):
                yield f"parameters: {key} has the shape {symbols}, which names no known size"
                return
        if found != declared:
            yield (
                f"parameters={_tell_shapes(declared)} is declared for C={sizes['C']}; found "
                f"{_tell_shapes(found)}"
            )
    if "affine" in subject.option_names:
        for specimen in subject.specimens(affine=False):
            left = {"weight", "bias"} & specimen.parameters.keys()
            if left:
                yield f"parameters: with affine=False there is still {' and '.join(sorted(left))}"
            specimen(draw(specimen.shape, "affine"))


def _tell_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {tell(shape)}" for key, shape in shapes.items()) or "none"


@contract_check("Every parameter gets a finite gradient, and one that is not zero.")
def try_parameter_gradients(subject: Subject) -> Iterator[str]:
    """Look at the gradients of a random loss at parameters off their start."""
    if not subject.card.parameters:
        raise DoesNotApply("there are no parameters")
    for specimen in subject.specimens():
        x = draw(specimen.shape, "parameter_gradients")
        parameters = {k: p.requires_grad_() for k, p in specimen.parameters.items()}
        y = specimen(x)
        torch.autograd.backward((y * draw(tuple(y.shape), "loss")).sum())
        for key, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None or not bool(gradient.any()):
                yield f"parameters: {key} has no gradient on an input {tell(specimen.shape)}"
            elif not bool(gradient.isfinite().all()):
                yield f"parameters: the gradient of {key} is not finite"


@contract_check(
    "A layer that tells why it cannot work on an input (find_problem) is right about it."
)
def try_find_problem(subject: Subject) -> Iterator[str]:
    """Compare what it tells with what a call does, with fewer samples and fewer positions."""
    layers = subject.specimens()
    if not any(hasattr(specimen.module, "find_problem") for specimen in layers):
        raise DoesNotApply("no layer has find_problem")
    for specimen in layers:
        shape = specimen.shape
        fewer = [(n, *shape[1:]) for n in (shape[0] - 1, 2, 1)]
        if len(shape) > 2:
            fewer += [(shape[0], 2, *shape[2:]) if len(shape) == 3 else (*shape[:2], 1, 2)]
        for candidate in (shape, *fewer):
            problem = specimen.module.find_problem(candidate)  # type: ignore[operator]
            try:
                specimen(draw(candidate, "find_problem"))
            except (ValueError, RuntimeError) as error:
                if problem is None and not _has_single_value(subject, candidate, specimen.options):
                    yield (
                        f"find_problem sees none on {tell(candidate)}, but a call ends in "
                        f"{type(error).__name__}: {error}"
                    )
                continue
            if problem is not None:
                yield f"find_problem says {problem!r} on {tell(candidate)}, but a call works"


def _has_single_value(subject: Subject, shape: Shape, options: dict[str, Any]) -> bool:
    """Tell whether a statistic set has one value, which the check before training finds."""
    sets = subject.card.statistic_sets[len(shape) - 2]
    return any(compute_statistic_set_size(axes, shape, options) == 1 for axes in sets)
