"""Initial weights as a function of a seed and each parameter's name; and the role of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from normexp.models.skips import SkipParameter
from normexp.norms import NORMS, NormRecord
from normexp.random import random_stream

Role = Literal["weight", "bias", "norm", "skip"]


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Set every weight and bias outside of the norms, each from its own name and shape alone.

    Weights are He normal in fan-in form: zero mean and standard deviation sqrt(2 / fan_in), with
    fan_in the number of products in one output (input channels x kernel area), for convolutions
    and linear layers, the classifier included; a layer with an ``initial_std`` has that instead,
    and one with an ``initial_scale`` has that multiplied in. Biases are zero. Parameters of norms
    keep what they were built with: gain 1 (0 where the model asks for it), shift 0; so do the
    learned factors of skips.

    A weight that a norm acts on is drawn under its plain name and assigned as a weight. So the
    effective weight of weight_norm, and the raw weight of the standardizations, start from the
    numbers that any other norm's weight starts from.

    So two models of one seed start from the same numbers wherever a name and shape agree,
    whichever norms they have and in whatever order they were built.

    Args:
        model: A model as ``build_model`` returns it, on any device and in any precision: the
            draw is in float64 and then rounded to the parameter's type.
        seed: The seed of the run.

    Raises:
        ValueError: If a parameter outside of the norms is neither a bias nor has two axes.

    Source:
        He, Zhang, Ren & Sun, "Delving Deep into Rectifiers", ICCV 2015, equation 10.
    """
    normalized = {raw: (path, module) for path, module, raw, _ in _iterate_normalized(model)}
    modules = dict(model.named_modules())
    for name, role, parameter in _iterate_parameters(model):
        if role == "bias":
            parameter.zero_()
        elif role == "weight":
            if parameter.ndim < 2:
                raise ValueError(f"no rule to initialize {name} of shape {tuple(parameter.shape)}")
            if name in normalized:
                path, module = normalized[name]
                plain_name = f"{path}.weight" if path else "weight"
                draw = _draw_weight(seed, plain_name, parameter, module)
                # torch's parametrize hands it on to the raw weight and what is beside it.
                module.weight = draw.to(parameter)
            else:
                owner = modules[name.rpartition(".")[0]]
                parameter.copy_(_draw_weight(seed, name, parameter, owner))


def _draw_weight(seed: int, name: str, parameter: Tensor, owner: nn.Module) -> Tensor:
    """Return the initial numbers of one weight, in float64."""
    he_std = math.sqrt(2.0 / math.prod(parameter.shape[1:]))
    std = getattr(owner, "initial_std", he_std) * getattr(owner, "initial_scale", 1.0)
    if std == 0.0:
        return torch.zeros(parameter.shape, dtype=torch.float64)
    draw = random_stream(seed, "initial_weight", name).standard_normal(parameter.shape)
    return torch.from_numpy(draw * std)


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return for every parameter, by name and once, what it is.

    The module that owns a parameter decides, not how it is called: "norm" for everything in a
    layer that a NormFactory built and for what a norm of weights has beside the raw weight, "skip"
    for what is learned of a skip, else "bias" for what its module calls bias, else "weight".

    Args:
        model: A model as ``build_model`` returns it.
    """
    return {name: role for name, role, _ in _iterate_parameters(model)}


def _iterate_parameters(model: nn.Module) -> Iterator[tuple[str, Role, Tensor]]:
    """Yield each parameter once: dotted name, role, tensor."""
    roles: dict[int, Role] = {}
    for module in model.modules():
        if isinstance(module, SkipParameter):
            roles |= {id(parameter): "skip" for parameter in module.parameters()}
        if isinstance(getattr(module, "norm_record", None), NormRecord):
            roles |= {id(parameter): "norm" for parameter in module.parameters()}
    for _, _, _, beside in _iterate_normalized(model):
        roles |= {id(parameter): "norm" for parameter in beside}
    for name, parameter in model.named_parameters():
        is_bias = name.rpartition(".")[2] == "bias"
        yield name, roles.get(id(parameter), "bias" if is_bias else "weight"), parameter


def _iterate_normalized(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, list[Tensor]]]:
    """Yield each layer with a normalized weight: its path, itself, raw name, what is beside it."""
    for path, module in model.named_modules():
        record = getattr(module, "weight_norm_record", None)
        if not isinstance(record, NormRecord):
            continue
        card = NORMS.get(record.name).card.weight
        assert card is not None
        prefix = f"{path}." if path else ""
        raw, beside = "", []
        for name, parameter in module.named_parameters():
            if name.startswith("parametrizations.weight."):
                if name.rpartition(".")[2] in card.parameters:
                    beside.append(parameter)
                else:
                    raw = prefix + name
        yield path, module, raw, beside
