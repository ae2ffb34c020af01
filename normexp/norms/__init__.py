"""Normalization layers: one file a norm, each with a card of what it declares about itself."""

from normexp.norms._registry import (
    NORMS,
    RESERVED,
    SHAPES,
    Axis,
    NormCard,
    StatisticSet,
    WeightCard,
    check_dims,
)
from normexp.norms._statistics import channel_axis, count_channels
from normexp.norms.factory import ROLES, NormFactory, NormRecord
from normexp.norms.layers import (
    NormLayer,
    check_statistic_sets,
    compute_statistic_set_size,
    describe_norm_layers,
)

__all__ = [
    "NORMS",
    "RESERVED",
    "ROLES",
    "SHAPES",
    "Axis",
    "NormCard",
    "NormFactory",
    "NormLayer",
    "NormRecord",
    "StatisticSet",
    "WeightCard",
    "channel_axis",
    "check_dims",
    "check_statistic_sets",
    "compute_statistic_set_size",
    "count_channels",
    "describe_norm_layers",
]
