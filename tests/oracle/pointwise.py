"""What computes no statistic, from the formulas, in NumPy.

Arrays are features ``[N, C]``, sequences ``[N, L, C]`` or images ``[N, C, H, W]``.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erf


def by_channel(vector, ndim):
    """Return one number a channel in a shape that broadcasts against inputs."""
    return vector.reshape(-1, 1, 1) if ndim == 4 else vector


def dynamic_tanh(x, *, alpha, weight, bias):
    """Return tanh(alpha x) weight + bias."""
    return np.tanh(alpha * x) * by_channel(weight, x.ndim) + by_channel(bias, x.ndim)


def dynamic_erf(x, *, alpha, shift, weight, bias):
    """Return erf(alpha x + shift) weight + bias."""
    return erf(alpha * x + shift) * by_channel(weight, x.ndim) + by_channel(bias, x.ndim)


def signed_power(x, *, alpha, weight, bias, eps):
    """Return sign(x) (|x| + eps)^alpha weight + bias."""
    powered = np.where(x > 0, 1.0, np.where(x < 0, -1.0, 0.0)) * (np.abs(x) + eps) ** alpha
    return powered * by_channel(weight, x.ndim) + by_channel(bias, x.ndim)
