"""Positions of texts: which norms may see others, later ones or padding."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from normexp.data import Dataset, DatasetFacts
from normexp.errors import UserError
from normexp.norms import NORMS, NormCard, NormLayer
from normexp.random import random_stream


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
            layer.key,
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
                layer.key,
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


def check_pooling(last: NormLayer, model: nn.Module) -> None:
    """Raise if an encoder takes the mean over what its last norm has centred over.

    The mean over positions of numbers that a norm has centred over the same positions is its
    shift: every text would get the same logits, whatever it says.

    Args:
        last: The last norm layer of the model, in the order of the forward pass.
        model: The model; one that has ``is_causal`` and is not takes the mean over positions.

    Raises:
        UserError: If that layer centres each channel over the positions of one text.
    """
    if getattr(model, "is_causal", True) or not NORMS.get(last.name).card.is_centring:
        return
    if getattr(model, "has_padding", False) and not gets_mask(
        model.get_submodule(last.path), model
    ):
        return  # centred over padding too, so that the mean over valid positions says something
    num_positions = last.input_shape[1]
    if last.statistic_set_sizes and all(
        "position" in axes and size == num_positions
        for axes, size in zip(last.statistic_sets, last.statistic_set_sizes, strict=True)
    ):
        raise UserError(
            last.key,
            last.name,
            f"layer {last.path} centres each channel over the positions of a text and the model "
            "classifies the mean over them, which is then the same for every text; choose another "
            f"norm there, as in norm.roles.{last.role}.name=layer_norm",
        )


@torch.no_grad()
def measure_leak(model: nn.Module, vocabulary_size: int, length: int) -> bool:
    """Tell whether logits of a causal model change with tokens that come later.

    For norms whose cards nobody has proven: what a card says is taken for true elsewhere.

    Args:
        model: A model on the CPU whose parameters may be overwritten.
        vocabulary_size: Number of token ids.
        length: Most positions of a text.
    """
    draws = random_stream(0, "leak")
    for parameter in model.parameters():
        # Gains that start at 0 would hide what their branch does.
        parameter.copy_(torch.from_numpy(draws.normal(0.2, 0.5, parameter.shape)))
    length = min(length, 8)
    kept = length // 2
    tokens = torch.from_numpy(draws.integers(1, vocabulary_size, (4, length)))
    others = tokens.clone()
    others[:, kept:] = torch.from_numpy(draws.integers(1, vocabulary_size, (4, length - kept)))
    states = copy.deepcopy(model.state_dict())
    model.train()
    before = model(tokens)[:, :kept]
    model.load_state_dict(states)  # running statistics may have moved
    return not torch.allclose(before, model(others)[:, :kept], rtol=1e-4, atol=1e-5)


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
