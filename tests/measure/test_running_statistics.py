"""Errors of running statistics against populations computed by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from normexp.measure import (
    RunningStatisticError,
    check_finite_buffers,
    running_statistic_error,
    summarize,
)


class Counting(nn.Module):
    """A module that draws random numbers and writes a buffer even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0.0 * torch.rand(())


def _conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        Counting(),
        nn.Conv2d(4, 3, 3),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(3 * 16, 5),
        nn.BatchNorm1d(5),
    )


def test_against_the_formula_written_out() -> None:
    layer = nn.BatchNorm1d(2, eps=0.0).double()
    layer.running_mean = torch.tensor([1.0, 2.0], dtype=torch.float64)
    layer.running_var = torch.tensor([4.0, 1.0], dtype=torch.float64)
    # Channel 0: mean 4, biased variance 9. Channel 1: mean 2, biased variance 4.
    x = torch.tensor([[1.0, 0.0], [7.0, 4.0]], dtype=torch.float64)
    (error,) = running_statistic_error(nn.Sequential(layer), x, batch_size=2)
    assert error.path == "0"
    assert error.num_features == 2
    assert error.mean_error == pytest.approx(math.sqrt((9 / 9 + 0 / 4) / 2), rel=1e-14)
    expected = (abs(math.log(4 / 9)) + abs(math.log(1 / 4))) / 2
    assert error.var_ratio_error == pytest.approx(expected, rel=1e-14)


def test_statistics_of_the_whole_set_have_no_error() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, 4, 4, dtype=torch.float64) * 5 + 2
    layer = nn.BatchNorm2d(3).double()
    layer.running_mean = x.mean(dim=(0, 2, 3))
    layer.running_var = x.var(dim=(0, 2, 3), correction=0)
    (error,) = running_statistic_error(layer, x, batch_size=7)
    assert error.path == ""
    assert error.mean_error < 1e-14
    assert error.var_ratio_error < 1e-14


def test_the_population_is_what_the_layer_sees_in_eval_mode() -> None:
    """The second layer's population comes from the first layer's running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    for _ in range(3):
        model(torch.randn(16, 3, dtype=torch.float64) * 3 + 1)
    x = torch.randn(40, 3, dtype=torch.float64)
    second = running_statistic_error(model, x, batch_size=11)[1]
    with torch.no_grad():
        hidden = model[1](model[0].eval()(x))
    norm = model[2]
    var = hidden.var(dim=0, correction=0) + norm.eps
    mean_error = ((norm.running_mean - hidden.mean(dim=0)).square() / var).mean().sqrt()
    assert second.path == "2"
    assert second.mean_error == pytest.approx(float(mean_error), rel=1e-12)
    ratio = ((norm.running_var + norm.eps) / var).log().abs().mean()
    assert second.var_ratio_error == pytest.approx(float(ratio), rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    num_samples=st.integers(1, 23),
    batch_size=st.integers(1, 30),
    shift=st.sampled_from([0.0, 1e4, -1e6]),
)
def test_blocks_do_not_matter(num_samples: int, batch_size: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, 3, 5, generator=generator, dtype=torch.float64) + shift
    layer = nn.BatchNorm1d(3).double()
    (whole,) = running_statistic_error(layer, x, batch_size=num_samples)
    (blocks,) = running_statistic_error(layer, x, batch_size=batch_size)
    # A naive sum of squares would lose (1e6)^2 * 2^-52, about 2e-4 of a variance of 1.
    assert blocks.mean_error == pytest.approx(whole.mean_error, rel=1e-9)
    assert blocks.var_ratio_error == pytest.approx(whole.var_ratio_error, rel=1e-9)
    eps = layer.eps
    var = x.var(dim=(0, 2), correction=0) + eps
    expected = float((math.log1p(eps) - var.log()).abs().mean())
    assert blocks.var_ratio_error == pytest.approx(expected, rel=1e-8)


def test_a_dead_channel_gives_a_finite_error() -> None:
    layer = nn.BatchNorm1d(2).double()
    x = torch.tensor([[0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    (error,) = running_statistic_error(layer, x, batch_size=2)
    # Channel 0 has variance 0 against a running one of 1; channel 1 is right.
    assert error.mean_error == 0.0
    assert error.var_ratio_error == pytest.approx(math.log((1 + 1e-5) / 1e-5) / 2, rel=1e-12)


def test_the_model_is_left_bit_identical() -> None:
    model = _conv_net()
    model.train()
    model[1].eval()  # a frozen layer in a training model
    model(torch.randn(8, 2, 6, 6)).sum().backward()
    model.zero_grad(set_to_none=False)
    model(torch.randn(8, 2, 6, 6)).sum().backward()
    x = torch.randn(20, 2, 6, 6)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = [id(buffer) for buffer in model.buffers()]
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    errors = running_statistic_error(model, x, batch_size=6)
    assert [error.path for error in errors] == ["1", "6", "9"]
    assert [error.num_features for error in errors] == [4, 3, 5]
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    assert [id(buffer) for buffer in model.buffers()] == objects
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_model_is_left_alone_when_the_forward_pass_fails() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes"):
        running_statistic_error(model, torch.randn(5, 3), batch_size=5)
    assert all(module.training for module in model.modules())
    assert not model[0]._forward_pre_hooks


def test_layers_without_running_statistics_are_left_out() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(3, track_running_stats=False), nn.GroupNorm(1, 3), nn.LayerNorm(3)
    )
    assert running_statistic_error(model, torch.randn(4, 3), batch_size=2) == []


def test_a_layer_that_is_never_entered_is_left_out() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.add_module("unused", nn.BatchNorm1d(3))
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    errors = running_statistic_error(model, torch.randn(4, 3), batch_size=2)
    assert [error.path for error in errors] == ["0"]


def test_features_on_another_axis_are_refused() -> None:
    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    with pytest.raises(ValueError, match=r"^norm: input of shape \(4, 5\), but 3 features"):
        running_statistic_error(ChannelsLast(), torch.randn(4, 5), batch_size=4)


def test_summary() -> None:
    errors = [RunningStatisticError("a", 1.0, 0.1, 4), RunningStatisticError("b", 3.0, 0.5, 400)]
    assert summarize(errors) == pytest.approx(
        {
            "running_statistic_mean_error": 2.0,
            "running_statistic_mean_error_max": 3.0,
            "running_statistic_var_ratio_error": 0.3,
            "running_statistic_var_ratio_error_max": 0.5,
        }
    )
    assert summarize([]) == {}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_broken_layer_shows_in_the_summary(position: int) -> None:
    errors = [RunningStatisticError(str(i), 1.0, 1.0, 4) for i in range(3)]
    errors[position] = RunningStatisticError("broken", math.nan, 1.0, 4)
    summary = summarize(errors)
    assert math.isnan(summary["running_statistic_mean_error"])
    assert math.isnan(summary["running_statistic_mean_error_max"])
    assert summary["running_statistic_var_ratio_error_max"] == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_bad_buffer_is_named(value: float) -> None:
    model = _conv_net()
    assert check_finite_buffers(model) is None
    model[9].running_mean[0] = value
    assert check_finite_buffers(model) == "9.running_mean"
    model[6].running_var[2] = value
    assert check_finite_buffers(model) == "6.running_var"


def test_a_model_without_buffers_is_finite() -> None:
    assert check_finite_buffers(nn.Linear(2, 2)) is None
