"""A plain multilayer perceptron: no residual branch, no positions, so M is the micro-batch."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models._registry import MODELS, ModelCard
from normexp.models.residual import choose_activation
from normexp.norms import NormFactory

CARD = ModelCard(
    description="Multilayer perceptron: num_hidden_layers of linear, norm, relu; a classifier",
    source="as in Ioffe & Szegedy, ICML 2015, section 4.1 (norm before the activation)",
)


class Mlp(nn.Module):
    """Hidden layers of linear, norm and relu, then a linear classifier.

    Args:
        num_inputs: Numbers in one sample.
        num_classes: Outputs.
        norm: What builds the norm layers.
        num_hidden_layers: Hidden layers.
        width: Features of each.
    """

    def __init__(
        self,
        num_inputs: int,
        num_classes: int,
        *,
        norm: NormFactory,
        num_hidden_layers: int,
        width: int,
    ) -> None:
        super().__init__()
        self.activate = choose_activation(norm, "block")
        self.linears = nn.ModuleList()
        self.norms = nn.ModuleList()
        for index in range(num_hidden_layers):
            num_in = num_inputs if index == 0 else width
            linear = nn.Linear(num_in, width, bias=not norm.is_centring("block"))
            self.linears.append(norm.parametrize(linear, role="block"))
            self.norms.append(norm(width, role="block", dims=0, is_activated=True))
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n classes"]:
        """Return the logits of a batch of samples of any shape."""
        x = x.flatten(1)
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = self.activate(norm(linear(x)))
        logits: Tensor = self.classifier(x)
        return logits


@MODELS.register("mlp", CARD)
def build_mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    norm: NormFactory,
    placement: str | None,
    num_hidden_layers: int = 3,
    width: int = 128,
) -> nn.Module:
    """Build a multilayer perceptron; images are flattened.

    Args:
        input_shape: One sample, of any shape.
        num_classes: Number of classes.
        norm: What builds the norm layers (role block); it must be defined for features.
        placement: None: there is no residual branch.
        num_hidden_layers: Hidden layers.
        width: Features of each hidden layer.

    Returns:
        A module from samples ``[N, ...]`` to logits ``[N, num_classes]``.

    Raises:
        UserError: If a size is not positive or the norm is not defined for features.

    Source:
        Ioffe & Szegedy, "Batch Normalization", ICML 2015, section 4.1.
    """
    for name, value in (("num_hidden_layers", num_hidden_layers), ("width", width)):
        if value < 1:
            raise UserError(f"model.params.{name}", value, "1 or more is needed")
    return Mlp(
        math.prod(input_shape),
        num_classes,
        norm=norm,
        num_hidden_layers=num_hidden_layers,
        width=width,
    )
