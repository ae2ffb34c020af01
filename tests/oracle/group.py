"""group_norm and instance_norm in NumPy, forward and backward, from their formulas.

Inputs are features [N, C], sequences [N, L, C] or images [N, C, H, W]; a mask [N, L] is True at
valid positions. The gradients are derived by hand: with x^ = (x - mean) * r,
r = 1 / sqrt(var + eps) and g the gradient that reaches x^, all over one statistic set,

    dx = r * (g - mean(g) - x^ * mean(g * x^)).
"""

from __future__ import annotations

import numpy as np


def to_rows(x, mask=None):
    """Return the input as [N, positions, C], and which positions are valid, [N, positions]."""
    rows = np.moveaxis(x, 1, -1) if x.ndim == 4 else x
    rows = rows.reshape(len(x), -1, rows.shape[-1])
    return rows, np.ones(rows.shape[:2], bool) if mask is None else mask


def from_rows(rows, shape):
    """Return rows [N, positions, C] in the input's shape."""
    if len(shape) == 4:
        n, c, h, w = shape
        return np.moveaxis(rows.reshape(n, h, w, c), -1, 1)
    return rows.reshape(shape)


def normalize(values, eps):
    """Return (values - mean) / sqrt(var + eps) of one statistic set; an empty one stays empty."""
    if values.size == 0:
        return values
    mean = values.sum() / values.size
    var = ((values - mean) ** 2).sum() / values.size
    return (values - mean) / np.sqrt(var + eps)


def normalize_backward(values, grad, eps):
    """Return the gradient for the values of one statistic set from that of what it becomes."""
    if values.size == 0:
        return grad
    centred = values - values.sum() / values.size
    r = 1.0 / np.sqrt((centred**2).sum() / values.size + eps)
    normalized = centred * r
    return r * (grad - grad.mean() - normalized * (grad * normalized).mean())


def group_norm(x, weight, bias, *, num_groups, eps, mask=None):
    """Return (x_c - mean_g) / sqrt(var_g + eps) * weight_c + bias_c, zero at invalid positions."""
    rows, valid = to_rows(x, mask)
    y = np.zeros_like(rows)
    size = rows.shape[2] // num_groups
    for n in range(len(rows)):
        for start in range(0, rows.shape[2], size):
            channels = slice(start, start + size)
            normalized = normalize(rows[n, valid[n], channels], eps)
            y[n, valid[n], channels] = normalized * weight[channels] + bias[channels]
    return from_rows(y, x.shape)


def group_norm_backward(x, weight, grad, *, num_groups, eps, mask=None):
    """Return the gradients for input, weight and bias from that for the output."""
    (rows, valid), (grad_rows, _) = to_rows(x, mask), to_rows(grad, mask)
    num_channels = rows.shape[2]
    grad_x = np.zeros_like(rows)
    grad_weight, grad_bias = np.zeros(num_channels), np.zeros(num_channels)
    size = num_channels // num_groups
    for n in range(len(rows)):
        for start in range(0, num_channels, size):
            channels = slice(start, start + size)
            values, upper = rows[n, valid[n], channels], grad_rows[n, valid[n], channels]
            grad_x[n, valid[n], channels] = normalize_backward(
                values, upper * weight[channels], eps
            )
            grad_weight[channels] += (upper * normalize(values, eps)).sum(0)
            grad_bias[channels] += upper.sum(0)
    return from_rows(grad_x, x.shape), grad_weight, grad_bias


def instance_norm(x, weight, bias, *, eps, mask=None):
    """Return (x_nc - mean_nc) / sqrt(var_nc + eps) * weight_c + bias_c, zero where invalid."""
    rows, valid = to_rows(x, mask)
    y = np.zeros_like(rows)
    for n in range(len(rows)):
        for c in range(rows.shape[2]):
            y[n, valid[n], c] = normalize(rows[n, valid[n], c], eps) * weight[c] + bias[c]
    return from_rows(y, x.shape)


def instance_norm_backward(x, weight, grad, *, eps, mask=None):
    """Return the gradients for input, weight and bias from that for the output."""
    (rows, valid), (grad_rows, _) = to_rows(x, mask), to_rows(grad, mask)
    num_channels = rows.shape[2]
    grad_x = np.zeros_like(rows)
    grad_weight, grad_bias = np.zeros(num_channels), np.zeros(num_channels)
    for n in range(len(rows)):
        for c in range(num_channels):
            values, upper = rows[n, valid[n], c], grad_rows[n, valid[n], c]
            grad_x[n, valid[n], c] = normalize_backward(values, upper * weight[c], eps)
            grad_weight[c] += (upper * normalize(values, eps)).sum()
            grad_bias[c] += upper.sum()
    return from_rows(grad_x, x.shape), grad_weight, grad_bias


def instance_norm_running(x, running_mean, running_var, *, momentum, mask=None):
    """Return the running statistics after one batch: of means and unbiased variances by sample.

    Samples with fewer than 2 valid positions are left out.
    """
    rows, valid = to_rows(x, mask)
    samples = [row[keep] for row, keep in zip(rows, valid, strict=True) if keep.sum() >= 2]
    if not samples:
        return running_mean, running_var
    mean = np.mean([sample.mean(0) for sample in samples], axis=0)
    var = np.mean([sample.var(0, ddof=1) for sample in samples], axis=0)
    keep = 1.0 - momentum
    return keep * running_mean + momentum * mean, keep * running_var + momentum * var


def adaptive(normalized, condition, weight, bias, mask=None):
    """Return (1 + scale(z)) * normalized + shift(z), scale and shift the halves of W z + b."""
    rows, valid = to_rows(normalized, mask)
    projected = condition @ weight.T + bias
    num_channels = rows.shape[2]
    scale, shift = projected[:, None, :num_channels], projected[:, None, num_channels:]
    y = np.where(valid[:, :, None], (1.0 + scale) * rows + shift, 0.0)
    return from_rows(y, normalized.shape)


def adaptive_layer_norm(x, condition, weight, bias, *, eps):
    """Return the normalization over the last axis with gain and shift from the condition."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return adaptive((x - mean) / np.sqrt(var + eps), condition, weight, bias)


def adaptive_group_norm(x, condition, weight, bias, *, num_groups, eps, mask=None):
    """Return the group normalization with gain and shift from the condition."""
    ones, zeros = np.ones(len(weight) // 2), np.zeros(len(weight) // 2)
    plain = group_norm(x, ones, zeros, num_groups=num_groups, eps=eps, mask=mask)
    return adaptive(plain, condition, weight, bias, mask)


def adaptive_instance_norm(x, condition, weight, bias, *, eps, mask=None):
    """Return the instance normalization with gain and shift from the condition."""
    ones, zeros = np.ones(len(weight) // 2), np.zeros(len(weight) // 2)
    plain = instance_norm(x, ones, zeros, eps=eps, mask=mask)
    return adaptive(plain, condition, weight, bias, mask)
