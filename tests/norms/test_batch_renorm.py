"""batch_renorm against its formula in NumPy; its schedule, and what it takes for constant."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import batch as oracle

from normexp.errors import UserError
from normexp.norms.batch_norm import build_batch_norm
from normexp.norms.batch_renorm import CARD, build_batch_renorm

C = 4
SHAPES = {0: (6, C), 1: (3, 5, C), 2: (3, C, 2, 4)}
GAIN, SHIFT = np.linspace(0.5, 2.0, C), np.linspace(-1.0, 1.0, C)
AT_ONCE = {"warmup_micro_batches": 0, "r_ramp_micro_batches": 0, "d_ramp_micro_batches": 0}


def draw(dims, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(3.0, 2.0, SHAPES[dims]))


def build(dims, mean=1.0, var=1.0, **params):
    layer = build_batch_renorm(C, dims=dims, **params).double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(GAIN))
        layer.bias.copy_(torch.from_numpy(SHIFT))
        layer.running_mean.fill_(mean)
        layer.running_var.fill_(var)
    return layer


@given(
    dims=st.sampled_from([0, 1, 2]),
    r_max=st.sampled_from([1.0, 1.5, 3.0, 100.0]),
    d_max=st.sampled_from([0.0, 0.5, 5.0, 100.0]),
    mean=st.floats(-5, 5),
    var=st.floats(0.01, 50),
    seed=st.integers(0, 99),
)
def test_matches_the_formula(dims, r_max, d_max, mean, var, seed):
    x = draw(dims, seed)
    layer = build(dims, mean, var, r_max=r_max, d_max=d_max, **AT_ONCE)
    expected = oracle.batch_renorm(x.numpy(), GAIN, SHIFT, 1e-3, mean, var, r_max, d_max)
    np.testing.assert_allclose(layer(x).detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_without_a_bound_training_is_evaluation_with_the_statistics_before(dims):
    x = draw(dims)
    layer = build(dims, mean=-2.0, var=0.3, r_max=1e6, d_max=1e6, momentum=0.5, **AT_ONCE)
    before = layer.eval()(x)
    torch.testing.assert_close(layer.train()(x), before, rtol=0, atol=1e-10)
    # And it has moved them since.
    assert (layer.eval()(x) - before).abs().max() > 0.1


@pytest.mark.parametrize("momentum", [0.01, None])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_fresh_layer_is_batch_norm_in_training(dims, momentum):
    layer = build(dims, mean=0.0, momentum=momentum)
    plain = build_batch_norm(C, dims=dims, eps=1e-3, momentum=momentum).double()
    plain.load_state_dict(layer.state_dict())
    for seed in range(3):
        inputs = [draw(dims, seed).requires_grad_() for _ in range(2)]
        outputs = [module(x) for module, x in zip((layer, plain), inputs, strict=True)]
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
        for y in outputs:
            (y * draw(dims, seed + 10)).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=1e-12)
    for key, buffer in plain.named_buffers():
        torch.testing.assert_close(layer.get_buffer(key), buffer, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_the_gradient_is_that_of_the_formula_with_constant_r_and_d(dims, is_masked):
    layer, x, upstream = build(dims, var=2.0, **AT_ONCE), draw(dims).requires_grad_(), draw(dims, 1)
    mask = draw(1, 2)[..., 0] > 2.0 if is_masked and dims == 1 else None
    mean, var, _ = oracle.moments(x.detach().numpy(), None if mask is None else mask.numpy())
    r = np.clip(np.sqrt((var + 1e-3) / 2.001), 1 / 3, 3)
    d = np.clip((mean - 1.0) / np.sqrt(2.001), -5, 5)
    assert (r != 1).all()
    assert (d != 0).all()
    y = layer(x) if mask is None else layer(x, mask)
    (y * upstream).sum().backward()
    # (x_hat * r + d) * gain + shift is batch_norm with other, constant gain and shift.
    plain = build_batch_norm(C, dims=dims, eps=1e-3).double()
    inputs = draw(dims).requires_grad_()
    gain, shift = (torch.from_numpy(v).requires_grad_() for v in (GAIN, SHIFT))
    parameters = {"weight": gain * torch.from_numpy(r), "bias": gain * torch.from_numpy(d) + shift}
    given_mask = () if mask is None else (mask,)
    expected = torch.func.functional_call(plain, parameters, (inputs, *given_mask))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(x.grad, inputs.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.weight.grad, gain.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.bias.grad, shift.grad, rtol=0, atol=1e-10)


# The paper: nothing for 5000 passes, then r to 3 at 40,000 and d to 5 at 25,000.
@pytest.mark.parametrize(
    ("done", "r_max", "d_max"),
    [
        (0, 1.0, 0.0),
        (5_000, 1.0, 0.0),
        (5_035, 1.002, 0.00875),
        (15_000, 1 + 2 * 10 / 35, 2.5),
        (25_000, 1 + 2 * 20 / 35, 5.0),
        (40_000, 3.0, 5.0),
        (10_000_000, 3.0, 5.0),
    ],
)
def test_the_bounds_follow_the_papers_schedule(done, r_max, d_max):
    layer = build(0)
    layer.num_batches_tracked.fill_(done)
    # So far off that both are at their bounds, on either side.
    far = torch.full((C,), 1e6, dtype=torch.float64)
    r, d = layer.compute_correction(far, far)
    assert r.tolist() == pytest.approx([r_max] * C, abs=1e-12)
    assert d.tolist() == pytest.approx([d_max] * C, abs=1e-12)
    r, d = layer.compute_correction(-far, torch.zeros_like(far))
    assert r.tolist() == pytest.approx([max(1 / r_max, (1e-3 / 1.001) ** 0.5)] * C, abs=1e-12)
    assert d.tolist() == pytest.approx([-d_max] * C, abs=1e-12)


def test_a_ramp_of_length_zero_starts_after_the_warm_up():
    layer = build(0, warmup_micro_batches=2, r_ramp_micro_batches=0, d_ramp_micro_batches=0)
    far = torch.full((C,), 1e6, dtype=torch.float64)
    for done, bounds in ((0, (1.0, 0.0)), (1, (1.0, 0.0)), (2, (3.0, 5.0)), (3, (3.0, 5.0))):
        layer.num_batches_tracked.fill_(done)
        assert tuple(v[0].item() for v in layer.compute_correction(far, far)) == bounds


def test_forward_passes_in_training_are_counted():
    layer = build(0)
    layer(draw(0))
    layer.eval()(draw(0))
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"r_max": 0.5}, "norm.params.r_max=0.5: 1 or more"),
        ({"d_max": -1.0}, "norm.params.d_max=-1.0: 0 or more"),
        ({"warmup_micro_batches": -1}, "norm.params.warmup_micro_batches=-1: a whole number"),
        ({"r_ramp_micro_batches": -1}, "norm.params.r_ramp_micro_batches=-1: a whole number"),
        ({"d_ramp_micro_batches": -2}, "norm.params.d_ramp_micro_batches=-2: a whole number"),
    ],
)
def test_bad_options_are_named(params, line):
    with pytest.raises(UserError, match="^" + re.escape(line)):
        build_batch_renorm(C, dims=2, **params)


def test_state_is_declared():
    layer = build_batch_renorm(C, dims=2)
    assert tuple(name for name, _ in layer.named_buffers()) == CARD.state
    assert "r_max=3.0" in str(layer)
