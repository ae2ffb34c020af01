"""Norms of weights, from their formulas, in float64 NumPy. Weights are [O, fan-in ...]."""

from __future__ import annotations

import numpy as np


def weight_norm(g, v):
    """Return g v / ||v||; g is [O]."""
    rows = v.reshape(len(v), -1)
    lengths = np.sqrt((rows**2).sum(1))
    return (rows / lengths[:, None] * g[:, None]).reshape(v.shape)


def weight_standardization(w, eps):
    """Return (w - mean) / (std + eps), the deviation with M - 1."""
    rows = w.reshape(len(w), -1)
    centred = rows - rows.mean(1, keepdims=True)
    std = np.sqrt((centred**2).sum(1, keepdims=True) / (rows.shape[1] - 1))
    return (centred / (std + eps)).reshape(w.shape)


def scaled_weight_standardization(w, gain, eps, *, relu):
    """Return a gain (w - mean) / sqrt(max(M var, eps)); gain is [O]."""
    rows = w.reshape(len(w), -1)
    centred = rows - rows.mean(1, keepdims=True)
    # M var, var with M, is the plain sum of squares.
    sums = np.maximum((centred**2).sum(1, keepdims=True), eps)
    factor = np.sqrt(2 / (1 - 1 / np.pi)) if relu else 1.0
    return (factor * gain[:, None] * centred / np.sqrt(sums)).reshape(w.shape)
