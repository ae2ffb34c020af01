"""Adaptive gradient clipping from its formula, in float64 NumPy."""

from __future__ import annotations

import numpy as np


def adaptive_clip(weight, gradient, limit):
    """Return the clipped gradient of one parameter."""
    units = 1 if np.squeeze(weight).ndim <= 1 else len(weight)
    clipped = np.array(gradient, dtype=np.float64)
    rows, weights = clipped.reshape(units, -1), np.asarray(weight).reshape(units, -1)
    for row, values in zip(rows, weights, strict=True):
        most = limit * max(np.sqrt((values**2).sum()), 1e-3)
        norm = np.sqrt((row**2).sum())
        if norm > most:
            row *= most / norm
    return rows.reshape(np.shape(gradient))
