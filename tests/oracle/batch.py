"""The batch normalizations in NumPy, from their formulas.

Inputs are features ``[N, C]``, sequences ``[N, L, C]`` or images ``[N, C, H, W]``; a mask
``[N, L]`` is True at the valid positions of sequences. Gains, shifts and statistics are one number
a channel.
"""

from __future__ import annotations

import numpy as np


def to_rows(x):
    """Return an input as ``[N, P, C]``, P the number of positions."""
    if x.ndim == 4:
        return x.reshape(*x.shape[:2], -1).transpose(0, 2, 1)
    return x[:, None] if x.ndim == 2 else x


def from_rows(rows, shape):
    """Return the inverse of ``to_rows``."""
    return rows.transpose(0, 2, 1).reshape(shape) if len(shape) == 4 else rows.reshape(shape)


def moments(x, mask=None):
    """Return mean, biased and unbiased variance of each channel, over the valid elements."""
    rows = to_rows(x)
    values = rows.reshape(-1, rows.shape[2]) if mask is None else rows[mask]
    mean = values.sum(0) / len(values)
    squares = ((values - mean) ** 2).sum(0)
    return mean, squares / len(values), squares / (len(values) - 1)


def frozen_batch_norm(x, gain, shift, eps, mean, var, mask=None):
    """Return ``(x - mean) / sqrt(var + eps) * gain + shift``; zero at invalid positions."""
    rows = (to_rows(x) - mean) / np.sqrt(var + eps) * gain + shift
    if mask is not None:
        rows[~mask] = 0.0
    return from_rows(rows, x.shape)


def batch_norm(x, gain, shift, eps, mask=None):
    """Return batch normalization in training."""
    mean, var, _ = moments(x, mask)
    return frozen_batch_norm(x, gain, shift, eps, mean, var, mask)


def batch_norm_backward(grad, x, gain, eps):
    """Return the gradients of input, gain and shift, by hand.

    With M elements a channel, H = grad * gain and s = 1 / sqrt(var + eps):
    ``s / M * (M H - sum(H) - x_hat * sum(H * x_hat))``, ``sum(grad * x_hat)``, ``sum(grad)``.
    """
    rows, g = to_rows(x), to_rows(grad)
    num_elements = rows.shape[0] * rows.shape[1]
    mean, var, _ = moments(x)
    s = (var + eps) ** -0.5
    x_hat = (rows - mean) * s
    h = g * gain
    dx = s / num_elements * (num_elements * h - h.sum((0, 1)) - x_hat * (h * x_hat).sum((0, 1)))
    return from_rows(dx, x.shape), (g * x_hat).sum((0, 1)), g.sum((0, 1))


def sync_batch_norm(parts, gain, shift, eps, masks=None):
    """Return the outputs of all processes, each with its part of the samples."""
    ends = np.cumsum([len(part) for part in parts])[:-1]
    mask = None if masks is None else np.concatenate(masks)
    return np.split(batch_norm(np.concatenate(parts), gain, shift, eps, mask), ends)


def ghost_batch_norm(x, gain, shift, eps, ghost_size, mask=None):
    """Return each chunk of so many samples normalized on its own."""
    chunks = []
    for start in range(0, len(x), ghost_size):
        chunk = slice(start, start + ghost_size)
        part = None if mask is None else mask[chunk]
        chunks.append(batch_norm(x[chunk], gain, shift, eps, part))
    return np.concatenate(chunks)


def batch_renorm(x, gain, shift, eps, running_mean, running_var, r_max, d_max, mask=None):
    """Return batch renormalization in training, with bounds r_max and d_max."""
    mean, var, _ = moments(x, mask)
    sigma_batch, sigma = np.sqrt(var + eps), np.sqrt(running_var + eps)
    r = np.minimum(np.maximum(sigma_batch / sigma, 1 / r_max), r_max)
    d = np.minimum(np.maximum((mean - running_mean) / sigma, -d_max), d_max)
    rows = ((to_rows(x) - mean) / sigma_batch * r + d) * gain + shift
    if mask is not None:
        rows[~mask] = 0.0
    return from_rows(rows, x.shape)


def running_statistics(batches, momentum, masks=None):
    """Return running mean and variance after some batches, one after the other, from 0 and 1.

    ``momentum`` is the weight of the new batch; None gives all batches equal weight.
    """
    mean, var = 0.0, 1.0
    for index, x in enumerate(batches):
        new_mean, _, new_var = moments(x, None if masks is None else masks[index])
        rate = 1 / (index + 1) if momentum is None else momentum
        mean, var = (1 - rate) * mean + rate * new_mean, (1 - rate) * var + rate * new_var
    return mean, var
