"""Names to builders, with the list of choices in every error."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from normexp.errors import UserError, choices_hint

CardT = TypeVar("CardT")


@dataclass(frozen=True)
class Entry(Generic[CardT]):
    """One registered choice: its name, what builds it, and what is declared about it."""

    kind: str
    name: str
    build: Callable[..., Any]
    card: CardT

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return the keyword-only parameters of the builder: what ``params`` may hold."""
        signature = inspect.signature(self.build, eval_str=True)
        return {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not name.startswith("_")
        }

    def check_params(
        self, params: Mapping[str, Any], *, key: str, reserved: frozenset[str] = frozenset()
    ) -> None:
        """Raise unless every parameter exists and has the type that the builder declares.

        Args:
            params: The user's parameters.
            key: Dotted key of ``params`` in the configuration, for the message.
            reserved: Keyword-only arguments that normexp fills in itself.

        Raises:
            UserError: On an unknown name or a value of the wrong type.
        """
        allowed = {k: p for k, p in self.parameters().items() if k not in reserved}
        for name, value in params.items():
            if name not in allowed:
                raise UserError(
                    f"{key}.{name}",
                    value,
                    f"{self.kind} {self.name} has no such parameter; {choices_hint(name, allowed)}",
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{key}.{name}", value, "a finite number is needed")
            annotation = allowed[name].annotation
            if annotation is not inspect.Parameter.empty and not _matches(value, annotation):
                raise UserError(
                    f"{key}.{name}", value, f"a value of type {_type_name(annotation)} is needed"
                )
        for name, parameter in allowed.items():
            if parameter.default is inspect.Parameter.empty and name not in params:
                raise UserError(
                    f"{key}.{name}", "", f"{self.kind} {self.name} needs this parameter"
                )

    def complete_params(
        self, params: Mapping[str, Any], *, reserved: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        """Return checked parameters in one spelling: defaults written out, 1 as 1.0 for a float.

        So two ways to write one computation are one cell.

        Args:
            params: Parameters that ``check_params`` passed.
            reserved: Keyword-only arguments that normexp fills in itself.
        """
        complete = {}
        for name, parameter in self.parameters().items():
            if name in reserved:
                continue
            value = params.get(name, parameter.default)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            wants_float = parameter.annotation is float or (
                float in typing.get_args(parameter.annotation)
                and int not in typing.get_args(parameter.annotation)
            )
            complete[name] = float(value) if is_whole and wants_float else value
        return complete


class Registry(Generic[CardT]):
    """Choices of one kind; a module that registers is found by importing its package.

    Args:
        kind: What the choices are, in the singular, as in error messages ("norm").
        package: Package whose modules register here, imported on first use; None if the choices
            stand in the registry's own module.
        card_type: Class of the cards; None if any will do.
    """

    def __init__(
        self, kind: str, package: str | None = None, card_type: type[CardT] | None = None
    ) -> None:
        self.kind = kind
        self.package = package
        self.card_type = card_type
        self._entries: dict[str, Entry[CardT]] = {}
        self._discovered = False

    def register(
        self, name: str, card: CardT
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that registers a builder under ``name``.

        Raises:
            ValueError: If the card is of another class, or, when the decorator is applied, the
                name is already taken by another builder.
        """
        if self.card_type is not None and not isinstance(card, self.card_type):
            wanted, found = self.card_type.__name__, type(card).__name__
            raise ValueError(f"{self.kind} {name!r} needs a card: a {wanted}, not {found}")

        def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
            if self.package is None or not build.__module__.startswith(f"{self.package}."):
                self._discover()  # so that a plugin meets the built-in choice of its name
            taken = self._entries.get(name)
            if taken is not None and _origin(taken.build) != _origin(build):
                raise ValueError(f"{self.kind} {name!r} is registered twice; choose another name")
            self._entries[name] = Entry(self.kind, name, build, card)
            return build

        return decorate

    def get(self, name: str, *, key: str | None = None) -> Entry[CardT]:
        """Return the entry of that name.

        Args:
            name: The choice.
            key: Configuration key for the message; the kind by default.

        Raises:
            UserError: If there is no such choice, with close matches and all choices.
        """
        self._discover()
        if name not in self._entries:
            raise UserError(key or self.kind, name, choices_hint(name, self._entries))
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._discover()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[Entry[CardT]]:
        return iter([self.get(name) for name in self.names()])

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def _discover(self) -> None:
        """Import every public module of the package once, so that each registers itself."""
        if self._discovered or self.package is None:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                importlib.import_module(f"{self.package}.{module.name}")


def _origin(build: Callable[..., Any]) -> tuple[str, str]:
    """Return where a builder is defined."""
    return build.__module__, build.__qualname__


def _matches(value: object, annotation: Any) -> bool:
    """Tell whether a plain YAML value fits a builder's annotation."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, option) for option in typing.get_args(annotation))
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (list, tuple):
        inner = typing.get_args(annotation)[0]
        return isinstance(value, list | tuple) and all(_matches(item, inner) for item in value)
    if origin is dict or annotation is dict:
        return isinstance(value, Mapping)
    return isinstance(value, annotation)


def _type_name(annotation: Any) -> str:
    """Return an annotation as a user would write it."""
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return "null" if annotation is type(None) else annotation.__name__
    return str(annotation).replace("typing.", "").replace("None", "null")
