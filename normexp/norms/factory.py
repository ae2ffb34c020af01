"""From a norm's configuration to its layers: which norm, with which options, for which role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn

from normexp.errors import UserError, choices_hint
from normexp.norms._registry import NORMS, RESERVED, Axis, NormCard
from normexp.registry import Entry

ROLES = ("stem", "block", "downsample", "final", "attention", "mlp", "qk")


@dataclass(frozen=True)
class NormRecord:
    """What a norm layer is; every layer that a factory built carries one as ``norm_record``.

    A module whose weight a factory parametrized carries one as ``weight_norm_record``.

    Attributes:
        name: The norm.
        role: The layer's place in the model, one of ``ROLES``.
        params: Every option with its value in this layer, defaults and resolved ones included.
        key: Where the configuration chooses it: "norm", or the key of a role of its own.
    """

    name: str
    role: str
    params: dict[str, Any]
    key: str = "norm"


@dataclass(frozen=True)
class NormFactory:
    """Builds the norm layers of a model.

    Args:
        name: The norm of every role that ``roles`` does not name.
        params: Its options; what is missing takes the builder's default.
        roles: Other norms by role, each a mapping with ``name`` and optionally ``params``.

    Raises:
        UserError: On an unknown norm, role or option, or an option of the wrong type.

    Examples:
        >>> factory = NormFactory("group_norm", {"num_groups": 4})
        >>> layer = factory(16, role="block", dims=2)
        >>> layer.norm_record.params["channels_per_group"]
        4
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every name and option, so that nothing is left to find out when building."""
        _check_choice(self.name, self.params, key="norm")
        for role, choice in self.roles.items():
            key = f"norm.roles.{role}"
            if role not in ROLES:
                raise UserError(key, choice, f"there is no such role; {choices_hint(role, ROLES)}")
            if not isinstance(choice, Mapping) or not {"name"} <= set(choice) <= {"name", "params"}:
                raise UserError(key, choice, "a mapping with name and params is needed")
            _check_choice(choice["name"], choice.get("params") or {}, key=key)

    def __call__(
        self, num_features: int, *, role: str, dims: int, is_activated: bool = False
    ) -> nn.Module:
        """Build the layer of one role.

        Args:
            num_features: Channels C of its input.
            role: The layer's place, one of ``ROLES``.
            dims: Number of position axes of its input: 0 for features ``[N, C]``, 1 for
                sequences ``[N, L, C]``, 2 for images ``[N, C, H, W]``.
            is_activated: Whether an activation stands right behind it. A norm that brings its own
                activation applies it there, and the model leaves out its own; see
                ``includes_activation``.

        Returns:
            A module that keeps its input's shape and carries a ``norm_record``.

        Raises:
            UserError: If the norm is not defined for such an input, or needs a condition.
        """
        entry, params = self._choose(role)
        if entry.card.takes_condition:
            expected = "a condition goes in with every input: for models of your own"
            raise UserError("norm", entry.name, expected)
        given = {"is_activated": is_activated} if entry.card.includes_activation else {}
        with self._naming_role(role):
            layer = _build(entry, num_features, {"dims": dims, **given, **params})
        complete = entry.complete_params(params, reserved=RESERVED)
        resolved = complete | getattr(layer, "resolved_params", {})
        vars(layer)["norm_record"] = NormRecord(entry.name, role, resolved, self._key_of(role))
        return layer

    def parametrize(self, module: nn.Module, *, role: str) -> nn.Module:
        """Let the norm of one role act on a module's weight, if it is one that does.

        Args:
            module: A convolution or linear layer; changed in place.
            role: The place of the norm that the module belongs to.

        Returns:
            The module, with its role as ``weight_role``, and with a ``weight_norm_record`` if its
            weight is normalized now.
        """
        entry, params = self._choose(role)
        vars(module)["weight_role"] = role
        card = entry.card.weight
        if card is None:
            return module
        complete = entry.complete_params(params, reserved=RESERVED)
        with self._naming_role(role):
            parametrized = card.parametrize(module, **complete)
        vars(parametrized)["weight_norm_record"] = NormRecord(
            entry.name, role, complete, self._key_of(role)
        )
        return parametrized

    def get_card(self, role: str) -> NormCard:
        """Return the card of the norm of one role."""
        return self._choose(role)[0].card

    def is_centring(self, role: str) -> bool:
        """Tell whether the norm of that role subtracts a mean, so that no bias goes before it."""
        return self.get_card(role).is_centring

    def includes_activation(self, role: str) -> bool:
        """Tell whether the norm of that role brings its own activation."""
        return self.get_card(role).includes_activation

    def get_name(self, role: str) -> str:
        """Return the name of the norm of one role."""
        return self._choose(role)[0].name

    def norm_names(self) -> set[str]:
        """Return the names of all norms that this factory can build."""
        return {self.name, *(choice["name"] for choice in self.roles.values())}

    def _choose(self, role: str) -> tuple[Entry[NormCard], dict[str, Any]]:
        """Return what builds the norm of one role, and its options."""
        if role not in ROLES:
            raise ValueError(f"role {role!r} is none of {ROLES}")
        choice = self.roles.get(role)
        if choice is None:
            return NORMS.get(self.name, key="norm"), dict(self.params)
        return NORMS.get(choice["name"], key="norm"), dict(choice.get("params") or {})

    def _key_of(self, role: str) -> str:
        """Return the key of the configuration that chooses the norm of one role."""
        return f"norm.roles.{role}" if role in self.roles else "norm"

    @contextmanager
    def _naming_role(self, role: str) -> Iterator[None]:
        """Let an error say the role's key, where the role has a norm of its own."""
        try:
            yield
        except UserError as error:
            if role not in self.roles:
                raise
            key = self._key_of(role) + error.key.removeprefix("norm")
            raise UserError(key, error.value, error.expected) from None


def check_options(entry: Entry[NormCard], params: Mapping[str, Any], *, key: str) -> None:
    """Raise unless a norm's builder takes these options.

    Args:
        entry: The norm.
        params: The options.
        key: What the message calls them.

    Raises:
        UserError: On an unknown option, a value of the wrong type, or one that no norm can have.
    """
    entry.check_params(params, key=key, reserved=RESERVED)
    eps, momentum = params.get("eps"), params.get("momentum")
    if eps is not None and eps <= 0:
        raise UserError(f"{key}.eps", eps, "a number above 0 is needed")
    if momentum is not None and not 0 <= momentum <= 1:
        expected = "the weight of the new batch is needed, in [0, 1]"
        raise UserError(f"{key}.momentum", momentum, expected)


def _build(entry: Entry[NormCard], num_features: int, options: Mapping[str, Any]) -> nn.Module:
    """Return a layer; a fault in somebody's builder is told in one line."""
    try:
        layer = entry.build(num_features, **options)
    except UserError:
        raise
    except Exception as error:
        raised = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError("norm", entry.name, f"its builder ended in {raised}") from error
    if not isinstance(layer, nn.Module):
        expected = f"its builder has to return a module, not {type(layer).__name__}"
        raise UserError("norm", entry.name, expected)
    return layer


def _check_choice(name: str, params: Mapping[str, Any], *, key: str) -> None:
    """Raise unless the norm exists, its card can be read and its builder takes these options."""
    entry = NORMS.get(name, key=key)
    sets, dims = entry.card.statistic_sets, entry.card.dims
    is_readable = set(sets) == set(dims) and all(
        set(axes) <= set(get_args(Axis)) for one in sets.values() for axes in one
    )
    if not is_readable:
        expected = f"its card needs sets of axes in statistic_sets for each of dims {list(dims)}"
        raise UserError(key, name, f"{expected}; normexp check {name} says more")
    check_options(entry, params, key=f"{key}.params")
