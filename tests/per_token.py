"""Shared by the tests of the per-token norms: inputs of every kind, and layers in float64."""

from __future__ import annotations

import numpy as np
import torch

C = 8
SHAPES = {0: (3, C), 1: (3, 5, C), 2: (3, C, 2, 5)}
GAIN = np.linspace(0.5, 2.0, C)
SHIFT = np.linspace(-1.0, 1.0, C)


def draw(dims, seed=0, *, mean=3.0, scale=2.0):
    """Return an input in float64."""
    return np.random.default_rng(seed).normal(mean, scale, SHAPES[dims])


def with_affine(layer):
    """Give the layer a gain and shift that differ by channel, in float64."""
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(GAIN))
        if getattr(layer, "bias", None) is not None:
            layer.bias.copy_(torch.from_numpy(SHIFT))
    return layer


def assert_equals(layer, x, expected, *extra):
    """Check a layer's output to 1e-10."""
    y = layer(torch.from_numpy(x), *extra).detach().numpy()
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10)


def assert_exact_gradient(layer, x):
    """Check the gradients by the input and by every parameter against finite differences."""
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *values):
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, parameters, (x,))

    inputs = (torch.from_numpy(x), *(p.detach() for p in layer.parameters()))
    assert torch.autograd.gradcheck(call, tuple(t.clone().requires_grad_() for t in inputs))


def get_gradients(layer, x, g):
    """Return the gradients by the input and by every parameter, for a gradient of the output."""
    x = torch.from_numpy(x).requires_grad_()
    gradients = torch.autograd.grad(layer(x), (x, *layer.parameters()), torch.from_numpy(g))
    return [gradient.numpy() for gradient in gradients]


def find_positions_seen(layer, dims, *extra):
    """Return whether each position sees each other: the Jacobian's pattern, [positions] * 2."""
    x = torch.from_numpy(draw(dims)[:1]).requires_grad_()
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x, *extra), x).abs()
    axis = 2 if dims == 1 else 1
    pattern = jacobian.sum((0, axis, x.ndim, x.ndim + axis)) > 0
    num_positions = x[0].numel() // C
    return pattern.reshape(num_positions, num_positions)
