"""Norms that bring their activation, in NumPy from their formulas.

Inputs are features [N, C], sequences [N, L, C] or images [N, C, H, W]; a mask [N, L] is True at
valid positions, and outputs are zero at the others.
"""

from __future__ import annotations

import numpy as np
from oracle.group import from_rows, to_rows


def variance(values):
    """Return the biased variance of all values; 0 of none."""
    return ((values - values.mean()) ** 2).mean() if values.size else 0.0


def filter_response_norm(x, weight, bias, threshold, *, eps, mask=None):
    """Return max(x / sqrt(mean(x^2) + eps) * weight + bias, threshold); None for no threshold."""
    rows, valid = to_rows(x, mask)
    y = np.zeros_like(rows)
    for n in range(len(rows)):
        for c in range(rows.shape[2]):
            values = rows[n, valid[n], c]
            if values.size == 0:
                continue
            scaled = values / np.sqrt((values**2).mean() + eps) * weight[c] + bias[c]
            y[n, valid[n], c] = scaled if threshold is None else np.maximum(scaled, threshold[c])
    return from_rows(y, x.shape)


def evo_norm_s0(x, weight, bias, v, *, num_groups, eps, mask=None):
    """Return x * sigmoid(v x) / sqrt(var_g + eps) * weight + bias."""
    rows, valid = to_rows(x, mask)
    y = np.zeros_like(rows)
    size = rows.shape[2] // num_groups
    for n in range(len(rows)):
        for c in range(rows.shape[2]):
            group = slice(c // size * size, c // size * size + size)
            std = np.sqrt(variance(rows[n, valid[n], group]) + eps)
            values = rows[n, valid[n], c]
            swish = values / (1.0 + np.exp(-v[c] * values))
            y[n, valid[n], c] = swish / std * weight[c] + bias[c]
    return from_rows(y, x.shape)


def evo_norm_b0(x, weight, bias, v, *, eps, running_var=None, mask=None):
    """Return x / max(sqrt(var_c + eps), v x + sqrt(var_nc + eps)) * weight + bias.

    With running_var, it stands for var_c: evaluation.
    """
    rows, valid = to_rows(x, mask)
    y = np.zeros_like(rows)
    for c in range(rows.shape[2]):
        batch_var = variance(rows[:, :, c][valid]) if running_var is None else running_var[c]
        for n in range(len(rows)):
            values = rows[n, valid[n], c]
            bend = v[c] * values + np.sqrt(variance(values) + eps)
            denominator = np.maximum(np.sqrt(batch_var + eps), bend)
            y[n, valid[n], c] = values / denominator * weight[c] + bias[c]
    return from_rows(y, x.shape)


def evo_norm_b0_running_var(x, running_var, *, momentum, mask=None):
    """Return the running variance after one batch, whose unbiased variance it takes in."""
    rows, valid = to_rows(x, mask)
    return (1.0 - momentum) * running_var + momentum * rows[valid].var(0, ddof=1)
