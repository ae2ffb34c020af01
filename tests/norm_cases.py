"""What tests of norms share: layers with parameters of their own, and what a mask must do."""

from __future__ import annotations

import numpy as np
import torch

LENGTHS = (6, 3, 0, 4)


def make_input(shape, seed=0):
    """Return a NumPy input of that shape, off centre."""
    return np.random.default_rng(seed).normal(1.0, 2.0, shape)


def with_own_parameters(layer, seed=0):
    """Give a layer parameters that differ by element, in float64; return them in NumPy too."""
    rng = np.random.default_rng([seed, 1])
    layer = layer.double()
    parameters = {}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameters[name] = rng.uniform(-1.0, 2.0, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(parameters[name]))
    return layer, parameters


def make_mask():
    """Return the mask of four sequences of lengths 6, 3, 0 and 4."""
    return np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]


def apply(layer, x, mask, *others):
    """Return output, and gradients for the input and all parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, *others, mask)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def check_padding_is_without_influence(layer, num_features, *others):
    """Raise unless what stands at invalid positions changes nothing, and comes out as zero.

    Not even NaN may: in the output, the gradient of the input and of every parameter. The third
    sequence has no valid position at all.
    """
    mask = torch.from_numpy(make_mask())
    x = torch.from_numpy(make_input((*mask.shape, num_features)))
    expected = apply(layer, torch.where(mask[:, :, None], x, 0.0), mask, *others)
    for filler in (1e6, float("nan"), float("inf")):
        found = apply(layer, torch.where(mask[:, :, None], x, filler), mask, *others)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    assert all(value.isfinite().all() for value in expected)
    assert (expected[0][~mask] == 0).all()
    assert (expected[1][~mask] == 0).all()


def check_equals_truncated(layer, num_features, *others):
    """Raise unless each masked sequence comes out as the one cut to its valid positions."""
    mask = torch.from_numpy(make_mask())
    x = torch.from_numpy(make_input((*mask.shape, num_features)))
    y = layer(x, *others, mask)
    for n, length in enumerate(LENGTHS):
        if length:
            alone = layer(x[n : n + 1, :length], *(other[n : n + 1] for other in others))
            torch.testing.assert_close(y[n : n + 1, :length], alone, rtol=0, atol=1e-12)


def find_influenced_positions(layer, num_features, *, changed):
    """Return which output positions move when one position of a sequence of 6 changes."""
    x = torch.from_numpy(make_input((2, 6, num_features)))
    other = x.clone()
    other[:, changed, 0] += 1.0
    moved = (layer(x) - layer(other)).abs().amax((0, 2)) > 1e-9
    return moved.nonzero().flatten().tolist()
