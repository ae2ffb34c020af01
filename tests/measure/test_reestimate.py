"""Re-estimated running statistics against NumPy, and what must not move."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normexp.measure import (
    reestimate_running_statistics,
    reestimated_statistics,
    running_statistic_error,
)
from normexp.norms import NormFactory

EPS = 1e-5


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5)
    ).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([0.5, -2.0, 1.5]))
        net[1].bias.copy_(torch.tensor([0.1, 0.2, -0.3]))
    return net


def _inputs(num_samples: int = 23) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_samples, 2, 2, 2, generator=generator, dtype=torch.float64) * 3 + 5


def _reference(net: nn.Sequential, x: Tensor, batch_size: int) -> list[tuple[np.ndarray, ...]]:
    """Mean, population variance and mean of unbiased variances of both layers, in NumPy."""
    values = {name: tensor.detach().numpy() for name, tensor in net.state_dict().items()}
    seen: list[list[np.ndarray]] = [[], []]
    images = x.numpy()
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        hidden = np.einsum("nchw,oc->nohw", batch, values["0.weight"][:, :, 0, 0])
        hidden = hidden + values["0.bias"][:, None, None]
        seen[0].append(hidden.transpose(1, 0, 2, 3).reshape(3, -1))
        mean = hidden.mean(axis=(0, 2, 3), keepdims=True)
        var = hidden.var(axis=(0, 2, 3), keepdims=True)
        y = (hidden - mean) / np.sqrt(var + EPS)
        y = y * values["1.weight"][:, None, None] + values["1.bias"][:, None, None]
        seen[1].append((y.reshape(len(batch), -1) @ values["3.weight"].T + values["3.bias"]).T)
    found = []
    for blocks in seen:
        together = np.concatenate(blocks, axis=1)
        sizes = np.array([block.shape[1] for block in blocks])
        unbiased = np.stack([block.var(axis=1, ddof=1) for block in blocks])
        weighted = (unbiased * sizes[:, None]).sum(axis=0) / sizes.sum()
        found.append((together.mean(axis=1), together.var(axis=1), weighted))
    return found


@pytest.mark.parametrize("batch_size", [4, 7, 21, 100])
@pytest.mark.parametrize("estimator", ["population", "mean_of_batches"])
def test_against_numpy(batch_size: int, estimator: str) -> None:
    net, x = _net(), _inputs()
    expected = _reference(net, x, batch_size)
    reestimate_running_statistics(net, x, batch_size=batch_size, estimator=estimator)
    for layer, (mean, population, unbiased) in zip((net[1], net[4]), expected, strict=True):
        var = population if estimator == "population" else unbiased
        np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-10)
        np.testing.assert_allclose(layer.running_var.numpy(), var, rtol=1e-10)


def test_the_first_layer_does_not_depend_on_the_batches() -> None:
    x = _inputs()
    found = []
    for batch_size in (4, 7):
        net = _net()
        reestimate_running_statistics(net, x, batch_size=batch_size)
        found.append(net)
        error = running_statistic_error(net, x, batch_size=9)
        assert error[0].mean_error < 1e-12
        assert error[0].var_ratio_error < 1e-12
        # Batch statistics before it, not running ones.
        assert error[1].var_ratio_error > 1e-3
    torch.testing.assert_close(found[0][1].running_var, found[1][1].running_var, rtol=1e-12, atol=0)
    assert not torch.allclose(found[0][4].running_var, found[1][4].running_var, rtol=1e-6)


def test_one_batch_equals_training_with_a_momentum_of_one() -> None:
    net, x = _net(), _inputs()
    reestimate_running_statistics(net, x, batch_size=len(x), estimator="mean_of_batches")
    trained = _net().train()
    for layer in (trained[1], trained[4]):
        layer.momentum = 1.0
    trained(x)
    for index in (1, 4):
        for name in ("running_mean", "running_var"):
            ours, torchs = getattr(net[index], name), getattr(trained[index], name)
            torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-14)


def test_only_the_first_samples_are_used() -> None:
    net, other, x = _net(), _net(), _inputs()
    reestimate_running_statistics(net, x, batch_size=4, num_samples=10)
    reestimate_running_statistics(other, x[:10], batch_size=4)
    assert torch.equal(net[4].running_var, other[4].running_var)


class Restless(nn.Module):
    """Draws random numbers and writes a buffer even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0.0 * torch.rand((), dtype=x.dtype)


def _mixed() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(3, momentum=None), nn.Dropout(0.5), Restless(), nn.BatchNorm1d(3)
    )
    model.train()
    model[3].eval()
    model(torch.randn(8, 3)).sum().backward()
    return model


def test_nothing_else_moves() -> None:
    model = _mixed()
    running = {"0.running_mean", "0.running_var", "3.running_mean", "3.running_var"}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = [id(buffer) for buffer in model.buffers()]
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    gradients = [p.grad.clone() for p in model.parameters()]
    reestimate_running_statistics(model, torch.randn(20, 3) + 4, batch_size=6)
    torch.set_rng_state(random_state)  # randn above drew, as the test's own doing
    changed = {n for n, t in model.state_dict().items() if not torch.equal(state[n], t)}
    assert changed == running
    assert [id(buffer) for buffer in model.buffers()] == objects
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_the_random_state_is_kept() -> None:
    model, x = _mixed(), torch.randn(20, 3)
    before = torch.get_rng_state()
    reestimate_running_statistics(model, x, batch_size=6)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_old_statistics_come_back_also_after_an_error() -> None:
    model, x = _mixed(), torch.randn(20, 3) + 4
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with reestimated_statistics(model, x, batch_size=5):
        torch.testing.assert_close(model[0].running_mean, x.mean(0))
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    context = reestimated_statistics(model, x, batch_size=5)
    context.__enter__()
    error = RuntimeError("on purpose")
    assert not torch.equal(model[0].running_mean, state["0.running_mean"])
    assert not context.__exit__(RuntimeError, error, None)
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())


@pytest.mark.parametrize("norm", ["ghost_batch_norm", "batch_renorm", "sync_batch_norm"])
def test_relatives_of_batch_norm_are_re_estimated(norm: str) -> None:
    layer = NormFactory(norm)(3, role="block", dims=0).double()
    x = torch.randn(20, 3, dtype=torch.float64) * 2 + 1
    reestimate_running_statistics(layer, x, batch_size=8)
    torch.testing.assert_close(layer.running_mean, x.mean(0))
    torch.testing.assert_close(layer.running_var, x.var(0, correction=0))


def test_chunks_of_ghost_batch_norm_are_batches() -> None:
    layer = NormFactory("ghost_batch_norm", {"ghost_size": 5, "momentum": None})(
        3, role="block", dims=2
    ).double()
    x = torch.randn(20, 3, 2, 2, dtype=torch.float64)
    layer.train()(x)
    trained = layer.running_var.clone()
    reestimate_running_statistics(layer, x, batch_size=5, estimator="mean_of_batches")
    torch.testing.assert_close(layer.running_var, trained, rtol=1e-12, atol=0)


def test_sequences_have_their_channels_last_and_masks_count() -> None:
    layer = NormFactory("batch_norm")(4, role="block", dims=1).double()

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, x[:, :, 0] > 0)

    x = torch.randn(12, 4, 4, dtype=torch.float64)
    reestimate_running_statistics(Masked(), x, batch_size=6)
    valid = x[x[:, :, 0] > 0]
    torch.testing.assert_close(layer.running_mean, valid.mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(layer.running_var, valid.var(0, correction=0))


def test_frozen_layers_stay_frozen() -> None:
    from torchvision.ops import FrozenBatchNorm2d

    model = nn.Sequential(FrozenBatchNorm2d(2), nn.BatchNorm2d(2))
    model[0].running_mean += 1.0
    reestimate_running_statistics(model, torch.randn(9, 2, 3, 3), batch_size=3)
    assert model[0].running_mean.tolist() == [1.0, 1.0]
    assert model[1].running_mean.tolist() != [0.0, 0.0]


class Unknown(nn.Module):
    """Keeps a running mean for a use of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.InstanceNorm2d(2, track_running_stats=True), "instance_norm is not .*single samples"),
        (NormFactory("power_norm")(2, role="block", dims=0), "power_norm is not .*its training"),
        (Unknown(), "Unknown is not supported: .*is not known"),
    ],
)
def test_other_running_statistics_are_refused_by_name(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=f"^0: {message}"):
        reestimate_running_statistics(nn.Sequential(layer), torch.randn(9, 2), batch_size=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size 0"),
        ({"num_samples": 24}, "1 to 23 are there"),
        ({"num_samples": 0}, "1 to 23 are there"),
        ({"estimator": "mean"}, "is none of"),
        ({"batch_size": 11}, r"^4: a batch with 1 value"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    change: dict[str, object], message: str
) -> None:
    net = _net()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        reestimate_running_statistics(net, _inputs(), **{"batch_size": 5, **change})
    with pytest.raises(ValueError, match="inputs hold no sample"):
        reestimate_running_statistics(net, _inputs()[:0], batch_size=5)
    assert all(torch.equal(state[name], t) for name, t in net.state_dict().items())
    assert all(module.training for module in net.modules())


def test_a_model_without_running_statistics_is_left_alone() -> None:
    reestimate_running_statistics(nn.GroupNorm(1, 3), torch.randn(4, 3), batch_size=1)


def test_activation_checkpointing_moves_statistics_twice_until_re_estimated() -> None:
    """torch runs the forward pass of a checkpointed layer again in the backward pass."""
    layer, x = nn.BatchNorm1d(3, momentum=0.5).double(), _inputs().flatten(2).mean(2).repeat(1, 2)
    x = x[:, :3].clone().requires_grad_()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.num_batches_tracked == 2
    torch.testing.assert_close(layer.running_mean, 0.75 * x.detach().mean(0))
    reestimate_running_statistics(layer, x.detach(), batch_size=len(x))
    torch.testing.assert_close(layer.running_mean, x.detach().mean(0))
