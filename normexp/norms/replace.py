"""Other norms in a module that is already there, whoever wrote it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normexp.errors import UserError, choices_hint
from normexp.norms._recognize import (
    FOREIGN_KINDS,
    OldNorm,
    cuda_devices_of,
    find_holder,
    find_norms,
    find_own_ways,
    record_of,
)
from normexp.norms._registry import NORMS
from normexp.norms._successor import Replacement, build_successor
from normexp.norms.factory import NormFactory

__all__ = ["Replacement", "replace_norms"]


def replace_norms(
    module: nn.Module,
    to: str,
    *,
    only: str | Collection[str] | Callable[[str, nn.Module], bool] | None = None,
    keep_affine: bool = True,
    example: Tensor | tuple[Any, ...] | None = None,
    **params: Any,
) -> list[Replacement]:
    """Replace the norm layers of a module by a registered norm, in place.

    Known are the batch, group, layer, instance and RMS norms of torch, torchvision and timm, and
    the layers of this package; local response norms stay. All new layers are built before the
    first is put in place, so after an error the module is as it was.

    What stays: device, type and mode of each layer; a layer at several paths is one layer again.
    With ``keep_affine`` the gain and shift of the old layer, the very parameters, so that an
    optimizer goes on with them; an old layer without them gets a new one without, unless
    ``affine`` is given. A gain or shift that was frozen stays frozen. Running statistics, where
    both layers have them. In that case, and where the norm stays the same, also eps, momentum and
    num_groups, unless given; else they are the new norm's defaults. Dropout and activation of
    timm's norm-and-activation layers. A norm that brings its own activation is built without it.

    A layer in another layout than this package's, such as LayerNorm on ``[N, H, W, C]`` or
    BatchNorm1d on ``[N, C, L]``, becomes an ``AdaptedNorm``: names in the state dict then change.
    A LayerNorm over three axes is taken for one over ``(C, H, W)``, and inputs of four axes with
    channels last for images.

    Args:
        module: Any module; its forward must call the norm layers it has.
        to: Name of the new norm.
        only: Which layers: kinds as in ``Replacement.old_kind``, or a function of path and layer.
        keep_affine: Whether gain and shift are carried over where they are one number a channel.
        example: A batch, or a tuple of all that forward takes, where a class alone does not tell
            whether its inputs are features, sequences or images (BatchNorm1d, SyncBatchNorm,
            GroupNorm, LayerNorm, RMSNorm). A copy of the module is run on it.
        **params: Options of the new norm.

    Returns:
        What was replaced, in the order of the module.

    Raises:
        UserError: If the norm or an option cannot be, in general or for one of the layers.
        ValueError: If a layer cannot be replaced, or an example is needed; the layer is named.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> replace_norms(model, "group_norm", num_groups=4)[0].path
        '1'
        >>> type(model[1]).__name__
        'GroupNorm'
    """
    _check_target(NormFactory(to, params))
    selects = _as_selection(only)
    old, unknown = find_norms(module, selects)
    _check_replaceable(module, old, unknown)
    shapes = _observe(module, old, example)
    new: list[nn.Module] = []
    done: list[Replacement] = []
    with torch.random.fork_rng(devices=cuda_devices_of(module)):
        for norm in old:
            layer, replacement = build_successor(module, norm, to, params, keep_affine, shapes)
            new.append(layer)
            done.append(replacement)
    _put_in_place(module, old, new)
    left, _ = find_norms(module, selects)
    built = {id(part) for layer in new for part in layer.modules()}
    assert all(id(norm.module) in built for norm in left), "a layer of the old kind remains"
    return done


def _check_target(factory: NormFactory) -> None:
    """Raise unless the norm is a layer of its own that needs nothing but its input."""
    card = factory.get_card("block")
    if card.weight is not None:
        expected = "acts on the weights of convolutions, so no layer can take a norm's place"
        raise UserError("norm", factory.name, expected)
    if card.takes_condition:
        expected = "a condition goes in with every input, which no replaced layer is given"
        raise UserError("norm", factory.name, expected)


def _as_selection(
    only: str | Collection[str] | Callable[[str, nn.Module], bool] | None,
) -> Callable[[str, nn.Module, str | None], bool]:
    """Return ``only`` as a function of path, module and kind."""
    if only is None:
        return lambda _path, _module, _kind: True
    if callable(only):
        return lambda path, module, _kind: only(path, module)
    kinds = {only} if isinstance(only, str) else set(only)
    known = FOREIGN_KINDS | set(NORMS.names())
    for kind in sorted(kinds - known):
        raise ValueError(f"only={kind}: {choices_hint(kind, known)}")
    return lambda _path, _module, kind: kind in kinds


def _check_replaceable(module: nn.Module, old: Sequence[OldNorm], unknown: Sequence[str]) -> None:
    """Raise on what would be lost, or would go on unseen, if its norms were replaced."""
    if isinstance(module, DistributedDataParallel | torch.jit.ScriptModule):
        raise ValueError(f"replace norms before the module becomes a {type(module).__name__}")
    if unknown:
        raise ValueError(
            f"no known norm: {', '.join(unknown)}; leave them out with only=, a function of path "
            "and module"
        )
    for norm in old:
        problem = _find_obstacle(norm)
        if problem is not None:
            raise ValueError(f"{norm.label}: {problem}")
    holder = find_holder(module, {id(norm.module): norm.label for norm in old})
    if holder is not None:
        raise ValueError(f"{holder[0]}: also held by {holder[1]}, which no replacement reaches")


def _find_obstacle(norm: OldNorm) -> str | None:
    """Return why a layer cannot be replaced; None if it can."""
    layer, record = norm.module, record_of(norm.module)
    if norm.path == "":
        return "the module is itself a norm; hand over the module that it belongs to"
    problem = find_own_ways(layer)
    if problem is not None:
        return problem
    if record is not None:
        card = NORMS.get(record.name).card
        if card.weight is not None or card.takes_condition or card.includes_activation:
            return f"{record.name} is more than a layer that normalizes its input"
    return None


def _observe(
    module: nn.Module, old: Sequence[OldNorm], example: Tensor | tuple[Any, ...] | None
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each layer's input, from a forward pass of a copy on the example.

    The layers of the copy hand on their input, so even a single sample will do.
    """
    unclear = [norm for norm in old if norm.dims is None or norm.num_features is None]
    if not unclear:
        return {}
    if example is None:
        raise ValueError(
            f"{unclear[0].label}: features, sequences or images? Pass example=, a batch that the "
            "module takes"
        )
    seen: dict[str, set[tuple[int, ...]]] = {norm.path: set() for norm in unclear}
    ghost = copy.deepcopy(module)
    _unfuse_encoders(ghost.modules())
    every, _ = find_norms(ghost, _as_selection(None))
    for norm in every:
        vars(ghost.get_submodule(norm.path))["forward"] = _Note(seen.get(norm.path))
    with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices_of(module)):
        ghost(*(example if isinstance(example, tuple) else (example,)))
    for norm in unclear:
        ranks = {len(shape) for shape in seen[norm.path]}
        if len(ranks) != 1:
            found = f"inputs of {sorted(ranks)} axes" if ranks else "no input"
            raise ValueError(f"{norm.label}: {found} in the forward pass of the example")
    return {path: next(iter(shapes)) for path, shapes in seen.items()}


@dataclass(frozen=True)
class _Note:
    """Stands in for a norm layer's forward: notes the input's shape and hands it on."""

    shapes: set[tuple[int, ...]] | None

    def __call__(self, x: Tensor, *_: Any) -> Tensor:
        if self.shapes is not None:
            self.shapes.add(tuple(x.shape))
        return x


def _put_in_place(module: nn.Module, old: Sequence[OldNorm], new: Sequence[nn.Module]) -> None:
    """Let the new layers stand at every path of the old ones."""
    for norm, layer in zip(old, new, strict=True):
        for path in (norm.path, *norm.other_paths):
            parent_path, _, name = path.rpartition(".")
            module.get_submodule(parent_path)._modules[name] = layer
    changed = {id(layer) for layer in new}
    _unfuse_encoders(
        part for part in module.modules() if any(id(inner) in changed for inner in part.modules())
    )


def _unfuse_encoders(modules: Iterable[nn.Module]) -> None:
    """Let torch's encoders call their norm layers in evaluation too.

    They would hand the numbers of their LayerNorms to a fused kernel instead, and so would hand
    over those of any other norm.
    """
    for module in modules:
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
