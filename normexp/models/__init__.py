"""Models: one file each, built with any norm; all norms of a seed share the other weights."""

from normexp.models._registry import MODELS, RESERVED, ModelCard
from normexp.models.build import build_model
from normexp.models.initialize import initialize, parameter_roles
from normexp.models.placements import PLACEMENTS, Drawing, Placement

__all__ = [
    "MODELS",
    "PLACEMENTS",
    "RESERVED",
    "Drawing",
    "ModelCard",
    "Placement",
    "build_model",
    "initialize",
    "parameter_roles",
]
