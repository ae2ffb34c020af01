"""Positions of texts: which norms may see others, later ones or padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from normexp.data import Dataset, DatasetFacts
from normexp.errors import UserError
from normexp.norms import NORMS, NormCard, NormLayer


def find_leak(layers: Iterable[NormLayer], model: nn.Module) -> NormLayer | None:
    """Return the first layer through which a position of a causal model sees later ones.

    Args:
        layers: The norm layers of the model.
        model: A model; one with ``is_causal`` set predicts the next token.
    """
    if not getattr(model, "is_causal", False):
        return None
    return next((layer for layer in layers if mixes_positions(layer)), None)


def check_causality(layers: Iterable[NormLayer], model: nn.Module) -> None:
    """Raise if a position of a causal model would see later ones.

    Raises:
        UserError: For the first layer through which it would.
    """
    layer = find_leak(layers, model)
    if layer is not None:
        raise UserError(
            "norm",
            layer.name,
            f"layer {layer.path} has statistics over positions, so each position of this causal "
            "model would see the tokens that it is to predict; choose a norm of single positions, "
            "such as layer_norm, or allow_leak=true, which marks every row of the tables",
        )


def check_padding(
    layers: Iterable[NormLayer], model: nn.Module, data: Dataset | DatasetFacts
) -> None:
    """Raise if a norm that reduces over positions has no defined padding to see, or no mask.

    Args:
        layers: The norm layers of the model.
        model: The model.
        data: Its data set, or what is known of it.

    Raises:
        UserError: For the first such layer, with what would help.
    """
    if data.tokens is None or not data.tokens.has_padding:
        return
    for layer in layers:
        if not mixes_positions(layer):
            continue
        if gets_mask(model.get_submodule(layer.path), model):
            continue
        reads = f"layer {layer.path} has statistics over positions without the mask of valid ones"
        if getattr(model, "masks_norms", False):
            raise UserError(
                "norm",
                layer.name,
                f"{reads}, as it takes none; model.params.mask_norms=false lets it see padding",
            )
        if data.is_trimmed:
            raise UserError(
                "data.params.padding",
                "batch",
                f"{reads}, so what comes out for a text would depend on how long its batch mates "
                "are; longest is needed",
            )


def check_pooling(layers: Sequence[NormLayer], model: nn.Module) -> None:
    """Raise if an encoder takes the mean over what its last norm has centred over.

    The mean over positions of numbers that a norm has centred over the same positions is its
    shift: every text would get the same logits, whatever it says.

    Args:
        layers: The norm layers of the model, in the order of the forward pass.
        model: The model; one that has ``is_causal`` and is not takes the mean over positions.

    Raises:
        UserError: If the last norm layer is such a one.
    """
    if getattr(model, "is_causal", True) or not layers:
        return
    last = layers[-1]
    is_last_of_all = last.role != "qk"  # queries and keys are not what is classified
    if (
        is_last_of_all
        and last.statistic_sets == (("position",),)
        and NORMS.get(last.name).card.is_centring
    ):
        role = last.role
        raise UserError(
            "norm",
            last.name,
            f"layer {last.path} centres each channel over the positions of a text and the model "
            "classifies the mean over them, which is then the same for every text; choose another "
            f"norm there, as in norm.roles.{role}.name=layer_norm",
        )


def mixes_positions(layer: NormLayer) -> bool:
    """Tell whether an output position of a layer depends on other positions."""
    is_reducing = any("position" in axes for axes in layer.statistic_sets)
    return len(layer.input_shape) > 2 and (
        is_reducing or NORMS.get(layer.name).card.mixes_positions
    )


def gets_mask(norm: nn.Module, model: nn.Module) -> bool:
    """Tell whether a norm layer is given the mask of valid positions, because there is padding."""
    return bool(getattr(model, "has_padding", False) and getattr(norm, "is_masked", False))


def kernel_of(norm: nn.Module, card: NormCard, model: nn.Module, device_type: str) -> str:
    """Return what computes a norm layer of a model: one fused kernel, a composite, or none.

    Fused kernels know no mask.
    """
    return "composite" if gets_mask(norm, model) else card.kernel_on(device_type)
