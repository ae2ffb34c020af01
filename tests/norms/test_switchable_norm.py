"""switchable_norm against its formula in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.mixed import switchable_norm

from normexp.errors import UserError
from normexp.norms import NormFactory, check_statistic_sets, describe_norm_layers
from normexp.norms.switchable_norm import build_switchable_norm

GAIN = np.linspace(0.5, 2.0, 6)
SHIFT = np.linspace(-1.0, 1.0, 6)
SHAPES = {0: (4, 6), 1: (4, 5, 6), 2: (4, 6, 2, 5)}
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], bool)
EPS = 1e-3


def build(dims, **params):
    """Return the layer in float64, every parameter away from where it starts."""
    layer = build_switchable_norm(6, dims=dims, eps=EPS, **params).double()
    with torch.no_grad():
        for name, value in logits(dims).items():
            getattr(layer, name).copy_(torch.from_numpy(value))
        if layer.weight is not None:
            layer.weight.copy_(torch.from_numpy(GAIN))
            layer.bias.copy_(torch.from_numpy(SHIFT))
    return layer


def logits(dims):
    if dims == 0:
        return {"mean_weight": np.array([0.3, -0.4]), "var_weight": np.array([-0.2, 0.9])}
    return {"mean_weight": np.array([0.3, -0.4, 1.0]), "var_weight": np.array([-0.2, 0.9, 0.1])}


def draw(dims, seed=0, mean=3.0):
    return np.random.default_rng(seed).normal(mean, 2.0, SHAPES[dims])


def expect(x, dims, **call):
    return switchable_norm(x, **logits(dims), weight=GAIN, bias=SHIFT, eps=EPS, **call)


@given(dims=st.sampled_from([0, 1, 2]), seed=st.integers(0, 99))
def test_training_matches_the_formula(dims, seed):
    x = draw(dims, seed)
    actual = build(dims)(torch.from_numpy(x)).detach()
    np.testing.assert_allclose(actual, expect(x, dims)[0], rtol=0, atol=1e-10)


@given(seed=st.integers(0, 99))
def test_masked_statistics_are_over_valid_positions(seed):
    x = draw(1, seed)
    mask = np.random.default_rng(seed).random((4, 5)) < 0.6
    x[~mask] = np.nan
    y = build(1)(torch.from_numpy(x), torch.from_numpy(mask)).detach()
    np.testing.assert_allclose(y, expect(x, 1, mask=mask)[0], rtol=0, atol=1e-10)


def test_a_full_mask_changes_nothing():
    x, layer = torch.from_numpy(draw(1)), build(1)
    y = layer(x, torch.ones(4, 5, dtype=torch.bool))
    torch.testing.assert_close(y, layer(x), rtol=0, atol=1e-12)


def test_invalid_positions_get_and_give_no_gradient():
    mask = torch.from_numpy(MASK)
    x = torch.from_numpy(draw(1))
    x[~mask] = torch.nan
    layer, x = build(1), x.requires_grad_()
    layer(x, mask).pow(3).sum().backward()
    assert (x.grad[~mask] == 0).all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_a_mask_is_for_sequences():
    with pytest.raises(ValueError, match="a mask is for sequences"):
        build(2)(torch.from_numpy(draw(2)), torch.ones(4, 2, dtype=torch.bool))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_running_statistics_are_biased_and_start_at_0_and_1(dims):
    layer, mean, var = build(dims, momentum=0.25), np.zeros(6), np.ones(6)
    for seed in range(3):
        x = draw(dims, seed)
        layer(torch.from_numpy(x))
        _, batch_mean, batch_var = expect(x, dims)
        mean, var = 0.75 * mean + 0.25 * batch_mean, 0.75 * var + 0.25 * batch_var
    np.testing.assert_allclose(layer.running_mean, mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(layer.running_var, var, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_evaluation_takes_the_batchs_share_from_the_running_statistics(dims):
    layer = build(dims)
    layer(torch.from_numpy(draw(dims, seed=1)))
    before = copy.deepcopy(layer.state_dict())
    running = layer.running_mean.numpy().copy(), layer.running_var.numpy().copy()
    x = draw(dims, seed=2)
    y = layer.eval()(torch.from_numpy(x)).detach()
    np.testing.assert_allclose(y, expect(x, dims, running=running)[0], rtol=0, atol=1e-10)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_a_batch_without_valid_positions_moves_nothing():
    layer = build(1)
    y = layer(torch.full((4, 5, 6), torch.nan).double(), torch.zeros(4, 5, dtype=torch.bool))
    assert (y == 0).all()
    assert torch.equal(layer.running_mean, torch.zeros(6).double())
    assert torch.equal(layer.running_var, torch.ones(6).double())


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_one_large_logit_is_that_norm_alone(dims, part):
    # exp(-100) is 0 beside 1 in float64: instance, layer or batch norm, by torch's own kernels.
    x = torch.from_numpy(draw(dims))
    layer = build_switchable_norm(6, dims=dims, affine=False).double()
    with torch.no_grad():
        for weights in (layer.mean_weight, layer.var_weight):
            weights.copy_(100.0 * torch.nn.functional.one_hot(torch.tensor(part), 3))
    images = x if dims == 2 else x.transpose(1, 2)
    if part == 0:
        expected = torch.nn.functional.instance_norm(images)
    elif part == 1:
        expected = torch.nn.functional.group_norm(images, 1)
    else:
        expected = torch.nn.functional.batch_norm(images, None, None, training=True)
    expected = expected if dims == 2 else expected.transpose(1, 2)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)


def test_the_layers_variance_follows_from_the_instances():
    # The paper's relation, which the layer uses in a form without cancellation: far from zero
    # mean(var + mean^2) - mean^2 in float32 would be off by about mean^2 * 2^-24 = 6 here.
    x = torch.from_numpy(draw(2))
    var_in, mean_in = torch.var_mean(x, (2, 3), correction=0)
    relation = (var_in + mean_in**2).mean(1) - mean_in.mean(1) ** 2
    torch.testing.assert_close(relation, x.var((1, 2, 3), correction=0), rtol=0, atol=1e-12)
    layer = build_switchable_norm(6, dims=2)
    far = (torch.from_numpy(draw(2, mean=0.0)) + 1e4).float()
    exact = copy.deepcopy(layer).double()(far.double())
    torch.testing.assert_close(layer(far).double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("is_training", [True, False])
def test_the_gradient_is_exact(dims, is_training):
    layer = build(dims).train(is_training)
    x = torch.from_numpy(draw(dims)[:2]).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_the_gradient_is_exact_with_a_mask():
    layer, mask = build(1), torch.from_numpy(MASK)
    x = torch.from_numpy(draw(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, mask), (x, *layer.parameters()))


@pytest.mark.parametrize(("dims", "number"), [(0, 2), (1, 3), (2, 3)])
def test_parameters_and_record(dims, number):
    layer = NormFactory("switchable_norm")(6, role="block", dims=dims)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (6,),
        "bias": (6,),
        "mean_weight": (number,),
        "var_weight": (number,),
    }
    assert (layer.mean_weight == 1).all()
    assert layer.norm_record.params == {
        "eps": 1e-5,
        "affine": True,
        "momentum": 0.1,
        "num_statistics": number,
    }


def test_without_affine_the_logits_remain():
    names = [name for name, _ in build(2, affine=False).named_parameters()]
    assert names == ["mean_weight", "var_weight"]


def test_every_statistic_set_is_reported():
    model = torch.nn.Sequential(NormFactory("switchable_norm")(6, role="block", dims=2))
    (layer,) = describe_norm_layers(model, (6, 2, 5), 4)
    assert layer.statistic_set_sizes == (10, 60, 40)
    check_statistic_sets([layer])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_half_precision_is_rounded_once(dims, dtype):
    # The square of 300 is more than float16 holds.
    layer = build(dims).float()
    x = (100 * torch.from_numpy(draw(dims))).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(y, layer(x.float()).to(dtype))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_stacked_replicas_are_the_replicas(dims):
    layers = [build(dims), build(dims)]
    with torch.no_grad():
        layers[1].mean_weight.copy_(layers[0].var_weight)
    params, buffers = torch.func.stack_module_state(layers)
    base, x = copy.deepcopy(layers[0]), torch.from_numpy(np.stack([draw(dims, s) for s in (1, 2)]))
    call = torch.func.functional_call
    y = torch.vmap(lambda p, b, x: call(base, (p, b), (x,)))(params, buffers, x)
    expected = torch.stack([layer(part) for layer, part in zip(layers, x, strict=True)])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    for name, stacked in buffers.items():
        alone = torch.stack([layer.get_buffer(name) for layer in layers])
        torch.testing.assert_close(stacked, alone, rtol=0, atol=1e-12)


def test_compiles_whole():
    layer, mask = build(1), torch.from_numpy(MASK)
    x = torch.from_numpy(draw(1))
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), layer(x, mask), rtol=0, atol=1e-12)


def test_channels_last_images_stay_so():
    x = torch.from_numpy(draw(2)).contiguous(memory_format=torch.channels_last)
    assert build(2)(x).is_contiguous(memory_format=torch.channels_last)


def test_unsupported_dims_point_to_what_to_use():
    with pytest.raises(UserError, match=r"^norm=switchable_norm: .*dims=3"):
        build_switchable_norm(6, dims=3)
