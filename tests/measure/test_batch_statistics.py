"""Prediction with the statistics of the batch: training's function, without its side effects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normexp.measure import batch_statistics
from normexp.norms import NormFactory


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 5)
    )
    net.append(nn.BatchNorm1d(5))
    return net.double()


def test_it_is_what_training_computes() -> None:
    net, x = _net(), torch.randn(9, 2, 2, 2, dtype=torch.float64) * 3 + 1
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    with batch_statistics(net) as paths:
        ours = net(x)
        inside = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert paths == ["1", "5"]
    for after in (inside, net.state_dict()):
        assert all(torch.equal(state[name], tensor) for name, tensor in after.items())
    assert [module.training for module in net.modules()] == modes
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())
    net[2].p = 0.0
    torch.testing.assert_close(ours, net.train()(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("norm", ["batch_norm", "ghost_batch_norm", "batch_renorm"])
def test_relatives_give_batch_norm(norm: str) -> None:
    layer = NormFactory(norm)(3, role="block", dims=2).double()
    x = torch.randn(6, 3, 2, 2, dtype=torch.float64) + 2
    with batch_statistics(layer):
        ours = layer(x)
    eps = layer.eps
    expected = nn.functional.batch_norm(x, None, None, training=True, eps=eps)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("norm", ["evo_norm_b0", "switchable_norm"])
def test_norms_with_a_part_of_batch_norm(norm: str) -> None:
    layer = NormFactory(norm)(4, role="block", dims=2).double()
    x = torch.randn(6, 4, 3, 3, dtype=torch.float64) + 2
    with batch_statistics(layer):
        ours = layer(x)
    torch.testing.assert_close(ours, layer.train()(x), rtol=1e-10, atol=1e-12)


def test_a_failing_forward_leaves_the_buffers() -> None:
    class Fails(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    layer = Fails(3)
    buffer = layer.running_mean
    with batch_statistics(layer):
        with pytest.raises(RuntimeError, match="on purpose"):
            layer(torch.randn(4, 3) + 9)
        assert layer.running_mean is buffer
    assert layer.running_mean is buffer
    assert layer.running_mean.tolist() == [0.0, 0.0, 0.0]


def test_a_single_value_is_refused() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(3))
    with batch_statistics(layer), pytest.raises(ValueError, match=r"^0: a batch with 1 value"):
        layer(torch.randn(1, 3))


def test_train_mode_inside_is_refused() -> None:
    layer = nn.BatchNorm1d(3)
    with batch_statistics(layer), pytest.raises(ValueError, match="train mode"):
        layer.train()(torch.randn(4, 3))


def test_frozen_layers_keep_their_constants() -> None:
    from torchvision.ops import FrozenBatchNorm2d

    layer, x = FrozenBatchNorm2d(2), torch.randn(5, 2, 3, 3)
    with batch_statistics(layer) as paths:
        assert torch.equal(layer(x), FrozenBatchNorm2d(2)(x))
    assert paths == []
