"""Gradient norms against autograd by hand; looking changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.data import IGNORED_TARGET, TokenTask
from normexp.measure import gradient_norms, summarize_gradients
from normexp.models import build_model, initialize
from normexp.norms import NormFactory
from normexp.training.objective import sum_losses


def image_model(norm: str = "batch_norm", placement: str = "res_post") -> nn.Module:
    model = build_model(
        "cifar_resnet",
        {"depth": 14, "width": 8},
        input_shape=(1, 8, 8),
        num_classes=10,
        norm=NormFactory(norm, {}, {}),
        placement=placement,
    ).double()
    initialize(model, seed=1)
    return model


def text_model(placement: str = "pre") -> nn.Module:
    model = build_model(
        "transformer",
        {"depth": 3, "width": 8, "num_heads": 2},
        input_shape=(6,),
        num_classes=7,
        norm=NormFactory("layer_norm", {}, {}),
        placement=placement,
        tokens=TokenTask(7, is_language_modeling=True, has_padding=True),
    ).double()
    initialize(model, seed=1)
    return model


def image_batches(num_batches: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(4, 1, 8, 8, generator=draw, dtype=torch.float64),
            torch.randint(10, (4,), generator=draw),
        )
        for _ in range(num_batches)
    ]


def text_batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 7, (4, 6), generator=draw)
    targets = torch.randint(3, 7, (4, 6), generator=draw)
    tokens[0, 2:] = 0
    targets[0, 2:] = IGNORED_TARGET
    return [(tokens[:2], targets[:2]), (tokens[2:], targets[2:])]


def by_hand(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The gradient of the mean loss over all predictions, one backward pass a batch."""
    model = copy.deepcopy(model).train()
    asked = sum(int((targets != IGNORED_TARGET).sum()) for _, targets in batches)
    for inputs, targets in batches:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        (loss / asked).backward()
    return {
        name: 0.0 if p.grad is None else math.sqrt(float((p.grad**2).sum()))
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("norm", ["batch_norm", "batch_renorm", "group_norm", "weight_norm"])
def test_images_by_hand(norm: str) -> None:
    model, batches = image_model(norm), image_batches()
    _, norms = gradient_norms(model, batches, sum_losses, num_targets=12)
    wanted = by_hand(model, batches)
    assert [norm.name for norm in norms] == list(wanted)
    for found in norms:
        assert found.gradient_norm == pytest.approx(wanted[found.name], rel=1e-12, abs=1e-15)
        parameter = model.get_parameter(found.name)
        assert found.num_elements == parameter.numel()
        assert found.weight_norm == pytest.approx(float(parameter.detach().norm()), rel=1e-12)


@pytest.mark.parametrize("placement", ["pre", "post", "rezero_pre"])
def test_texts_by_hand(placement: str) -> None:
    model, batches = text_model(placement), text_batches()
    # 3 texts of 6 tokens and one of 2.
    loss, norms = gradient_norms(model, batches, sum_losses, num_targets=20)
    wanted = by_hand(model, batches)
    for found in norms:
        assert found.gradient_norm == pytest.approx(wanted[found.name], rel=1e-12, abs=1e-15)
    assert 0.5 * math.log(7) < loss < 3 * math.log(7)
    summary = summarize_gradients(norms, model.last_branch_weight)  # type: ignore[arg-type]
    name = "blocks.2.mlp.branch.down.weight"
    assert summary["initial_gradient/last_branch"] == pytest.approx(wanted[name], rel=1e-12)
    # A branch that starts with the factor 0 gets no gradient into its weights.
    assert (wanted[name] == 0.0) == (placement == "rezero_pre")
    total = math.sqrt(sum(value**2 for value in wanted.values()))
    assert summary["initial_gradient/total"] == pytest.approx(total, rel=1e-12)


def test_blocks_and_roles() -> None:
    _, norms = gradient_norms(text_model(), text_batches(), sum_losses, num_targets=20)
    places = {norm.name: (norm.block, norm.role) for norm in norms}
    assert places["blocks.2.mlp.branch.up.bias"] == (2, "bias")
    assert places["blocks.0.attention.norm_before.weight"] == (0, "norm")
    assert places["token_embedding.weight"] == (None, "weight")
    assert {norm.block for norm in norms} == {None, 0, 1, 2}
    _, norms = gradient_norms(image_model(), image_batches(1), sum_losses, num_targets=4)
    # Depth 14 has two blocks in each of three stages.
    places = {norm.name: (norm.block, norm.role) for norm in norms}
    assert places["stages.1.0.conv2.weight"] == (2, "weight")
    assert places["stages.2.1.norm2.bias"] == (5, "norm")


@pytest.mark.parametrize("placement", ["res_post", "pre", "rezero_pre"])
def test_the_last_branch_of_a_residual_network_ends_with_a_convolution(placement: str) -> None:
    model = image_model("group_norm", placement)
    assert model.last_branch_weight == "stages.2.1.conv2.weight"
    _, norms = gradient_norms(model, image_batches(1), sum_losses, num_targets=4)
    assert "initial_gradient/last_branch" in summarize_gradients(norms, "stages.2.1.conv2.weight")


def test_the_last_branch_of_a_normalized_weight_is_its_raw_weight() -> None:
    model = image_model("weight_norm")
    _, norms = gradient_norms(model, image_batches(1), sum_losses, num_targets=4)
    (raw,) = [n for n in norms if n.name.startswith("stages.2.1.conv2.") and n.role == "weight"]
    summary = summarize_gradients(norms, str(model.last_branch_weight))
    assert summary["initial_gradient/last_branch"] == raw.gradient_norm > 0


def test_a_model_that_names_no_last_branch_has_the_total_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    model[0].weight.requires_grad_(False)
    batch = (torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, 1]))
    _, norms = gradient_norms(model, [batch], sum_losses, num_targets=2)
    assert [norm.name for norm in norms] == ["0.bias", "1.weight", "1.bias"]
    assert [norm.block for norm in norms] == [None] * 3
    assert list(summarize_gradients(norms, None)) == ["initial_gradient/total"]


@pytest.mark.parametrize("norm", ["batch_norm", "batch_renorm", "switchable_norm", "evo_norm_b0"])
def test_looking_changes_nothing(norm: str) -> None:
    model = image_model(norm).eval()
    model.stages[0].train()  # type: ignore[index,operator,union-attr]
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    buffers = dict(model.named_buffers())
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    with torch.no_grad():
        gradient_norms(model, image_batches(), sum_losses, num_targets=12)
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.testing.assert_close(first.grad, torch.ones_like(first), rtol=0, atol=0)
    assert all(p.grad is None for p in list(model.parameters())[1:])


def test_random_numbers_of_the_forward_pass_are_given_back() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    before = torch.get_rng_state()
    batch = (torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, 1]))
    gradient_norms(model, [batch], sum_losses, num_targets=2)
    assert torch.equal(torch.get_rng_state(), before)
