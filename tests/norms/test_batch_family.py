"""What all batch normalizations share: masks, half precision, vmap, one graph, strides, copies."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from oracle import batch as oracle
from torch.func import functional_call, grad, stack_module_state

from normexp.errors import UserError
from normexp.norms import NORMS, NormFactory

C, EPS = 6, 1e-3
GAIN = np.linspace(0.5, 2.0, C)
SHIFT = np.linspace(-1.0, 1.0, C)
SHAPES = {0: (8, C), 1: (8, 5, C), 2: (8, C, 3, 2)}
# Each in all the ways that its forward pass goes.
KINDS = {
    "batch_norm": {},
    "sync_batch_norm": {},
    "frozen_batch_norm": {},
    "moving_batch_norm": {"freeze_after_micro_batches": 10},
    "ghost_batch_norm": {"ghost_size": 4},
    "batch_renorm": {},
    "corrected_batch_renorm": {
        "warmup_micro_batches": 0,
        "r_ramp_micro_batches": 0,
        "d_ramp_micro_batches": 0,
    },
}
NAMES = {"moving_batch_norm": "frozen_batch_norm", "corrected_batch_renorm": "batch_renorm"}
FORMS = [(0, False), (1, False), (1, True), (2, False)]
MOVING = [kind for kind in KINDS if kind != "frozen_batch_norm"]


def build(kind, dims, **params):
    """Return a layer in float64 whose gain, shift and running statistics differ by channel."""
    factory = NormFactory(NAMES.get(kind, kind), {"eps": EPS, **KINDS[kind], **params})
    layer = factory(C, role="block", dims=dims).double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(GAIN))
        layer.bias.copy_(torch.from_numpy(SHIFT))
        layer.running_mean.copy_(torch.linspace(2.0, 3.0, C, dtype=torch.float64))
        layer.running_var.copy_(torch.linspace(3.0, 5.0, C, dtype=torch.float64))
    return layer


def draw(dims, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(3.0, 2.0, SHAPES[dims]))


def draw_mask(seed=0):
    """Return a mask with a sample of which nothing is valid, and one of which all is."""
    mask = np.random.default_rng(seed).random(SHAPES[1][:2]) < 0.6
    mask[2], mask[3] = False, True
    return torch.from_numpy(mask)


def expect(kind, x, mask=None):
    """Return the output of the oracle in training."""
    x, mask = x.numpy(), None if mask is None else mask.numpy()
    mean, var = np.linspace(2.0, 3.0, C), np.linspace(3.0, 5.0, C)
    if kind == "frozen_batch_norm":
        return oracle.frozen_batch_norm(x, GAIN, SHIFT, EPS, mean, var, mask)
    if kind == "ghost_batch_norm":
        return oracle.ghost_batch_norm(x, GAIN, SHIFT, EPS, 4, mask)
    if kind == "corrected_batch_renorm":
        return oracle.batch_renorm(x, GAIN, SHIFT, EPS, mean, var, 3.0, 5.0, mask)
    return oracle.batch_norm(x, GAIN, SHIFT, EPS, mask)


@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_training_matches_the_formula(kind, dims):
    x = draw(dims)
    actual = build(kind, dims)(x).detach()
    np.testing.assert_allclose(actual, expect(kind, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_uses_the_running_statistics(kind, dims):
    layer, x = build(kind, dims), draw(dims)
    actual = layer.eval()(x).detach()
    expected = expect("frozen_batch_norm", x)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("kind", KINDS)
def test_masked_training_and_evaluation_match_the_formula(kind):
    layer, x, mask = build(kind, 1), draw(1), draw_mask()
    actual = layer(x, mask).detach()
    np.testing.assert_allclose(actual, expect(kind, x, mask), rtol=0, atol=1e-10)
    layer = build(kind, 1).eval()
    expected = expect("frozen_batch_norm", x, mask)
    np.testing.assert_allclose(layer(x, mask).detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kind", MOVING)
def test_buffers_are_those_of_the_valid_elements(kind, is_masked, momentum):
    layer = build(kind, 1, momentum=momentum)
    with torch.no_grad():
        layer.running_mean.zero_()
        layer.running_var.fill_(1.0)
    batches = [draw(1, seed) for seed in range(3)]
    masks = [draw_mask(seed) for seed in range(3)]
    for x, mask in zip(batches, masks, strict=True):
        layer(x, mask) if is_masked else layer(x)
    size = 4 if kind == "ghost_batch_norm" else 8
    parts = [part for x in batches for part in x.numpy().reshape(-1, size, *x.shape[1:])]
    valid = [part for mask in masks for part in mask.numpy().reshape(-1, size, 5)]
    mean, var = oracle.running_statistics(parts, momentum, valid if is_masked else None)
    np.testing.assert_allclose(layer.running_mean, mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(layer.running_var, var, rtol=0, atol=1e-10)
    assert layer.num_batches_tracked == len(parts)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_at_invalid_positions_has_no_influence(kind, is_training):
    mask = draw_mask()
    found = []
    for filler in (0.0, 1e30, float("nan"), float("inf")):
        layer = build(kind, 1).train(is_training)
        x = torch.where(mask[:, :, None], draw(1), filler).requires_grad_()
        y = layer(x, mask)
        (y * draw(1, 7)).sum().backward()
        assert not y[~mask].any()
        assert not x.grad[~mask].any()
        found.append([y, x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_mask_is_no_mask(kind):
    first, second, x = build(kind, 1), build(kind, 1), draw(1)
    full = torch.ones(SHAPES[1][:2], dtype=torch.bool)
    torch.testing.assert_close(first(x), second(x, full), rtol=0, atol=1e-12)
    for key, value in first.state_dict().items():
        torch.testing.assert_close(value, second.state_dict()[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_valid", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_too_few_valid_positions_give_finite_numbers_and_leave_the_buffers(kind, num_valid):
    layer, x = build(kind, 1), draw(1).requires_grad_()
    before = copy.deepcopy(layer.state_dict())
    mask = torch.zeros(SHAPES[1][:2], dtype=torch.bool)
    mask[0, :num_valid] = True
    y = layer(x, mask)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


@pytest.mark.parametrize(("dims", "is_masked"), FORMS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "renorm" not in kind])
def test_gradients_are_exact(kind, dims, is_masked):
    layer = build(kind, dims)
    state = {key: value.clone() for key, value in layer.named_buffers()}
    mask = (draw_mask(),) if is_masked else ()

    def call(x, weight, bias):
        buffers = {key: value.clone() for key, value in state.items()}
        return functional_call(layer, {"weight": weight, "bias": bias, **buffers}, (x, *mask))

    parameters = [parameter.detach().clone() for parameter in layer.parameters()]
    inputs = [tensor.requires_grad_() for tensor in (draw(dims), *parameters)]
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dims", "is_masked"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_keeps_float32_statistics(kind, dims, is_masked, dtype):
    # Of size 300, whose square is infinite in float16.
    x = (draw(dims) * 100).to(dtype)
    mask = (draw_mask(),) if is_masked else ()
    expected = build(kind, dims).float()(x.float(), *mask)
    bound = 1 + expected.abs()
    # Parameters in float32, as under autocast, or in half precision as well. With the second,
    # torch's own layers round bias - mean * weight / std, some units here.
    for layer, units in ((build(kind, dims).float(), 1), (build(kind, dims).to(dtype), 3)):
        actual = layer(x, *mask)
        assert actual.dtype == dtype
        assert ((actual.float() - expected).abs() / bound).max() < units * 2**-8


@pytest.mark.parametrize(("dims", "is_masked"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_under_vmap_are_layers_of_their_own(kind, dims, is_masked):
    layers = [build(kind, dims) for _ in range(3)]
    with torch.no_grad():
        for index, layer in enumerate(layers):
            layer.weight.mul_(index + 1)
            layer.running_mean.add_(index)
    parameters, buffers = stack_module_state(layers)
    xs = torch.stack([draw(dims, seed) for seed in range(3)])
    targets = torch.stack([draw(dims, seed + 10) for seed in range(3)])
    mask = (draw_mask(),) if is_masked else ()

    def loss(parameters, buffers, x, target):
        return (functional_call(layers[0], (parameters, buffers), (x, *mask)) * target).sum()

    gradients = torch.vmap(grad(loss))(parameters, buffers, xs, targets)
    for index, layer in enumerate(layers):
        (layer(xs[index], *mask) * targets[index]).sum().backward()
        for key, parameter in layer.named_parameters():
            torch.testing.assert_close(gradients[key][index], parameter.grad, rtol=0, atol=1e-10)
        for key, buffer in layer.named_buffers():
            torch.testing.assert_close(buffers[key][index], buffer, rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph(kind, is_masked):
    layer, x = build(kind, 1), draw(1)
    mask = (draw_mask(),) if is_masked else ()
    twin = copy.deepcopy(layer)
    torch.compiler.reset()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, *mask), layer(x, *mask), rtol=0, atol=1e-10)
    for key, value in layer.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_channels_last_strides_stay(kind):
    x = draw(2).to(memory_format=torch.channels_last)
    layer = build(kind, 2)
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, build(kind, 2)(x.contiguous()), rtol=0, atol=1e-12)
    assert build(kind, 2)(x.contiguous()).is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device_gives_shapes(kind):
    for dims in (0, 1, 2):
        layer = build(kind, dims).to("meta")
        y = layer(draw(dims).to("meta"))
        assert y.is_meta
        assert y.shape == SHAPES[dims]


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_with_as_many_positions_as_channels_are_normalized_by_channel(kind):
    # torch's BatchNorm1d would take the positions for channels here, without a word.
    x = torch.from_numpy(np.random.default_rng(0).normal(3.0, 2.0, (4, C, C)))
    np.testing.assert_allclose(build(kind, 1)(x).detach(), expect(kind, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", MOVING)
def test_a_single_value_in_training_raises(kind):
    layer = build(kind, 1, **({"ghost_size": 1} if kind == "ghost_batch_norm" else {}))
    with pytest.raises(ValueError, match=r"more than (1|one) value"):
        layer(draw(1)[:1, :1])


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_shapes_and_masks_raise(kind):
    layer = build(kind, 1)
    with pytest.raises(ValueError, match="6 features in axis 2"):
        layer(draw(1).transpose(1, 2))
    with pytest.raises(ValueError, match="3 axes"):
        layer(draw(0))
    with pytest.raises(ValueError, match="bool of shape"):
        layer(draw(1), torch.ones(8, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool of shape"):
        layer(draw(1), torch.ones(8, 5))
    if kind != "batch_norm":
        with pytest.raises(ValueError, match="bool of shape"):
            build(kind, 0)(draw(0), torch.ones(8, 6, dtype=torch.bool))


@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_is_that_of_torch(kind, dims):
    torch_layer = torch.nn.BatchNorm2d(C).double()
    assert set(build(kind, dims).state_dict()) == set(torch_layer.state_dict())
    build(kind, dims).load_state_dict(torch_layer.state_dict(), strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_affine_false_has_no_parameters(kind):
    factory = NormFactory(NAMES.get(kind, kind), {**KINDS[kind], "affine": False})
    for dims in (0, 1, 2):
        module = factory(C, role="block", dims=dims).double()
        assert list(module.parameters()) == []
        plain = build(kind, dims, eps=module.eps)
        with torch.no_grad():
            plain.weight.fill_(1.0)
            plain.bias.zero_()
            plain.running_mean.zero_()
            plain.running_var.fill_(1.0)
        torch.testing.assert_close(module(draw(dims)), plain(draw(dims)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted({NAMES.get(kind, kind) for kind in KINDS}))
def test_unsupported_dims_point_to_what_to_use(name):
    with pytest.raises(UserError, match="^" + re.escape(f"norm={name}: ") + ".*dims=3"):
        NORMS.get(name).build(8, dims=3)
