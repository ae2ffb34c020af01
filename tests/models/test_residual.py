"""Placements: every block against its formula, and the shortcuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normexp.models import MODELS, PLACEMENTS, initialize, parameter_roles
from normexp.models.blocks import build_block
from normexp.models.residual import build_shortcut, pad_shortcut, return_input
from normexp.norms import NormFactory

# Those of images; a Transformer's are in test_transformer.py.
KNOWN = [name for name, placement in PLACEMENTS.items() if placement.images is not None]


def images(channels=4, side=5):
    values = np.random.default_rng(0).normal(size=(2, channels, side, side))
    return torch.from_numpy(values)


def factory(placement):
    if PLACEMENTS[placement].has_norm_layers:
        return NormFactory("group_norm", {"num_groups": 2})
    return NormFactory("no_norm")


def build(placement, num_out=4, stride=1, shortcut="projection", norm=None, **skip):
    """Return a block in float64 whose gains, shifts and biases are not their neutral values."""
    norm = norm or factory(placement)
    block = build_block(placement, 4, num_out, stride, norm, shortcut, **skip).double()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.from_numpy(np.asarray(rng.normal(0.5, 0.3, parameter.shape))))
    return block


def pre_branch(b, x):
    return b.conv2(F.relu(b.norm2(b.conv1(F.relu(b.norm1(x))))))


def fixup_branch(b, x):
    hidden = F.relu(b.conv1(x + b.shift1.bias) + b.shift2.bias)
    return b.gain.weight * b.conv2(hidden + b.shift3.bias) + b.shift4.bias


FORMULAS = {
    "res_post": lambda b, x, s: F.relu(s(x) + b.norm2(b.conv2(F.relu(b.norm1(b.conv1(x)))))),
    "post": lambda b, x, s: F.relu(b.norm2(s(x) + b.conv2(F.relu(b.norm1(b.conv1(x)))))),
    "none": lambda b, x, s: F.relu(s(x) + b.conv2(F.relu(b.conv1(x)))),
    "pre": lambda b, x, s: s(x) + pre_branch(b, x),
    "rezero": lambda b, x, s: F.relu(s(x) + b.gain.weight * b.conv2(F.relu(b.conv1(x)))),
    "rezero_pre": lambda b, x, s: s(x) + b.gain.weight * pre_branch(b, x),
    "skip_init": lambda b, x, s: s(x) + b.gain.weight * b.conv2(F.relu(b.conv1(F.relu(x)))),
    "layer_scale": lambda b, x, s: s(x) + b.gain.weight.view(-1, 1, 1) * pre_branch(b, x),
    "fixup": lambda b, x, s: F.relu(s(x) + fixup_branch(b, x)),
}
# What a projection takes, where it is not the input itself (He et al., ECCV 2016, for pre).
PROJECTED = {
    "pre": lambda b, x: F.relu(b.norm1(x)),
    "rezero_pre": lambda b, x: F.relu(b.norm1(x)),
    "layer_scale": lambda b, x: F.relu(b.norm1(x)),
    "skip_init": lambda b, x: F.relu(x),
    "fixup": lambda b, x: x + b.shift1.bias,
}


@pytest.mark.parametrize("placement", KNOWN)
def test_block_with_identity_shortcut_is_its_formula(placement):
    block, x = build(placement), images()
    expected = FORMULAS[placement](block, x, lambda x: x)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", KNOWN)
def test_block_with_projection_is_its_formula(placement):
    block, x = build(placement, num_out=8, stride=2), images()

    def shortcut(x):
        source = PROJECTED[placement](block, x) if placement in PROJECTED else x
        conv = block.shortcut.conv
        out = F.conv2d(source, conv.weight, conv.bias, stride=2)
        return block.shortcut.norm(out) if placement == "res_post" else out

    expected = FORMULAS[placement](block, x, shortcut)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)
    assert hasattr(block.shortcut, "norm") == (placement == "res_post")


@pytest.mark.parametrize("placement", KNOWN)
def test_block_with_padding_takes_the_input_itself(placement):
    block, x = build(placement, num_out=8, stride=2, shortcut="padding"), images()

    def shortcut(x):
        return torch.cat([x[:, :, ::2, ::2], torch.zeros(2, 4, 3, 3).double()], 1)

    expected = FORMULAS[placement](block, x, shortcut)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


def test_padding_keeps_every_second_pixel_and_appends_zeros():
    x = images(side=5)
    y = pad_shortcut(x, stride=2, num_missing=3)
    assert y.shape == (2, 7, 3, 3)
    assert torch.equal(y[:, :4], x[:, :, ::2, ::2])
    assert not y[:, 4:].any()


def test_shortcut_is_the_identity_where_the_shape_stays():
    for kind in ("projection", "padding"):
        shortcut = build_shortcut(4, 4, 1, kind, norm=NormFactory("no_norm"))
        assert shortcut is return_input


def test_convolutions_have_the_same_names_in_every_placement():
    names = {
        placement: {
            path
            for path, module in build(placement, 8, 2).named_modules()
            if isinstance(module, torch.nn.Conv2d)
        }
        for placement in KNOWN
    }
    assert all(found == {"conv1", "conv2", "shortcut.conv"} for found in names.values())


def test_every_placement_is_drawn_and_used():
    assert set(KNOWN) == set(FORMULAS) == set(MODELS.get("cifar_resnet").card.placements)
    for name in KNOWN:
        drawing = PLACEMENTS[name].images
        assert "(+)" in drawing.picture
        # What the formula names is drawn.
        for part in ("norm1", "norm2", "conv1", "conv2", "relu", "b1", "b2", "b3", "b4"):
            assert (part in drawing.picture) == (part in drawing.formula)
        assert ("* a" in drawing.picture) == ("a * " in drawing.formula.replace("a_c", "a"))
        assert PLACEMENTS[name].has_norm_layers == ("norm" in drawing.formula)


GAINS = {
    "rezero": ((), 0.0),
    "rezero_pre": ((), 0.0),
    "skip_init": ((), 0.0),
    "layer_scale": ((8,), 0.1),
    "fixup": ((), 1.0),
}


@pytest.mark.parametrize("placement", KNOWN)
def test_learned_skips_have_their_shape_start_and_role(placement):
    block = build_block(placement, 4, 8, 2, factory(placement), "projection")
    initialize(block, 0)
    roles = parameter_roles(block)
    found = {name: p for name, p in block.named_parameters() if roles[name] == "skip"}
    if placement not in GAINS:
        assert found == {}
        return
    gain = found.pop("gain.weight")
    shape, start = GAINS[placement]
    assert gain.shape == shape
    assert (gain == start).all()
    names = {f"shift{n}.bias" for n in (1, 2, 3, 4)} if placement == "fixup" else set()
    assert set(found) == names
    assert not any(bool(shift) for shift in found.values())


@pytest.mark.parametrize("placement", ["rezero", "rezero_pre", "skip_init", "fixup"])
def test_a_block_starts_as_its_shortcut(placement):
    block, x = build_block(placement, 4, 4, 1, factory(placement), "projection"), images().float()
    initialize(block, 0)
    ends_in_relu = placement in ("rezero", "fixup")
    assert torch.equal(block(x), F.relu(x) if ends_in_relu else x)


def test_layer_scale_starts_where_it_is_told():
    block = build_block(
        "layer_scale", 4, 8, 2, factory("layer_scale"), "projection", layer_scale_init=1e-5
    )
    assert torch.equal(block.gain.weight, torch.full((8,), 1e-5))


def test_fixup_scales_its_first_convolution_by_the_number_of_branches():
    def first(num_branches):
        norm = NormFactory("no_norm")
        block = build_block("fixup", 4, 8, 2, norm, "projection", num_branches=num_branches)
        initialize(block.double(), 0)
        return block

    one, nine = first(1), first(9)
    torch.testing.assert_close(nine.conv1.weight, one.conv1.weight / 3, rtol=1e-14, atol=0)
    assert torch.equal(nine.shortcut.conv.weight, one.shortcut.conv.weight)
    assert not nine.conv2.weight.any()
    assert all(name.startswith("shift") for name, _ in nine.named_parameters() if "bias" in name)


@pytest.mark.parametrize("placement", KNOWN)
def test_a_norm_of_weights_is_on_every_convolution(placement):
    if PLACEMENTS[placement].sets_weight_scale:
        return
    block = build_block(placement, 4, 8, 2, NormFactory("weight_norm"), "projection")
    roles = {
        path: module.weight_norm_record.role
        for path, module in block.named_modules()
        if hasattr(module, "weight_norm_record")
    }
    assert roles == {"conv1": "block", "conv2": "block", "shortcut.conv": "downsample"}
