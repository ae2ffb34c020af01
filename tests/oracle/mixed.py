"""Norms that mix kinds of statistics, from the formulas, in NumPy.

Arrays are features ``[N, C]``, sequences ``[N, L, C]`` or images ``[N, C, H, W]``; a mask
``[N, L]`` is True where a position is valid.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np


def by_channel(vector, ndim):
    """Return one number a channel in a shape that broadcasts against inputs."""
    return vector.reshape(-1, 1, 1) if ndim == 4 else vector


def scale_tokens(x, *, num_groups, eps):
    """Return x / rms of each token's groups, and that rms."""
    groups = x.reshape(*x.shape[:-1], num_groups, -1)
    rms = np.sqrt((groups**2).mean(-1, keepdims=True) + eps)
    rms = np.broadcast_to(rms, groups.shape).reshape(x.shape)
    return x / rms, rms


class PowerNorm:
    """Forward and backward pass of the paper's Algorithm 2, with the warm-up, token by token.

    running_phi, ema_gz and passes are the state.
    """

    def __init__(
        self,
        num_features,
        *,
        num_groups=1,
        eps=1e-5,
        momentum=0.1,
        backward_momentum=0.1,
        warmup=10000,
        has_token_scaling=True,
    ):
        self.num_groups, self.eps, self.warmup = num_groups, eps, warmup
        self.alpha_fwd, self.alpha_bkw = 1 - momentum, 1 - backward_momentum
        self.has_token_scaling = has_token_scaling
        self.running_phi, self.ema_gz = np.ones(num_features), np.zeros(num_features)
        self.passes = 0

    def evaluate(self, x, *, weight, bias):
        """Return the output for tokens [T, C] in evaluation."""
        u = scale_tokens(x, num_groups=self.num_groups, eps=self.eps)[0]
        u = u if self.has_token_scaling else x
        return u / np.sqrt(self.running_phi + self.eps) * weight + bias

    def train(self, x, grad_y, *, weight, bias):
        """Return the output for valid tokens [T, C], the gradients of x, weight, bias."""
        u, rms = scale_tokens(x, num_groups=self.num_groups, eps=self.eps)
        if not self.has_token_scaling:
            u, rms = x, np.ones_like(x)
        self.passes += 1
        phi_batch = (u**2).mean(0)
        is_warm_up = self.passes <= self.warmup
        psi = np.sqrt((phi_batch if is_warm_up else self.running_phi) + self.eps)
        z = u / psi
        if is_warm_up:
            # The authors' two steps: the average of all passes, then the moving one.
            t = self.passes
            average = self.running_phi * (t - 1) / t + phi_batch / t
            self.running_phi = self.alpha_fwd * average + (1 - self.alpha_fwd) * phi_batch
        else:
            self.running_phi = self.alpha_fwd * self.running_phi + (1 - self.alpha_fwd) * phi_batch
        g = grad_y * weight
        gamma, big_lambda = (z * z).mean(0), (g * z).mean(0)
        grad_u = (g - (big_lambda if is_warm_up else self.ema_gz) * z) / psi
        self.ema_gz = (
            self.ema_gz * (1 - (1 - self.alpha_bkw) * gamma) + (1 - self.alpha_bkw) * big_lambda
        )
        grad_x = grad_u
        if self.has_token_scaling:
            groups = (grad_u * u).reshape(*x.shape[:-1], self.num_groups, -1)
            inner = np.broadcast_to(groups.mean(-1, keepdims=True), groups.shape)
            grad_x = (grad_u - u * inner.reshape(u.shape)) / rms
        return z * weight + bias, grad_x, (grad_y * z).sum(0), grad_y.sum(0)


def power_norm(x, *, weight, bias, eps, num_groups=1):
    """Return the first output in training for tokens [T, C]."""
    layer = PowerNorm(x.shape[-1], eps=eps, num_groups=num_groups)
    return layer.train(x, np.zeros_like(x), weight=weight, bias=bias)[0]


def softmax(logits):
    """Return exp(logits), summing to 1."""
    return np.exp(logits) / np.exp(logits).sum()


def switchable_norm(x, *, mean_weight, var_weight, weight, bias, eps, mask=None, running=None):
    """Return the output and the mean and variance of the batch, every set by itself.

    running: (mean, variance) to use for the batch, as in evaluation.
    """
    tokens = x if x.ndim == 3 else x.reshape(*x.shape[:2], -1).swapaxes(1, 2)  # [N, P, C]
    num_samples, num_positions, num_channels = tokens.shape
    valid = np.ones((num_samples, num_positions), bool) if mask is None else mask
    batch = tokens[valid]
    stats = (batch.mean(0), batch.var(0)) if len(batch) else (np.zeros(num_channels),) * 2
    mean_bn, var_bn = stats if running is None else running
    mean_shares, var_shares = softmax(mean_weight), softmax(var_weight)
    out = np.zeros_like(tokens)
    for n in range(num_samples):
        sample = tokens[n, valid[n]]
        if not len(sample):
            continue
        means = [sample.mean(0), sample.mean(), mean_bn]
        variances = [sample.var(0), sample.var(), var_bn]
        if x.ndim == 2:
            means, variances = means[1:], variances[1:]
        mean = sum(share * part for share, part in zip(mean_shares, means, strict=True))
        var = sum(share * part for share, part in zip(var_shares, variances, strict=True))
        out[n, valid[n]] = (sample - mean) / np.sqrt(var + eps) * weight + bias
    out = out if x.ndim == 3 else out.swapaxes(1, 2).reshape(x.shape)
    return out, *stats


def spectral_band_norm(x, *, num_bands, weight, bias, eps):
    """Return the output, by the whole complex transform, one frequency at a time.

    weight: [C, num_bands].
    """
    v = x.swapaxes(1, 2) if x.ndim == 3 else x
    sizes = v.shape[2:]
    axes = tuple(range(2, v.ndim))
    num_positions = int(np.prod(sizes))
    spectrum = np.fft.fftn(v, axes=axes)
    rings = {}
    for point in itertools.product(*map(range, sizes)):
        cycles = [Fraction(min(k, n - k), n) for k, n in zip(point, sizes, strict=True)]
        rings.setdefault(sum(c * c for c in cycles), []).append(point)
    radii = sorted(rings)[1:]
    bands = [[] for _ in range(num_bands)]
    for rank, radius in enumerate(radii):
        bands[rank * num_bands // len(radii)] += rings[radius]
    out = np.zeros_like(spectrum)
    for band, points in enumerate(bands):
        where = (slice(None), slice(None), *np.array(points).T)
        part = spectrum[where]
        power = (np.abs(part) ** 2).mean(-1, keepdims=True) * (num_positions - 1)
        scaled = part / np.sqrt(power / num_positions**2 + eps)
        out[where] = scaled * weight[:, band, None]
    y = np.fft.ifftn(out, axes=axes)
    assert np.abs(y.imag).max() < 1e-10
    y = y.real.swapaxes(1, 2) if x.ndim == 3 else y.real
    return y + by_channel(bias, x.ndim)
