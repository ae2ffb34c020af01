"""What describe_norm_layers tells, and that looking changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from normexp.errors import UserError
from normexp.norms import (
    NORMS,
    NormFactory,
    check_statistic_sets,
    compute_statistic_set_size,
    describe_norm_layers,
)


def build(name, params=None, side_after=2):
    """Return conv (stride halves 4 to side_after) - norm, with 8 channels."""
    norm = NormFactory(name, params or {})(8, role="block", dims=2)
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=4 // side_after, padding=1), norm)


@pytest.mark.parametrize(
    ("axes", "size"),
    [
        (("batch",), 2),
        (("batch", "position"), 2 * 15),
        (("channel",), 12),
        (("channel", "position"), 12 * 15),
        (("position",), 15),
        (("group", "position"), 12 // 4 * 15),
    ],
)
def test_statistic_set_is_the_product_of_the_extents(axes, size):
    assert compute_statistic_set_size(axes, (2, 12, 3, 5), {"num_groups": 4}) == size


def test_a_layer_is_described_in_full():
    (layer,) = describe_norm_layers(build("group_norm", {"num_groups": 4}), (1, 4, 4), 3)
    assert (layer.path, layer.name, layer.role) == ("1", "group_norm", "block")
    assert layer.input_shape == (3, 8, 2, 2)
    assert layer.statistic_sets == (("group", "position"),)
    assert layer.statistic_set_size == 2 * 4
    assert layer.params["channels_per_group"] == 2


def test_no_norm_has_no_statistic_set():
    (layer,) = describe_norm_layers(build("no_norm"), (1, 4, 4), 3)
    assert layer.statistic_set_size is None
    check_statistic_sets([layer])


def test_looking_changes_nothing():
    model = build("batch_norm").eval()
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    describe_norm_layers(model, (1, 4, 4), 3)
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model[1](torch.ones(1, 8, 2, 2)).shape == (1, 8, 2, 2)


@pytest.mark.parametrize(
    ("name", "params", "micro_batch_size", "remedy"),
    [
        ("batch_norm", {}, 1, "raise micro_batch_size or use larger images"),
        ("instance_norm", {}, 4, "use larger images or fewer stages"),
        ("group_norm", {"num_groups": 8}, 4, "use fewer groups"),
    ],
)
def test_a_single_value_is_refused_though_torch_might_not(name, params, micro_batch_size, remedy):
    layers = describe_norm_layers(build(name, params, side_after=1), (1, 4, 4), micro_batch_size)
    with pytest.raises(UserError) as caught:
        check_statistic_sets(layers)
    line = str(caught.value)
    assert line.startswith(f"norm={name}: layer 1 would normalize over a single value")
    assert f"[{micro_batch_size}, 8, 1, 1]" in line
    assert remedy in line


def test_two_values_are_admitted():
    check_statistic_sets(describe_norm_layers(build("batch_norm", side_after=1), (1, 4, 4), 2))


def test_the_forward_pass_of_training_is_described():
    class TrainingOnly(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = NormFactory("batch_norm")(1, role="block", dims=2)

        def forward(self, x):
            return self.norm(x) if self.training else x

    assert len(describe_norm_layers(TrainingOnly().eval(), (1, 4, 4), 2)) == 1


def test_a_forward_pass_that_raises_is_a_problem_before_training(monkeypatch):
    monkeypatch.setattr(NORMS, "_entries", dict(NORMS._entries))

    class Broken(torch.nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0], 5, -1, *x.shape[2:])

    def build_broken(num_features, *, dims):
        return Broken()

    class Short(torch.nn.Module):
        def forward(self, x):
            return x[:, :1]

    def build_short(num_features, *, dims):
        return Short()

    NORMS.register("broken", NORMS.get("no_norm").card)(build_broken)
    NORMS.register("short", NORMS.get("no_norm").card)(build_short)
    for name, complaint in [
        ("broken", r"layer 0: on an input of \[4, 12, 8, 8\] it raises RuntimeError: .*invalid"),
        ("short", r"layer 0: on an input of \[4, 12, 8, 8\] it returns the shape \[4, 1, 8, 8\]"),
    ]:
        model = torch.nn.Sequential(NormFactory(name)(12, role="block", dims=2))
        with pytest.raises(UserError, match=rf"^norm={name}: {complaint}"):
            check_statistic_sets(describe_norm_layers(model, (12, 8, 8), 4))


def test_a_forward_pass_that_reads_a_number_is_no_problem():
    """On the meta device there are none: torch's batch norm without a momentum reads its count."""
    model = nn.Sequential(NormFactory("batch_norm", {"momentum": None})(4, role="block", dims=2))
    (layer,) = describe_norm_layers(model, (4, 3, 3), 2)
    assert layer.problem is None
