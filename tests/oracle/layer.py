"""Norms of the per-token family and layer norm's relatives in NumPy, from their formulas.

``dims`` counts the position axes: [N, C], [N, L, C] or [N, C, H, W]; ``weight`` and ``bias`` hold
one number a channel.
"""

from __future__ import annotations

import numpy as np


def channel_axis(dims):
    return 2 if dims == 1 else 1


def by_channel(vector, dims):
    shape = [1] * (dims + 2)
    shape[channel_axis(dims)] = -1
    return np.reshape(vector, shape)


def affine(y, weight, bias, dims):
    return y * by_channel(weight, dims) + by_channel(bias, dims)


def layer_norm(x, weight, bias, *, eps, dims):
    axis = channel_axis(dims)
    mean = x.mean(axis, keepdims=True)
    var = ((x - mean) ** 2).mean(axis, keepdims=True)
    return affine((x - mean) / np.sqrt(var + eps), weight, bias, dims)


layer_norm_channel = layer_norm


def layer_norm_chw(x, weight, bias, *, eps, dims, mask=None):
    """Sample by sample; the mask picks the positions of a sequence."""
    y = np.zeros_like(x)
    for n, sample in enumerate(x):
        valid = np.ones(x.shape[1], bool) if mask is None else mask[n]
        values = sample[valid] if dims == 1 else sample
        if values.size == 0:
            continue
        normalized = (values - np.mean(values)) / np.sqrt(np.var(values) + eps)
        normalized = affine(normalized[None], weight, bias, dims)[0]
        if dims == 1:
            y[n, valid] = normalized
        else:
            y[n] = normalized
    return y


def rms_norm(x, weight, *, eps, dims):
    mean_square = (x**2).mean(channel_axis(dims), keepdims=True)
    return x / np.sqrt(mean_square + eps) * by_channel(weight, dims)


def partial_rms_norm(x, weight, *, part_size, eps, dims):
    axis = channel_axis(dims)
    part = np.take(x, range(part_size), axis)
    return x / np.sqrt((part**2).mean(axis, keepdims=True) + eps) * by_channel(weight, dims)


def scale_norm(x, gain, *, eps, dims):
    length = np.sqrt((x**2).sum(channel_axis(dims), keepdims=True))
    return gain * x / np.maximum(length, eps)


def layer_norm_std_outside(x, weight, bias, *, eps, dims):
    axis = channel_axis(dims)
    mean = x.mean(axis, keepdims=True)
    std = np.sqrt(((x - mean) ** 2).sum(axis, keepdims=True) / (x.shape[axis] - 1))
    return affine((x - mean) / (std + eps), weight, bias, dims)


# Backward passes by hand, for rows [M, C] and the gradient g of the loss by the output.
#
# y_i = w_i h_i + b_i, h_i = s (x_i - mean), s = (var + eps)^(-1/2), and with a_i = g_i w_i:
# ds/dx_j = -s^3 (x_j - mean) / C = -s^2 h_j / C, so
# dL/dx_j = sum_i a_i dh_i/dx_j = s a_j - s mean(a) - s h_j mean(a h).
# Without the mean (RMS norm) the middle term is not there and h_i = s x_i.


def layer_norm_backward(x, weight, g, *, eps):
    """Return the gradients by input, weight and bias."""
    s = 1 / np.sqrt(x.var(1, keepdims=True) + eps)
    h = s * (x - x.mean(1, keepdims=True))
    a = g * weight
    dx = s * (a - a.mean(1, keepdims=True) - h * (a * h).mean(1, keepdims=True))
    return dx, (g * h).sum(0), g.sum(0)


def rms_norm_backward(x, weight, g, *, eps):
    """Return the gradients by input and weight."""
    s = 1 / np.sqrt((x**2).mean(1, keepdims=True) + eps)
    h = s * x
    a = g * weight
    return s * (a - h * (a * h).mean(1, keepdims=True)), (g * h).sum(0)
