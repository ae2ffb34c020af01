"""From a model's configuration to the model, with every choice checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from normexp.data import TokenTask
from normexp.errors import UserError, choices_hint
from normexp.models._registry import MODELS, RESERVED, ModelCard
from normexp.models.placements import PLACEMENTS
from normexp.norms import NORMS, NormCard, NormFactory, NormRecord


def build_model(
    name: str,
    params: Mapping[str, Any],
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    norm: NormFactory,
    placement: str | None,
    tokens: TokenTask | None = None,
) -> nn.Module:
    """Build a model with its norms; ``initialize`` then sets its weights.

    torch's layers draw throw-away weights when they are built; the global random state is put
    back afterwards.

    Args:
        name: The model.
        params: Its options; what is missing takes the builder's default.
        input_shape: Shape of one sample, such as ``(C, H, W)``, or ``(L,)`` of a text.
        num_classes: Number of classes, or of token ids where the next token is predicted.
        norm: What builds the norm layers.
        placement: Where they stand in a residual block; None for a model without one.
        tokens: What texts ask of the model; None if samples are no texts.

    Returns:
        A module from a batch of samples to logits ``[N, num_classes]``, or
        ``[N, L, num_classes]`` where the next token is predicted.

    Raises:
        UserError: On an unknown model or option, a placement or norm that the model does not
            admit, or a role for which the model has no layer.
    """
    entry = MODELS.get(name, key="model")
    entry.check_params(params, key="model.params", reserved=RESERVED)
    if entry.card.takes_tokens != (tokens is not None):
        takes, has = "images or features", "texts"
        if entry.card.takes_tokens:
            takes, has = "texts, such as data=python_docs", "none"
        raise UserError("model", name, f"takes {takes}, and the data have {has}")
    _check_placement(name, entry.card, placement, norm)
    with torch.random.fork_rng(devices=[]):
        given = {} if tokens is None else {"tokens": tokens}
        model: nn.Module = entry.build(
            input_shape, num_classes, norm=norm, placement=placement, **given, **params
        )
    _check_roles(name, model, norm)
    return model


def _check_placement(name: str, card: ModelCard, placement: str | None, norm: NormFactory) -> None:
    """Raise unless the model has such a placement and the norm fits it."""
    if not card.placements:
        if placement is not None:
            raise UserError(
                "placement", placement, f"model {name} has no residual branch; null is needed"
            )
        return
    if placement not in card.placements:
        shown = "null" if placement is None else placement
        raise UserError("placement", shown, choices_hint(shown, card.placements))
    chosen = PLACEMENTS.get(placement or "")
    if chosen is None:
        return
    # A norm of weights would undo the size that the placement gives to each weight.
    admits_weights = not chosen.sets_weight_scale
    if chosen.has_norm_layers:
        weight_norms = sorted(n for n in norm.norm_names() if NORMS.get(n).card.weight is not None)
        if weight_norms and not admits_weights:
            expected = "sets the initial size of its weights, which a norm of weights takes away: "
            raise UserError("placement", placement, expected + f"no {', '.join(weight_norms)}")
        return
    others = [
        name
        for name in sorted(norm.norm_names() - {"no_norm"})
        if not (admits_weights and _acts_on_weights_alone(NORMS.get(name).card))
    ]
    if others:
        alternative = " or a norm of weights alone" if admits_weights else ""
        raise UserError(
            "placement",
            placement,
            f"builds no norm layer, so norm must be no_norm{alternative}, not {', '.join(others)}",
        )


def _acts_on_weights_alone(card: NormCard) -> bool:
    """Tell whether a norm has nothing to do at its own place in the network."""
    return card.weight is not None and not any(card.statistic_sets.values())


def _check_roles(name: str, model: nn.Module, norm: NormFactory) -> None:
    """Raise if a norm was chosen for a role that no layer of the model has.

    A role without a norm layer counts where the weights of its layers are normalized, or would
    be by the norm that the choice replaces.
    """
    records = [
        record
        for module in model.modules()
        for key in ("norm_record", "weight_norm_record")
        if isinstance(record := getattr(module, key, None), NormRecord)
    ]
    found = {record.role for record in records}
    if NORMS.get(norm.name).card.weight is not None:
        weight_roles = (getattr(module, "weight_role", None) for module in model.modules())
        found |= {role for role in weight_roles if isinstance(role, str)}
    for role, choice in norm.roles.items():
        if role not in found:
            raise UserError(
                f"norm.roles.{role}",
                choice["name"],
                f"model {name} has no norm layer of this role here; "
                f"its roles are {', '.join(sorted(found)) or 'none'}",
            )
