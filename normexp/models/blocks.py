"""Residual blocks for images, one for each placement; ``placements.py`` draws them.

A block is two 3x3 convolutions beside a shortcut. The names of its convolutions are the same in
every placement and with every norm, so that all of them start from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from normexp.models.residual import (
    Images,
    Output,
    build_conv,
    build_shortcut,
    choose_activation,
    set_initial_scale,
)
from normexp.models.skips import SkipGain, SkipShift
from normexp.norms import NormFactory


class ResPostBlock(nn.Module):
    """Block of the placement ``res_post``; see its drawing."""

    def __init__(
        self, num_in: int, num_out: int, stride: int, norm: NormFactory, shortcut: str
    ) -> None:
        super().__init__()
        self.activate = choose_activation(norm, "block")
        has_bias = not norm.is_centring("block")
        self.conv1 = build_conv(num_in, num_out, norm, stride=stride, bias=has_bias)
        self.norm1 = norm(num_out, role="block", dims=2, is_activated=True)
        self.conv2 = build_conv(num_out, num_out, norm, bias=has_bias)
        self.norm2 = norm(num_out, role="block", dims=2)
        self.shortcut = build_shortcut(
            num_in,
            num_out,
            stride,
            shortcut,
            norm=norm,
            has_norm=True,
            has_bias=not norm.is_centring("downsample"),
        )

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        branch = self.activate(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(branch)) + self.shortcut(x))


class PreBlock(nn.Module):
    """Block of the placement ``pre``; see its drawing."""

    def __init__(
        self, num_in: int, num_out: int, stride: int, norm: NormFactory, shortcut: str
    ) -> None:
        super().__init__()
        self.activate = choose_activation(norm, "block")
        has_bias = not norm.is_centring("block")
        self.norm1 = norm(num_in, role="block", dims=2, is_activated=True)
        self.conv1 = build_conv(num_in, num_out, norm, stride=stride, bias=has_bias)
        self.norm2 = norm(num_out, role="block", dims=2, is_activated=True)
        self.conv2 = build_conv(num_out, num_out, norm, bias=True)
        self.shortcut = build_shortcut(num_in, num_out, stride, shortcut, norm=norm)
        self.is_projected = isinstance(self.shortcut, nn.Module)

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        active = self.activate(self.norm1(x))
        branch = self.conv2(self.activate(self.norm2(self.conv1(active))))
        out: Tensor = branch + self.shortcut(active if self.is_projected else x)
        return out


class ScaledPreBlock(PreBlock):
    """Block of the placements ``rezero_pre`` and ``layer_scale``: ``pre`` with a learned factor.

    Args:
        num_in: Channels of the input.
        num_out: Channels of the output.
        stride: Stride of the block.
        norm: What builds the norms.
        shortcut: "projection" or "padding".
        gain: The factor at the end of the branch.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        stride: int,
        norm: NormFactory,
        shortcut: str,
        *,
        gain: SkipGain,
    ) -> None:
        super().__init__(num_in, num_out, stride, norm, shortcut)
        self.gain = gain

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        active = self.activate(self.norm1(x))
        branch = self.gain(self.conv2(self.activate(self.norm2(self.conv1(active)))))
        out: Tensor = branch + self.shortcut(active if self.is_projected else x)
        return out


class PostBlock(nn.Module):
    """Block of the placement ``post``; see its drawing."""

    def __init__(
        self, num_in: int, num_out: int, stride: int, norm: NormFactory, shortcut: str
    ) -> None:
        super().__init__()
        self.activate = choose_activation(norm, "block")
        # conv2 and the projection meet norm2 with only the sum between: a bias would be as
        # redundant there as right before it.
        has_bias = not norm.is_centring("block")
        self.conv1 = build_conv(num_in, num_out, norm, stride=stride, bias=has_bias)
        self.norm1 = norm(num_out, role="block", dims=2, is_activated=True)
        self.conv2 = build_conv(num_out, num_out, norm, bias=has_bias)
        self.norm2 = norm(num_out, role="block", dims=2, is_activated=True)
        self.shortcut = build_shortcut(
            num_in, num_out, stride, shortcut, norm=norm, has_bias=has_bias
        )

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        branch = self.conv2(self.activate(self.norm1(self.conv1(x))))
        return self.activate(self.norm2(branch + self.shortcut(x)))


class NoneBlock(nn.Module):
    """Block of the placement ``none``; see its drawing."""

    def __init__(
        self, num_in: int, num_out: int, stride: int, norm: NormFactory, shortcut: str
    ) -> None:
        super().__init__()
        self.conv1 = build_conv(num_in, num_out, norm, stride=stride, bias=True)
        self.conv2 = build_conv(num_out, num_out, norm, bias=True)
        self.shortcut = build_shortcut(num_in, num_out, stride, shortcut, norm=norm)

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class ReZeroBlock(NoneBlock):
    """Block of the placement ``rezero``; see its drawing."""

    def __init__(
        self, num_in: int, num_out: int, stride: int, norm: NormFactory, shortcut: str
    ) -> None:
        super().__init__(num_in, num_out, stride, norm, shortcut)
        self.gain = SkipGain(0.0)
        self.is_projected = isinstance(self.shortcut, nn.Module)

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        return F.relu(self.gain(self.conv2(F.relu(self.conv1(x)))) + self.shortcut(x))


class SkipInitBlock(ReZeroBlock):
    """Block of the placement ``skip_init``; see its drawing."""

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        active = F.relu(x)
        branch = self.gain(self.conv2(F.relu(self.conv1(active))))
        out: Tensor = branch + self.shortcut(active if self.is_projected else x)
        return out


class FixupBlock(nn.Module):
    """Block of the placement ``fixup``; see its drawing. A projection takes ``x + b1``.

    Args:
        num_in: Channels of the input.
        num_out: Channels of the output.
        stride: Stride of the block.
        norm: Not used: there is no norm, of weights neither.
        shortcut: "projection" or "padding".
        num_branches: L, residual blocks of the whole model.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        stride: int,
        norm: NormFactory,
        shortcut: str,
        *,
        num_branches: int,
    ) -> None:
        super().__init__()
        self.shift1, self.shift2, self.shift3, self.shift4 = (SkipShift() for _ in range(4))
        self.gain = SkipGain(1.0)
        self.conv1 = build_conv(num_in, num_out, norm, stride=stride, bias=False)
        self.conv2 = build_conv(num_out, num_out, norm, bias=False)
        # L^(-1 / (2m - 2)) for a branch of m = 2 layers.
        set_initial_scale(self.conv1, num_branches**-0.5)
        set_initial_scale(self.conv2, 0.0)
        self.shortcut = build_shortcut(num_in, num_out, stride, shortcut, norm=norm, has_bias=False)
        self.is_projected = isinstance(self.shortcut, nn.Module)

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        shifted = self.shift1(x)
        hidden = F.relu(self.shift2(self.conv1(shifted)))
        branch = self.shift4(self.gain(self.conv2(self.shift3(hidden))))
        return F.relu(branch + self.shortcut(shifted if self.is_projected else x))


def build_block(
    placement: str,
    num_in: int,
    num_out: int,
    stride: int,
    norm: NormFactory,
    shortcut: str,
    *,
    num_branches: int = 1,
    layer_scale_init: float = 0.1,
) -> nn.Module:
    """Build a residual block of one placement.

    Args:
        placement: A name in ``PLACEMENTS``.
        num_in: Channels of the input.
        num_out: Channels of the output.
        stride: Stride of the block.
        norm: What builds the norms.
        shortcut: "projection" or "padding".
        num_branches: Residual blocks of the whole model; for fixup.
        layer_scale_init: What the factors of layer_scale start at.

    Returns:
        A module from images ``[N, num_in, H, W]`` to ``[N, num_out, H/stride, W/stride]``,
        sides rounded up.
    """
    given = (num_in, num_out, stride, norm, shortcut)
    if placement == "rezero_pre":
        return ScaledPreBlock(*given, gain=SkipGain(0.0))
    if placement == "layer_scale":
        gain = SkipGain(layer_scale_init, num_features=num_out, dims=2)
        return ScaledPreBlock(*given, gain=gain)
    if placement == "fixup":
        return FixupBlock(*given, num_branches=num_branches)
    return _PLAIN_BLOCKS[placement](*given)


_PLAIN_BLOCKS: dict[str, Callable[[int, int, int, NormFactory, str], nn.Module]] = {
    "res_post": ResPostBlock,
    "pre": PreBlock,
    "post": PostBlock,
    "none": NoneBlock,
    "rezero": ReZeroBlock,
    "skip_init": SkipInitBlock,
}
