"""What no field of a card is about is found too: a faulty layer for each thing that goes wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from normexp.contract import CHECKS, Subject, run_check
from normexp.norms import NORMS, NormCard, check_dims


class Layer(nn.Module):
    """Sound: instance norm of sequences, with a mask; the faulty ones change one step of it."""

    eps = 1e-5

    def __init__(self, num_features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def upcast(self, x):
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def statistics(self, x, valid):
        count = valid.to(x.dtype).sum(1, keepdim=True).clamp(min=1.0)
        mean = x.sum(1, keepdim=True) / count
        var = torch.where(valid, x - mean, 0.0).square().sum(1, keepdim=True) / count
        return mean, var

    def normalize(self, x, mean, var):
        return (x - mean) / (var + self.eps).sqrt()

    def clean(self, x, valid):
        return torch.where(valid, x, 0.0)

    def forward(self, x, mask=None):
        wide = self.upcast(x)
        everywhere = torch.ones_like(x[..., :1], dtype=torch.bool)
        valid = everywhere if mask is None else mask[..., None]
        wide = self.clean(wide, valid)
        y = self.normalize(wide, *self.statistics(wide, valid)) * self.weight + self.bias
        return self.finish(y, valid).to(x.dtype)

    def finish(self, y, valid):
        return torch.where(valid, y, 0.0)


CARD = NormCard(
    formula="y = (x - mean) / sqrt(var + eps) * weight + bias",
    source="ours",
    dims=(1,),
    statistic_sets={1: (("position",),)},
    is_centring=True,
    divisor="M",
    eps_place=None,
    mixes_samples=False,
    mixes_positions=True,
    is_same_in_eval=True,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=(),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="zero",
    takes_mask=True,
    keeps_channels_last=False,
    kernel="composite",
    kernel_cpu="composite",
    kernel_cuda="composite",
)


class StatisticsInHalf(Layer):
    def upcast(self, x):
        return x


class StatisticsInHalfInEvaluation(Layer):
    def upcast(self, x):
        return super().upcast(x) if self.training else x


class WidensTheOutput(Layer):
    def forward(self, x, mask=None):
        return super().forward(x, mask).to(torch.promote_types(x.dtype, torch.float32))


class NeedsOneType(Layer):
    def forward(self, x, mask=None):
        if x.dtype != self.weight.dtype:
            raise TypeError("expected one type")
        return super().forward(x, mask)


class RootOfZero(Layer):
    def normalize(self, x, mean, var):
        return (x - mean) / (var.sqrt() + self.eps)


class OnePass(Layer):
    def statistics(self, x, valid):
        count = valid.to(x.dtype).sum(1, keepdim=True).clamp(min=1.0)
        mean = x.sum(1, keepdim=True) / count
        return mean, x.square().sum(1, keepdim=True) / count - mean.square()


class LooksAtNumbers(Layer):
    def normalize(self, x, mean, var):
        if (var < 0).any():
            raise ValueError("negative variance")
        return super().normalize(x, mean, var)


class BoundToItself(Layer):
    """A copy updates the buffer of the layer that it was copied from."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.update = lambda mean: self.running_mean.lerp_(mean.detach().mean((0, 1)), 0.1)

    def normalize(self, x, mean, var):
        self.update(mean)
        return super().normalize(x, mean, var)


class LoopsUnderVmap(Layer):
    """torch has no batching rule for its kernel of weight norm."""

    def finish(self, y, valid):
        column = self.weight[:, None]
        return super().finish(y * torch._weight_norm(column, column.abs(), 0)[:, 0], valid)


class LoopsUnderVmapInEvaluation(LoopsUnderVmap):
    def finish(self, y, valid):
        return Layer.finish(self, y, valid) if self.training else super().finish(y, valid)


class StopsUnderVmapInEvaluation(Layer):
    def normalize(self, x, mean, var):
        if not self.training and (var < 0).any():
            raise ValueError("negative variance")
        return super().normalize(x, mean, var)


class UnusedParameter(Layer):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.other = nn.Parameter(torch.ones(num_features))


class InfiniteGradient(Layer):
    def finish(self, y, valid):
        return super().finish(y * (self.weight - self.weight).abs().sqrt().exp(), valid)


class HalfDerivative(Layer):
    def normalize(self, x, mean, var):
        return super().normalize(x, mean, var.detach())


class HalfDerivativeOfLargeInputs(Layer):
    def normalize(self, x, mean, var):
        return super().normalize(x, mean, var.detach() if x.numel() > 10_000 else var)


class CountsPadding(Layer):
    def statistics(self, x, valid):
        return super().statistics(x, torch.ones_like(valid))


class CountsPaddingInEval(Layer):
    def statistics(self, x, valid):
        return super().statistics(x, valid if self.training else torch.ones_like(valid))

    def clean(self, x, valid):
        return super().clean(x, valid) if self.training else x.nan_to_num(0.0)


class KeepsShiftAtPadding(Layer):
    def finish(self, y, valid):
        return y


class MultipliesByMask(Layer):
    def clean(self, x, valid):
        return x * valid


class DividesByCount(Layer):
    def statistics(self, x, valid):
        count = valid.to(x.dtype).sum(1, keepdim=True)
        mean = x.sum(1, keepdim=True) / count
        return mean, (torch.where(valid, x - mean, 0.0).square()).sum(1, keepdim=True) / count


class LosesState(Layer):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.register_buffer("running_mean", torch.zeros(num_features), persistent=False)


class WrongProblem(Layer):
    def find_problem(self, shape):
        return "one sample is too few" if shape[0] == 1 else None


class MissedProblem(Layer):
    def find_problem(self, shape):
        return None

    def forward(self, x, mask=None):
        if x.shape[0] % 3:
            raise ValueError("3 does not divide N")
        return super().forward(x, mask)


class MixesTwoStatistics(Layer):
    """Centres each channel, and divides by the mean of its variance and that of the sample."""

    def normalize(self, x, mean, var):
        whole = x.var((1, 2), correction=0, keepdim=True)
        return super().normalize(x, mean, 0.5 * var + 0.5 * whole)


class WeighsPositions(Layer):
    def normalize(self, x, mean, var):
        weights = torch.linspace(0.1, 0.9, x.shape[1], dtype=x.dtype)[:, None]
        return x / ((weights * x.square()).sum(1, keepdim=True) + self.eps).sqrt()


# The check that finds it, and words of its message.
class FlippedGain(Layer):
    def normalize(self, x, mean, var):
        return super().normalize(x, mean, var) * self.weight.flip(0) / self.weight


class CubedGain(Layer):
    def normalize(self, x, mean, var):
        return super().normalize(x, mean, var) * self.weight**2


class SharedShift(Layer):
    def finish(self, y, valid):
        return super().finish(y - self.bias + self.bias.mean(), valid)


class HalfShift(Layer):
    def finish(self, y, valid):
        return super().finish(y - 0.5 * self.bias, valid)


class OneChannelForAll(Layer):
    def normalize(self, x, mean, var):
        return super().normalize(x, mean, var)[..., :1].expand_as(x)


FAULTY = [
    (OneChannelForAll, "own_input", "the output of channel"),
    (FlippedGain, "gain_and_shift", "weight is declared as one number a channel"),
    (CubedGain, "gain_and_shift", "should multiply its own channel"),
    (SharedShift, "gain_and_shift", "bias is declared as one number a channel"),
    (HalfShift, "gain_and_shift", "should be added to its own channel"),
    (StatisticsInHalf, "half_precision", "in torch.float16, values of size 300"),
    (StatisticsInHalf, "half_precision", "[6, 5, 8] with a mask"),
    (StatisticsInHalfInEvaluation, "half_precision", "[6, 5, 8] in evaluation: the output"),
    (WidensTheOutput, "half_precision", "of torch.bfloat16 comes out as torch.float32"),
    (NeedsOneType, "autocast", "ended in TypeError: expected one type"),
    (RootOfZero, "constant_inputs", "on a constant 7 of shape [6, 5, 8] in training the gradient"),
    (OnePass, "large_mean", "float32 differs from float64"),
    (LooksAtNumbers, "compile", "the experiment ended in Unsupported"),
    (LooksAtNumbers, "copies", "the experiment ended in"),
    (LooksAtNumbers, "is_vectorizable", "is_vectorizable=True is declared, but on [6, 5, 8]"),
    (LoopsUnderVmap, "is_vectorizable", "falls back to a loop over the replicas (There is a"),
    (LoopsUnderVmapInEvaluation, "is_vectorizable", "falls back to a loop over the replicas"),
    (StopsUnderVmapInEvaluation, "is_vectorizable", "in evaluation torch.vmap ended in"),
    (BoundToItself, "copies", "a call of a deep copy changes the buffers of the original"),
    (UnusedParameter, "parameter_gradients", "other has no gradient"),
    (UnusedParameter, "parameters", "found weight [8], bias [8], other [8]"),
    (InfiniteGradient, "parameter_gradients", "the gradient of weight is not finite"),
    (HalfDerivative, "has_exact_gradient", "the gradient of a fresh layer on"),
    (HalfDerivativeOfLargeInputs, "has_exact_gradient", "on [66, 64, 8]"),
    (CountsPadding, "takes_mask", "masked behind position 3 come out"),
    (CountsPaddingInEval, "takes_mask", "in evaluation, noise at invalid positions changes"),
    (KeepsShiftAtPadding, "takes_mask", "the output at invalid positions is not zero"),
    (MultipliesByMask, "takes_mask", "NaN at invalid positions of [6, 5, 8] changes the output"),
    (DividesByCount, "takes_mask", "without valid positions, "),
    (LosesState, "state", "running_mean is not in the state dict"),
    (LosesState, "state", "the buffers are running_mean"),
    (WrongProblem, "find_problem", "on [1, 5, 8], but a call works"),
    (MissedProblem, "find_problem", "sees none on [5, 5, 8], but a call ends in ValueError"),
]


def subject_of(layer, card=CARD):
    def build(num_features: int, *, dims: int) -> nn.Module:
        check_dims("faulty", dims, supported=(1,), instead="sequences")
        return layer(num_features)

    return Subject(dataclasses.replace(NORMS.get("no_norm"), name="faulty", build=build, card=card))


@pytest.mark.parametrize("check", CHECKS)
def test_the_layer_without_a_fault_passes(check):
    outcome = run_check(CHECKS[check], subject_of(Layer))
    assert outcome.verdict != "fault", outcome.messages


@pytest.mark.parametrize(
    ("layer", "check", "words"), FAULTY, ids=[f"{f[0].__name__}-{f[1]}" for f in FAULTY]
)
def test_a_faulty_layer_is_found(layer, check, words):
    outcome = run_check(CHECKS[check], subject_of(layer))
    assert outcome.verdict == "fault"
    assert words in "; ".join(outcome.messages)


@pytest.mark.parametrize(
    "misread", [lambda momentum: 1.0 - momentum, lambda _: 0.1], ids=["decay", "ignored"]
)
def test_a_momentum_of_another_sense_is_found(misread):
    true = NORMS.get("batch_norm")

    def build(num_features: int, *, dims: int, momentum: float = 0.1) -> nn.Module:
        return true.build(num_features, dims=dims, momentum=misread(momentum))

    outcome = run_check(CHECKS["momentum"], Subject(dataclasses.replace(true, build=build)))
    assert outcome.verdict == "fault"
    words = "a momentum 4 times as large moves running_mean 1 times as far on shape [6, 8]"
    assert words in outcome.messages[0]


def test_a_small_statistic_inside_of_a_large_one_is_found():
    # The pattern of dependence is that of the large one alone.
    card = dataclasses.replace(CARD, statistic_sets={1: (("channel", "position"),)})
    subject = subject_of(MixesTwoStatistics, card)
    assert run_check(CHECKS["statistic_sets"], subject).verdict == "pass"
    outcome = run_check(CHECKS["statistic_parts"], subject)
    assert outcome.messages == (
        "statistic_sets: the card says statistics over channel x position; found on shape "
        "[6, 5, 8] also one over position",
    )
    both = {1: (("channel", "position"), ("position",))}
    card = dataclasses.replace(CARD, statistic_sets=both)
    outcome = run_check(CHECKS["statistic_parts"], subject_of(MixesTwoStatistics, card))
    assert outcome.verdict == "pass"


def test_statistics_that_are_no_plain_sums_are_not_judged_by_their_parts():
    outcome = run_check(CHECKS["statistic_parts"], subject_of(WeighsPositions))
    assert outcome.verdict == "does not apply"


class WholeWeight(nn.Module):
    """Normalizes all outputs of a weight together."""

    def forward(self, weight):
        return weight / weight.square().sum().sqrt()

    def right_inverse(self, weight):
        return weight


class Doubled(WholeWeight):
    def forward(self, weight):
        return 2.0 * weight


class InDouble(WholeWeight):
    def forward(self, weight):
        return weight.double()


class ByKernel(WholeWeight):
    def forward(self, weight):
        return torch._weight_norm(weight, torch.ones_like(weight[:, :1]), 0)


class OtherwiseCompiled(WholeWeight):
    def forward(self, weight):
        size = weight.square().sum(1, keepdim=True).sqrt()
        return weight / (size + 1e-3 if torch.compiler.is_compiling() else size)


@pytest.mark.parametrize(
    ("parametrization", "check", "words"),
    [
        (WholeWeight, "weight_fan_in", "depends on 30 to 30 raw weights; the fan-in"),
        (Doubled, "weight_assignment", "assigned and read again, has changed by 1 of its size"),
        (InDouble, "weight_transforms", "in bfloat16 the effective weight"),
        (ByKernel, "weight_transforms", "falls back to a loop"),
        (OtherwiseCompiled, "weight_transforms", "compiled, the output of a linear differs by"),
    ],
)
def test_a_faulty_weight_is_found(parametrization, check, words):
    def put(module, **_):
        return parametrize.register_parametrization(
            module, "weight", parametrization(), unsafe=True
        )

    entry = NORMS.get("weight_norm")
    weight = dataclasses.replace(entry.card.weight, parametrize=put)
    card = dataclasses.replace(entry.card, weight=weight)
    outcome = run_check(CHECKS[check], Subject(dataclasses.replace(entry, card=card)))
    assert outcome.verdict == "fault"
    assert words in "; ".join(outcome.messages)


# Every check without a field of the card has been seen to find something.
def test_every_check_without_a_field_has_a_faulty_layer():
    found = {check for _, check, _ in FAULTY} | {"weight_transforms", "momentum"}
    assert {name for name, check in CHECKS.items() if not check.fields} <= found
