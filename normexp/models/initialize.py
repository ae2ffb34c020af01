"""Initial weights as a function of a seed and each parameter's name; and the role of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from normexp.norms import NormRecord
from normexp.random import random_stream

Role = Literal["weight", "bias", "norm"]


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Set every parameter outside of the norms, each from its own name and shape alone.

    Weights are He normal in fan-in form: zero mean and standard deviation sqrt(2 / fan_in), with
    fan_in the number of products in one output (input channels x kernel area), for
    convolutions and linear layers, the classifier included. Biases are zero. Parameters of norms
    keep what they were built with: gain 1 (0 where the model asks for it), shift 0.

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
    for name, role, parameter in _iterate_parameters(model):
        if role == "bias":
            parameter.zero_()
        elif role == "weight":
            if parameter.ndim < 2:
                raise ValueError(f"no rule to initialize {name} of shape {tuple(parameter.shape)}")
            fan_in = math.prod(parameter.shape[1:])
            draw = random_stream(seed, "initial_weight", name).standard_normal(parameter.shape)
            parameter.copy_(torch.from_numpy(draw * math.sqrt(2.0 / fan_in)))


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return for every parameter, by name and once, what it is.

    The module that owns a parameter decides, not how it is called: "norm" for everything in a
    layer that a NormFactory built, else "bias" for what its module calls bias, else "weight".

    Args:
        model: A model as ``build_model`` returns it.
    """
    return {name: role for name, role, _ in _iterate_parameters(model)}


def _iterate_parameters(model: nn.Module) -> Iterator[tuple[str, Role, Tensor]]:
    """Yield each parameter once: dotted name, role, tensor."""
    norm_ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(getattr(module, "norm_record", None), NormRecord)
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        if id(parameter) in norm_ids:
            yield name, "norm", parameter
        else:
            yield name, "bias" if name.rpartition(".")[2] == "bias" else "weight", parameter
