"""What every model declares about itself, and where models register."""

from __future__ import annotations

from dataclasses import dataclass

from normexp.registry import Registry


@dataclass(frozen=True)
class ModelCard:
    """What a model declares.

    Attributes:
        description: The model in one line.
        source: Paper, with section.
        placements: Where its norms may stand; empty if it has no residual branch.
    """

    description: str
    source: str
    placements: tuple[str, ...] = ()


MODELS: Registry[ModelCard] = Registry("model", "normexp.models")
