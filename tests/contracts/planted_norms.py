"""A user's plugin with three faults of the kind that training does not show, and one sound norm."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from normexp.norms import NORMS, NormCard, check_dims

SOUND = NormCard(
    formula="y = (x - mean) / sqrt(var + eps) over the last axis",
    source="ours",
    dims=(1,),
    statistic_sets={1: (("channel",),)},
    is_centring=True,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=(),
    parameters={},
    single_value="zero",
    takes_mask=False,
    keeps_channels_last=False,
    kernel="native",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class LastAxisNorm(nn.Module):
    def __init__(self, num_features, eps):
        super().__init__()
        self.shape, self.eps = (num_features,), eps

    def forward(self, x):
        return F.layer_norm(x, self.shape, eps=self.eps)


@NORMS.register("sound", SOUND)
def build_sound(num_features: int, *, dims: int, eps: float = 1e-5) -> nn.Module:
    check_dims("sound", dims, supported=(1,), instead="sequences")
    return LastAxisNorm(num_features, eps)


class IgnoresEps(LastAxisNorm):
    def forward(self, x):
        return F.layer_norm(x, self.shape)


@NORMS.register("ignores_eps", SOUND)
def build_ignores_eps(num_features: int, *, dims: int, eps: float = 1e-5) -> nn.Module:
    check_dims("ignores_eps", dims, supported=(1,), instead="sequences")
    return IgnoresEps(num_features, eps)


class WrongAxis(nn.Module):
    """Where L == C, nothing but the numbers is wrong."""

    def __init__(self, num_features, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = torch.var_mean(wide, 1, correction=0, keepdim=True)
        return ((wide - mean) / (var + self.eps).sqrt() * self.weight).to(x.dtype)


@NORMS.register(
    "wrong_axis",
    dataclasses.replace(SOUND, parameters={"weight": ("C",)}, kernel_cpu="composite"),
)
def build_wrong_axis(num_features: int, *, dims: int, eps: float = 1e-5) -> nn.Module:
    check_dims("wrong_axis", dims, supported=(1,), instead="sequences")
    return WrongAxis(num_features, eps)


class TransposedAxes(nn.Module):
    """Raises unless L == C."""

    def __init__(self, num_features):
        super().__init__()
        self.norm = nn.BatchNorm1d(num_features)

    def forward(self, x):
        return self.norm(x)


@NORMS.register("transposed_axes", SOUND)
def build_transposed_axes(num_features: int, *, dims: int) -> nn.Module:
    check_dims("transposed_axes", dims, supported=(1,), instead="sequences")
    return TransposedAxes(num_features)


class UpdatesInEval(nn.BatchNorm1d):
    """Forgets to ask for the mode when it counts a batch."""

    def forward(self, x):
        if not self.training:
            new = self.momentum * x.detach().mean(0)
            self.running_mean.mul_(1.0 - self.momentum).add_(new)
        return super().forward(x)


@NORMS.register(
    "updates_in_eval",
    dataclasses.replace(
        SOUND,
        dims=(0,),
        statistic_sets={0: (("batch",),)},
        mixes_samples=True,
        is_same_in_eval=False,
        state=("running_mean", "running_var", "num_batches_tracked"),
        parameters={"weight": ("C",), "bias": ("C",)},
        single_value="raises",
    ),
)
def build_updates_in_eval(num_features: int, *, dims: int, eps: float = 1e-5) -> nn.Module:
    check_dims("updates_in_eval", dims, supported=(0,), instead="features")
    return UpdatesInEval(num_features, eps=eps)


class Whole(nn.Module):
    """Over channels and positions of a sample; sound, if its groups are one."""

    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x, x.shape[1:], eps=self.eps)


@NORMS.register(
    "many_groups",
    dataclasses.replace(
        SOUND, statistic_sets={1: (("channel", "position"),)}, mixes_positions=True
    ),
)
def build_many_groups(
    num_features: int, *, dims: int, groups: int = 16, eps: float = 1e-5
) -> nn.Module:
    check_dims("many_groups", dims, supported=(1,), instead="sequences")
    if num_features < groups:
        raise ValueError(f"{groups} groups do not fit {num_features} channels")
    return Whole(eps)
