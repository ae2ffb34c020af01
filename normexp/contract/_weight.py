"""A layer whose weight a norm acts on, and the effective weight of a raw one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normexp.contract._subject import Subject, draw, find_small_options, tell
from normexp.norms import RESERVED

NUM_OUTPUTS, NUM_INPUTS = 5, 6
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda inputs: nn.Linear(inputs, NUM_OUTPUTS),
    "convolution": lambda inputs: nn.Conv2d(inputs, NUM_OUTPUTS, (3, 2)),
}


class WeightSpecimen:
    """A layer whose weight the norm acts on; ``make`` gives the effective weight of a raw one."""

    def __init__(
        self,
        subject: Subject,
        kind: str,
        options: Mapping[str, Any] | None = None,
        *,
        inputs: int = NUM_INPUTS,
    ) -> None:
        card = subject.card.weight
        assert card is not None
        self.kind = kind
        with torch.random.fork_rng(devices=[]):  # torch's own start is replaced
            plain = LAYERS[kind](inputs).double()
        assert isinstance(plain.weight, Tensor)
        self.shape = tuple(plain.weight.shape)
        with torch.no_grad():
            for key, parameter in plain.named_parameters():
                parameter.copy_(draw(tuple(parameter.shape), "layer", kind, key))
        given = find_small_options(subject.entry) | dict(options or {})
        params = subject.entry.complete_params(given, reserved=RESERVED)
        self.module = card.parametrize(plain, **params)
        named = {k: p for k, p in self.module.named_parameters() if k != "bias"}
        raw = [k for k, p in named.items() if tuple(p.shape) == self.shape]
        if len(raw) != 1:
            raise ValueError(f"one raw weight of shape {tell(self.shape)} is needed, found {raw}")
        self.raw_name = raw[0]
        self.others = {k: p.detach() for k, p in named.items() if k != self.raw_name}

    def make(self, raw: Tensor) -> Tensor:
        """Return the effective weight."""
        effective: Tensor = functional_call(
            _Reader(self.module), {f"module.{self.raw_name}": raw}, ()
        )
        return effective

    def draw(self) -> Tensor:
        """Return a raw weight."""
        return 0.3 + draw(self.shape, "weight", self.kind)


class _Reader(nn.Module):
    """Reads a module's weight, so that torch.func can put other parameters in first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> Tensor:
        """Return the effective weight."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight
