"""Freezing the batch norms of a model that is there already."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normexp import freeze_norms
from normexp.norms import NormFactory
from normexp.norms.frozen_batch_norm import FrozenBatchNorm


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, eps=0.1), nn.Flatten(2), nn.BatchNorm1d(4)
    )
    model.extend([nn.Flatten(), nn.LazyLinear(3), nn.BatchNorm1d(3), nn.GroupNorm(1, 3)])
    model.train()
    model(torch.randn(8, 2, 6, 6) + 2)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("train_affine", [True, False])
def test_a_frozen_model_computes_what_evaluation_did(
    dtype: torch.dtype, train_affine: bool
) -> None:
    model, x = _model().to(dtype), torch.randn(5, 2, 6, 6, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    expected = model.eval()(x)
    model.train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert freeze_norms(model, train_affine=train_affine) == ["1", "3", "6"]
    assert all(isinstance(model[i], FrozenBatchNorm) for i in (1, 3, 6))
    assert model[1].training
    # Constants are folded into one factor and one summand; else it is evaluation's own kernel.
    tolerance = 0.0 if train_affine else 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(model(x), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model.train()(x), expected, rtol=tolerance, atol=tolerance)
    after = model.state_dict()
    assert list(after) == list(state) if train_affine else set(after) == set(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in after.items())
    names = {name for name, _ in model.named_parameters()}
    assert ({"1.weight", "1.bias"} <= names) == train_affine
    assert freeze_norms(model) == []


def test_an_optimizer_keeps_its_hold() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freeze_norms(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(5, 2, 6, 6)).square().sum().backward()
    optimizer.step()
    moved = {n for n, t in model.state_dict().items() if not torch.equal(before[n], t)}
    assert {"1.weight", "1.bias", "6.bias"} <= moved
    assert not any("running" in name or "tracked" in name for name in moved)


@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize(
    "norm", ["batch_norm", "ghost_batch_norm", "batch_renorm", "sync_batch_norm"]
)
def test_relatives_of_batch_norm(norm: str, dims: int) -> None:
    model = nn.Sequential(NormFactory(norm)(4, role="block", dims=dims))
    x = torch.randn(*{0: (8, 4), 1: (8, 3, 4), 2: (8, 4, 2, 2)}[dims])
    model.train()(x + 1)
    expected = model.eval()(x)
    assert freeze_norms(model.train()) == ["0"]
    assert model[0].norm_record.name == "frozen_batch_norm"
    torch.testing.assert_close(model(x), expected)


def test_a_shared_layer_stays_shared() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    assert freeze_norms(model) == ["0", "2"]
    assert model[0] is model[2]


def test_what_cannot_be_frozen_is_refused_before_anything_is() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    model = nn.Sequential(nn.BatchNorm1d(3), Own(3))
    with pytest.raises(ValueError, match=r"^1: Own has a forward of its own"):
        freeze_norms(model)
    assert type(model[0]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="the model is a batch norm itself"):
        freeze_norms(nn.BatchNorm1d(3))


def test_without_running_statistics_there_is_nothing_to_freeze() -> None:
    assert freeze_norms(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))) == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_constants_do_not_move_with_what_an_optimizer_still_holds(set_to_none: bool) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    x = torch.randn(5, 2, 6, 6)
    model(x).square().sum().backward()
    freeze_norms(model, train_affine=False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    model(x).square().sum().backward()
    optimizer.step()
    assert {"1.weight", "1.bias"} <= set(before)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_a_layer_that_would_freeze_later_is_frozen_now() -> None:
    later = NormFactory("frozen_batch_norm", {"freeze_after_micro_batches": 100})
    model = nn.Sequential(later(4, role="block", dims=2))
    model(torch.randn(8, 4, 2, 2) + 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert freeze_norms(model) == ["0"]
    assert vars(model[0])["norm_record"].params["freeze_after_micro_batches"] == 0
    model.train()(torch.randn(8, 4, 2, 2))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_gain_and_shift_of_frozen_layers_become_constants() -> None:
    model = _model()
    assert freeze_norms(model) == ["1", "3", "6"]
    assert freeze_norms(model, train_affine=False) == ["1", "3", "6"]
    assert not {"1.weight", "3.weight", "6.bias"} & {n for n, _ in model.named_parameters()}
    assert freeze_norms(model, train_affine=False) == []
    model.train()(torch.randn(5, 2, 6, 6))


def test_what_would_be_lost_or_go_on_unseen_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    handle = model[1].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ValueError, match=r"^1: it has hooks"):
        freeze_norms(model)
    handle.remove()
    parametrize.register_parametrization(model[1], "weight", nn.ReLU())
    with pytest.raises(ValueError, match=r"^1: its parameters are parametrized"):
        freeze_norms(model)
    parametrize.remove_parametrizations(model[1], "weight")
    vars(model)["steps"] = [model[1]]
    with pytest.raises(ValueError, match=r"^1: also held by steps"):
        freeze_norms(model)
    assert type(model[0]) is nn.BatchNorm1d
    del vars(model)["steps"]
    assert freeze_norms(model) == ["0", "1"]
    with pytest.raises(ValueError, match=r"^0: .* before its first forward pass"):
        freeze_norms(nn.Sequential(nn.LazyBatchNorm1d()))
