"""power_norm against the paper's algorithm in NumPy: forward, backward, buffers, step by step."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.mixed import PowerNorm, power_norm

from normexp.errors import UserError
from normexp.norms import NormFactory, check_statistic_sets, describe_norm_layers
from normexp.norms.power_norm import build_power_norm

GAIN = np.linspace(0.5, 2.0, 6)
SHIFT = np.linspace(-1.0, 1.0, 6)
SHAPES = {0: (4, 6), 1: (4, 5, 6)}
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], bool)


def build(dims, **params):
    """Return the layer in float64, with a gain and shift that differ by channel."""
    layer = build_power_norm(6, dims=dims, **params).double()
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.copy_(torch.from_numpy(GAIN))
            layer.bias.copy_(torch.from_numpy(SHIFT))
    return layer


def draw(dims, seed=0):
    return np.random.default_rng(seed).normal(1.0, 2.0, SHAPES[dims])


@given(
    dims=st.sampled_from([0, 1]),
    num_groups=st.sampled_from([1, 2, 3, 6]),
    eps=st.sampled_from([1e-5, 0.5]),
    seed=st.integers(0, 99),
)
def test_the_first_pass_matches_the_formula(dims, num_groups, eps, seed):
    x = draw(dims, seed)
    expected = power_norm(
        x.reshape(-1, 6), weight=GAIN, bias=SHIFT, eps=eps, num_groups=num_groups
    ).reshape(x.shape)
    layer = build(dims, num_groups=num_groups, eps=eps)
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("warmup", [0, 2, 10000])
@pytest.mark.parametrize("has_token_scaling", [True, False])
@pytest.mark.parametrize(("dims", "mask"), [(0, None), (1, None), (1, MASK)])
def test_steps_match_the_algorithm(dims, mask, has_token_scaling, warmup):
    """Outputs, gradients and buffers over five passes, before and after the warm-up."""
    options = {
        "num_groups": 2,
        "momentum": 0.2,
        "backward_momentum": 0.3,
        "has_token_scaling": has_token_scaling,
    }
    layer = build(dims, warmup_micro_batches=warmup, **options)
    oracle, affine = PowerNorm(6, warmup=warmup, **options), {"weight": GAIN, "bias": SHIFT}
    valid = np.ones(SHAPES[dims][:-1], bool) if mask is None else mask
    arguments = () if mask is None else (torch.from_numpy(mask),)

    def close(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)

    for step in range(5):
        x, grad_y = draw(dims, 2 * step), draw(dims, 2 * step + 1)
        x[~valid] = np.nan
        leaf = torch.from_numpy(x).requires_grad_()
        layer.zero_grad()
        y = layer(leaf, *arguments)
        y.backward(torch.from_numpy(grad_y))
        expected = oracle.train(x[valid], grad_y[valid], **affine)
        actual = y.detach().numpy(), leaf.grad.numpy(), layer.weight.grad, layer.bias.grad
        for ours, theirs in zip(actual[:2], expected[:2], strict=True):
            close(ours[valid], theirs)
            assert (ours[~valid] == 0).all()
        for ours, theirs in zip(actual[2:], expected[2:], strict=True):
            close(ours, theirs)
        close(layer.running_phi, oracle.running_phi)
        close(layer.ema_gz, oracle.ema_gz)
        assert layer.num_batches_tracked.item() == step + 1
    if has_token_scaling:
        x = draw(dims, 99)
        close(layer.eval()(torch.from_numpy(x)).detach(), oracle.evaluate(x, **affine))


@pytest.mark.parametrize("dims", [0, 1])
def test_the_gradient_is_exact_in_the_warm_up_only(dims):
    x = torch.from_numpy(draw(dims)).requires_grad_()
    layer = build(dims)
    inputs = (x, *layer.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), inputs)
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), inputs)
    late = build(dims, warmup_micro_batches=0, momentum=0.0)
    late.ema_gz.fill_(1.0)
    assert not torch.autograd.gradcheck(lambda x: late(x), (x,), raise_exception=False)


def test_the_gradient_is_exact_with_a_mask():
    layer, mask = build(1, num_groups=2), torch.from_numpy(MASK)
    x = torch.from_numpy(draw(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, mask), (x, *layer.parameters()))


@pytest.mark.parametrize("dims", [0, 1])
def test_evaluation_touches_no_buffer_even_with_gradients(dims):
    layer = build(dims)
    layer(torch.from_numpy(draw(dims)).requires_grad_()).pow(3).sum().backward()
    before = copy.deepcopy(layer.state_dict())
    assert before["ema_gz"].all()
    x = torch.from_numpy(draw(dims, 1)).requires_grad_()
    layer.eval()(x).pow(3).sum().backward()
    assert x.grad.any()
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_a_micro_batch_without_valid_tokens_does_not_count():
    layer, mask = build(1), torch.zeros(4, 5, dtype=torch.bool)
    before = copy.deepcopy(layer.state_dict())
    x = torch.full((4, 5, 6), torch.nan, dtype=torch.float64, requires_grad=True)
    y = layer(x, mask)
    y.sum().backward()
    assert (y == 0).all()
    assert (x.grad == 0).all()
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_two_uses_before_one_backward_pass():
    # A layer shared by two places: each backward pass moves the running mean of g z once.
    layer = build(1, warmup_micro_batches=0)
    x = torch.from_numpy(draw(1)).requires_grad_()
    (layer(x).pow(3).sum() + layer(2 * x).sum()).backward()
    assert x.grad.isfinite().all()
    assert layer.num_batches_tracked.item() == 2


def test_without_token_scaling_one_statistic_is_left():
    def describe(**params):
        model = torch.nn.Sequential(NormFactory("power_norm", params)(6, role="block", dims=1))
        (layer,) = describe_norm_layers(model, (5, 6), 4)
        check_statistic_sets([layer])
        return layer.statistic_set_sizes

    assert describe(num_groups=2) == (3, 20)
    assert describe(has_token_scaling=False) == (20,)


def test_parameters_and_record():
    layer = NormFactory("power_norm")(6, role="block", dims=1)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weight": (6,),
        "bias": (6,),
    }
    assert layer.norm_record.params == {
        "num_groups": 1,
        "eps": 1e-5,
        "affine": True,
        "momentum": 0.1,
        "backward_momentum": 0.1,
        "warmup_micro_batches": 10000,
        "has_token_scaling": True,
    }
    assert list(build(0, affine=False).parameters()) == []


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"num_groups": 4}, r"norm\.params\.num_groups=4: a divisor of the 6 channels"),
        ({"num_groups": 0}, r"norm\.params\.num_groups=0: a divisor"),
        ({"backward_momentum": 1.5}, r"norm\.params\.backward_momentum=1\.5: "),
        ({"warmup_micro_batches": -1}, r"norm\.params\.warmup_micro_batches=-1: "),
    ],
)
def test_bad_options_are_named(params, line):
    with pytest.raises(UserError, match="^" + line):
        build_power_norm(6, dims=1, **params)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("warmup", [0, 10000])
def test_half_precision_is_rounded_once(warmup, dtype):
    # The square of 300 is more than float16 holds.
    layer = build(1, warmup_micro_batches=warmup).float()
    other = copy.deepcopy(layer)
    x = (100 * torch.from_numpy(draw(1))).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(y, other(x.float()).to(dtype))
    assert torch.equal(layer.running_phi, other.running_phi)


@pytest.mark.parametrize("warmup", [1, 10000])
@pytest.mark.parametrize("is_functional", [True, False])
def test_stacked_replicas_are_the_replicas(is_functional, warmup):
    layers = [build(1, warmup_micro_batches=warmup) for _ in range(2)]
    with torch.no_grad():
        layers[1].weight.mul_(2.0)
    params, buffers = torch.func.stack_module_state(copy.deepcopy(layers))
    base, mask = copy.deepcopy(layers[0]), torch.from_numpy(MASK)

    def loss(p, x, b):
        return torch.func.functional_call(base, (p, b), (x, mask)).pow(3).sum()

    for step in range(3):
        x = torch.from_numpy(np.stack([draw(1, 2 * step + r) for r in (0, 1)]))
        if is_functional:
            gradient = torch.vmap(torch.func.grad(loss, argnums=1))(params, x, buffers)
        else:
            leaf = x.clone().requires_grad_()
            torch.vmap(loss)(params, leaf, buffers).sum().backward()
            gradient = leaf.grad
        for r, layer in enumerate(layers):
            leaf = x[r].clone().requires_grad_()
            layer(leaf, mask).pow(3).sum().backward()
            torch.testing.assert_close(gradient[r], leaf.grad, rtol=0, atol=1e-10)
            for name, buffer in layer.named_buffers():
                torch.testing.assert_close(buffers[name][r], buffer, rtol=0, atol=1e-10)


def test_unstacked_buffers_are_refused_under_vmap():
    layer, x = build(1), torch.from_numpy(np.stack([draw(1), draw(1)]))
    with pytest.raises(ValueError, match="changes its buffers: stack them"):
        torch.vmap(layer)(x)


@pytest.mark.parametrize("warmup", [1, 10000])
def test_compiles_whole(warmup):
    layer, mask = build(1, warmup_micro_batches=warmup), torch.from_numpy(MASK)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    for step in range(3):
        leaves = [torch.from_numpy(draw(1, step)).requires_grad_() for _ in range(2)]
        for call, leaf in zip((layer, compiled), leaves, strict=True):
            call(leaf, mask).pow(3).sum().backward()
        torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=0, atol=1e-10)
        for ours, theirs in zip(compiled.buffers(), layer.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dims", "hint"), [(2, r"images.*batch_norm"), (3, "dims=3")])
def test_unsupported_dims_point_to_what_to_use(dims, hint):
    with pytest.raises(UserError, match=rf"^norm=power_norm: .*{hint}"):
        build_power_norm(6, dims=dims)
