"""Folded models predict what they predicted, and norms that cannot be folded say why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normexp.measure import Folding, fold_norms, max_difference
from normexp.norms import NormFactory


def _randomize(model: nn.Module) -> nn.Module:
    """Give batch norms statistics, gains and shifts of every sign."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), Tensor):
            for tensor in (module.running_mean, module.weight, module.bias):
                if tensor is not None:
                    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                    tensor.detach().copy_(values)
            module.running_var.copy_(
                torch.rand(module.running_var.shape, generator=generator) + 0.1
            )
    return model.double().eval()


def _fold(model: nn.Module, x: Tensor) -> tuple[nn.Module, list[Folding]]:
    _randomize(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded, foldings = fold_norms(model, x)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert max_difference(model, folded, x, batch_size=2) < 1e-10
    return folded, foldings


IMAGES = torch.randn(3, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
FEATURES = IMAGES.flatten(1)[:, :4]
SEQUENCES = IMAGES.flatten(2).movedim(1, 2)
BN = nn.BatchNorm2d


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "norm", "x"),
    [
        (lambda b: nn.Conv2d(4, 6, 3, padding=1, bias=b), BN(6), IMAGES),
        (lambda b: nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=b), BN(6), IMAGES),
        (lambda b: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=b), BN(4), IMAGES),
        (lambda b: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=b), BN(6), IMAGES),
        (lambda b: nn.Conv2d(4, 6, 1, bias=b), nn.BatchNorm2d(6, affine=False), IMAGES),
        (lambda b: nn.Conv1d(4, 6, 3, bias=b), nn.BatchNorm1d(6), IMAGES.flatten(2)),
        (lambda b: nn.Linear(4, 6, bias=b), nn.BatchNorm1d(6), FEATURES),
        (
            lambda b: nn.Linear(4, 6, bias=b),
            NormFactory("batch_norm")(6, role="block", dims=1),
            SEQUENCES,
        ),
        (lambda b: nn.Conv2d(4, 6, 1, bias=b), nn.SyncBatchNorm(6), IMAGES),
    ],
)
def test_into_the_layer_in_front(
    layer: Callable[[bool], nn.Module], norm: nn.Module, x: Tensor, has_bias: bool
) -> None:
    folded, foldings = _fold(nn.Sequential(layer(has_bias), norm), x)
    assert foldings == [Folding("1", "0", True, "into the layer in front of it")]
    assert isinstance(folded[1], nn.Identity)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "norm", "x"),
    [
        (lambda b: nn.Conv2d(4, 6, 3, bias=b), BN(4), IMAGES),
        (lambda b: nn.Conv2d(4, 6, 1, groups=2, bias=b), BN(4), IMAGES),
        (lambda b: nn.Conv2d(4, 6, 3, padding="valid", bias=b), BN(4), IMAGES),
        (lambda b: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", bias=b), BN(4), IMAGES),
        (lambda b: nn.Linear(4, 6, bias=b), nn.BatchNorm1d(4), FEATURES),
    ],
)
def test_into_the_layer_behind(
    layer: Callable[[bool], nn.Module], norm: nn.Module, x: Tensor, has_bias: bool
) -> None:
    _, foldings = _fold(nn.Sequential(norm, layer(has_bias), nn.ReLU()), x)
    assert foldings == [Folding("0", "1", True, "into the layer behind it")]


def test_a_layer_between_two_norms_takes_both() -> None:
    _, foldings = _fold(nn.Sequential(BN(4), nn.Conv2d(4, 5, 3), BN(5)), IMAGES)
    assert [(f.path, f.into, f.is_folded) for f in foldings] == [("0", "1", True), ("2", "1", True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resnet18_of_torchvision(dtype: torch.dtype) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model, x = resnet18().train(), torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        model(x + 1)  # running statistics other than the first ones
    model, x = model.eval().to(dtype), x.to(dtype)
    folded, foldings = fold_norms(model, x[:2])
    assert [f.is_folded for f in foldings] == [True] * 20
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    bound = 1e-5 if dtype is torch.float32 else 1e-10
    assert max_difference(model, folded, x, batch_size=3) < bound


class Model(nn.Module):
    """A convolution and a norm, wired by a function."""

    def __init__(self, wire: Callable[[Model, Tensor], object], **modules: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), BN(4)
        for name, module in modules.items():
            self.add_module(name, module)
        self.wire = wire

    def forward(self, x: Tensor) -> object:
        return self.wire(self, x)


def _residual(m: Model, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y) + y


def _relu_in_place(m: Model, x: Tensor) -> Tensor:
    return m.norm(torch.relu_(m.conv(x)))


def _other_order(m: Model, x: Tensor) -> Tensor:
    """The modules stand side by side, but the convolution's output goes elsewhere."""
    return torch.relu(m.conv(x)) + torch.relu(m.norm(torch.sin(x)))


def _view(m: Model, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y) + y.flatten(2).mean()


def _twice(m: Model, x: Tensor) -> Tensor:
    return m.norm(m.conv(x)) + m.norm(x)


def _conv_twice(m: Model, x: Tensor) -> Tensor:
    return torch.relu(m.conv(x + 1)) + m.norm(m.conv(x))


def _weight_elsewhere(m: Model, x: Tensor) -> Tensor:
    return m.norm(m.conv(x)) + torch.conv2d(x, m.conv.weight)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (_residual, "feeds it alone"),
        (_relu_in_place, "feeds it alone"),
        (_other_order, "feeds it alone"),
        (_view, "feeds it alone"),
        (_twice, "norm is entered 2 times"),
        (_conv_twice, "conv is entered 2 times"),
        (_weight_elsewhere, "parameters of conv are used outside"),
        (lambda m, x: torch.relu(x), "norm is not entered"),
    ],
)
def test_an_output_that_goes_elsewhere_too(
    wire: Callable[[Model, Tensor], Tensor], reason: str
) -> None:
    (folding,) = _fold(Model(wire), IMAGES)[1]
    assert not folding.is_folded
    assert folding.into is None
    assert reason in folding.reason


def test_an_output_that_the_model_returns() -> None:
    def wire(m: Model, x: Tensor) -> object:
        y = m.conv(x)
        return {"features": [y], "logits": m.norm(y)}

    _, (folding,) = fold_norms(_randomize(Model(wire)), IMAGES)
    assert "feeds it alone" in folding.reason


def test_what_happens_to_the_layer_counts() -> None:
    weighted = Model(lambda m, x: m.norm(m.conv(x)))
    parametrizations.weight_norm(weighted.conv)
    assert "conv is parametrized: bake" in _fold(weighted, IMAGES)[1][0].reason
    hooked = Model(lambda m, x: m.norm(m.conv(x)))
    hooked.conv.register_forward_hook(lambda _, __, y: y.relu())
    assert "conv has forward hooks" in _fold(hooked, IMAGES)[1][0].reason
    patched = Model(lambda m, x: m.norm(m.conv(x)))
    patched.conv.forward = torch.relu
    assert "conv has a forward of its own" in _fold(patched, IMAGES)[1][0].reason
    tied = Model(lambda m, x: m.norm(m.conv(x)), other=nn.Conv2d(4, 4, 1))
    tied.other.weight = tied.conv.weight
    assert "conv shares its parameters" in _fold(tied, IMAGES)[1][0].reason

    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)

    own = Model(lambda m, x: m.norm(m.conv(x)))
    own.conv = Standardized(4, 4, 1)
    assert "a forward of its own" in _fold(own, IMAGES)[1][0].reason


def test_zeros_that_are_padded_on_behind() -> None:
    _, (folding,) = _fold(nn.Sequential(BN(4), nn.Conv2d(4, 4, 3, padding=1)), IMAGES)
    assert "1 pads zeros" in folding.reason
    _, (folding,) = _fold(nn.Sequential(BN(4), nn.ConvTranspose2d(4, 4, 3)), IMAGES)
    assert "1 is transposed" in folding.reason


def test_channels_on_another_axis() -> None:
    norm = nn.BatchNorm1d(36)  # over the positions of [N, L, C]
    _, (folding,) = _fold(nn.Sequential(nn.Linear(4, 36), norm), SEQUENCES)
    assert "channels stand on another axis" in folding.reason


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.GroupNorm(2, 4), "GroupNorm computes its statistics from each input"),
        (nn.InstanceNorm2d(4), "InstanceNorm2d computes its statistics from each input"),
        (nn.BatchNorm2d(4, track_running_stats=False), "uses those of each batch"),
        (
            NormFactory("group_norm", {"num_groups": 2})(4, role="block", dims=2),
            "group_norm computes its statistics",
        ),
        (
            NormFactory("dynamic_tanh")(4, role="block", dims=2),
            "dynamic_tanh is not linear in its input",
        ),
    ],
)
def test_norms_that_are_not_affine(norm: nn.Module, reason: str) -> None:
    (folding,) = _fold(nn.Sequential(nn.Conv2d(4, 4, 1), norm), IMAGES)[1]
    assert (folding.path, folding.is_folded) == ("1", False)
    assert reason in folding.reason


def test_own_subclasses_are_not_guessed_at() -> None:
    class Activated(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    (folding,) = _fold(nn.Sequential(nn.Conv2d(4, 4, 1), Activated(4)), IMAGES)[1]
    assert "a forward of its own" in folding.reason


def test_no_norm_is_no_norm_to_fold() -> None:
    norm = NormFactory("no_norm")(4, role="block", dims=2)
    assert _fold(nn.Sequential(nn.Conv2d(4, 4, 1), norm), IMAGES)[1] == []


@pytest.mark.parametrize("norm", ["ghost_batch_norm", "batch_renorm", "sync_batch_norm"])
def test_relatives_of_batch_norm_are_folded(norm: str) -> None:
    layer = NormFactory(norm)(4, role="block", dims=2)
    (folding,) = _fold(nn.Sequential(nn.Conv2d(4, 4, 3), layer), IMAGES)[1]
    assert folding.is_folded


def test_a_wrong_fold_would_be_seen() -> None:
    model = _randomize(nn.Sequential(nn.Conv2d(4, 4, 3), BN(4)))
    folded, _ = fold_norms(model, IMAGES)
    with torch.no_grad():
        folded[0].bias[0] += 1e-3
    assert max_difference(model, folded, IMAGES, batch_size=2) == pytest.approx(1e-3)
    with torch.no_grad():
        folded[0].bias[0] = torch.nan
    assert max_difference(model, folded, IMAGES, batch_size=2) != 0.0
