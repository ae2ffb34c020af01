"""Placements: every block against its formula, and the shortcuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normexp.models import MODELS, PLACEMENTS
from normexp.models.residual import BLOCKS, build_shortcut, pad_shortcut, return_input
from normexp.norms import NormFactory


def images(channels=4, side=5):
    values = np.random.default_rng(0).normal(size=(2, channels, side, side))
    return torch.from_numpy(values)


def build_block(placement, num_out=4, stride=1, shortcut="projection"):
    """Return a block in float64 whose gains, shifts and biases are not their neutral values."""
    norm = NormFactory("no_norm" if placement == "none" else "group_norm")
    norm = norm if placement == "none" else NormFactory("group_norm", {"num_groups": 2})
    block = BLOCKS[placement](4, num_out, stride, norm, shortcut).double()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(0.5, 0.3, parameter.shape)))
    return block


FORMULAS = {
    "res_post": lambda b, x, s: F.relu(s(x) + b.norm2(b.conv2(F.relu(b.norm1(b.conv1(x)))))),
    "post": lambda b, x, s: F.relu(b.norm2(s(x) + b.conv2(F.relu(b.norm1(b.conv1(x)))))),
    "none": lambda b, x, s: F.relu(s(x) + b.conv2(F.relu(b.conv1(x)))),
    "pre": lambda b, x, s: s(x) + b.conv2(F.relu(b.norm2(b.conv1(F.relu(b.norm1(x)))))),
}


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_block_with_identity_shortcut_is_its_formula(placement):
    block, x = build_block(placement), images()
    expected = FORMULAS[placement](block, x, lambda x: x)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_block_with_projection_is_its_formula(placement):
    block, x = build_block(placement, num_out=8, stride=2), images()

    def shortcut(x):
        # In pre the projection takes the activated input (He et al., ECCV 2016).
        source = F.relu(block.norm1(x)) if placement == "pre" else x
        conv = block.shortcut.conv
        out = F.conv2d(source, conv.weight, conv.bias, stride=2)
        return block.shortcut.norm(out) if placement == "res_post" else out

    expected = FORMULAS[placement](block, x, shortcut)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)
    assert hasattr(block.shortcut, "norm") == (placement == "res_post")


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_block_with_padding_takes_the_input_itself(placement):
    block, x = build_block(placement, num_out=8, stride=2, shortcut="padding"), images()

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
        shortcut = build_shortcut(4, 4, 1, kind, norm=None, has_bias=False)
        assert shortcut is return_input


def test_convolutions_have_the_same_names_in_every_placement():
    names = {
        placement: {
            path
            for path, module in build_block(placement, 8, 2).named_modules()
            if isinstance(module, torch.nn.Conv2d)
        }
        for placement in PLACEMENTS
    }
    assert all(found == {"conv1", "conv2", "shortcut.conv"} for found in names.values())


def test_every_placement_is_drawn_and_used():
    assert set(PLACEMENTS) == set(BLOCKS) == set(MODELS.get("cifar_resnet").card.placements)
    for name, placement in PLACEMENTS.items():
        assert placement.name == name
        assert "(+)" in placement.drawing
        # What the formula names is drawn.
        for part in ("norm1", "norm2", "conv1", "conv2", "relu"):
            assert (part in placement.drawing) == (part in placement.formula)
