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
        takes_tokens: Whether it takes texts, as token ids, instead of images or features; its
            builder then has the argument ``tokens``.
    """

    description: str
    source: str
    placements: tuple[str, ...] = ()
    takes_tokens: bool = False


# Keyword-only arguments of a builder that normexp fills in itself.
RESERVED = frozenset({"norm", "placement", "tokens"})

MODELS: Registry[ModelCard] = Registry("model", "normexp.models")
