"""Placements: where the norms of a residual block stand, one formula and one drawing each.

A block is two 3x3 convolutions beside a shortcut. The names of its convolutions are the same in
every placement and with every norm, so that all of them start from the same weights.
Legend: n samples, c channels, h, w height and width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms import NormFactory

Images = Float[Tensor, "n c h w"]
Output = Float[Tensor, "n c_out h_out w_out"]
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Placement:
    """One way to combine a branch f, a shortcut and norms.

    Attributes:
        name: The choice, as in the configuration.
        formula: The output of a block with branch f.
        drawing: The block, drawn with characters.
        description: What it is for and where it is known from.
    """

    name: str
    formula: str
    drawing: str
    description: str


_RES_POST = Placement(
    name="res_post",
    formula="relu(x + norm2(conv2(relu(norm1(conv1(x))))))",
    drawing="""\
x -+- conv1 - norm1 - relu - conv2 - norm2 -(+)- relu -> y
   |                                         |
   +-------- identity | conv - norm ---------+
""",
    description="The branch ends in a norm, the sum is not normalized: ResNet v1 (He et al., CVPR "
    "2016). A projection shortcut has a norm of its own (role downsample).",
)

_PRE = Placement(
    name="pre",
    formula="x + conv2(relu(norm2(conv1(relu(norm1(x))))))",
    drawing="""\
x -+- norm1 - relu -+- conv1 - norm2 - relu - conv2 -(+)-> y
   |                |                                 |
   +- identity      +- or: conv (projection) ---------+
   |                                                  |
   +--------------------------------------------------+
after the last block: norm - relu (role final)
""",
    description="The branch starts with a norm and the shortcut is clean: ResNet v2 (He et al., "
    "ECCV 2016). A projection takes the normalized, activated input; the stem has no norm.",
)

_POST = Placement(
    name="post",
    formula="relu(norm2(x + conv2(relu(norm1(conv1(x))))))",
    drawing="""\
x -+- conv1 - norm1 - relu - conv2 -(+)- norm2 - relu -> y
   |                                 |
   +-------- identity | conv --------+
""",
    description="The sum is normalized, as in the first Transformer; for ResNets He et al., ECCV "
    "2016, figure 4(b), call it BN after addition.",
)

_NONE = Placement(
    name="none",
    formula="relu(x + conv2(relu(conv1(x))))",
    drawing="""\
x -+- conv1 - relu - conv2 -(+)- relu -> y
   |                         |
   +---- identity | conv ----+
""",
    description="No norm layer anywhere in the model; norm must be no_norm.",
)

PLACEMENTS: dict[str, Placement] = {p.name: p for p in (_RES_POST, _PRE, _POST, _NONE)}


class ResPostBlock(nn.Module):
    """Block of the placement ``res_post``; see its drawing."""

    def __init__(
        self, num_in: int, num_out: int, stride: int, norm: NormFactory, shortcut: str
    ) -> None:
        super().__init__()
        self.activate = choose_activation(norm, "block")
        has_bias = not norm.is_centring("block")
        self.conv1 = build_conv(num_in, num_out, stride=stride, bias=has_bias)
        self.norm1 = norm(num_out, role="block", dims=2, is_activated=True)
        self.conv2 = build_conv(num_out, num_out, bias=has_bias)
        self.norm2 = norm(num_out, role="block", dims=2)
        self.shortcut = build_shortcut(
            num_in,
            num_out,
            stride,
            shortcut,
            norm=norm,
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
        self.norm1 = norm(num_in, role="block", dims=2, is_activated=True)
        self.conv1 = build_conv(num_in, num_out, stride=stride, bias=not norm.is_centring("block"))
        self.norm2 = norm(num_out, role="block", dims=2, is_activated=True)
        self.conv2 = build_conv(num_out, num_out, bias=True)
        self.shortcut = build_shortcut(num_in, num_out, stride, shortcut, norm=None, has_bias=True)
        self.is_projected = isinstance(self.shortcut, nn.Module)

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        active = self.activate(self.norm1(x))
        branch = self.conv2(self.activate(self.norm2(self.conv1(active))))
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
        self.conv1 = build_conv(num_in, num_out, stride=stride, bias=has_bias)
        self.norm1 = norm(num_out, role="block", dims=2, is_activated=True)
        self.conv2 = build_conv(num_out, num_out, bias=has_bias)
        self.norm2 = norm(num_out, role="block", dims=2, is_activated=True)
        self.shortcut = build_shortcut(
            num_in, num_out, stride, shortcut, norm=None, has_bias=has_bias
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
        self.conv1 = build_conv(num_in, num_out, stride=stride, bias=True)
        self.conv2 = build_conv(num_out, num_out, bias=True)
        self.shortcut = build_shortcut(num_in, num_out, stride, shortcut, norm=None, has_bias=True)

    def forward(self, x: Images) -> Output:
        """Return the block's output."""
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


def choose_activation(norm: NormFactory, role: str) -> Activation:
    """Return what follows a norm of that role directly: relu, unless it brings its own."""
    return return_input if norm.includes_activation(role) else F.relu


BLOCKS: dict[str, Callable[[int, int, int, NormFactory, str], nn.Module]] = {
    "res_post": ResPostBlock,
    "pre": PreBlock,
    "post": PostBlock,
    "none": NoneBlock,
}


def build_conv(
    num_in: int, num_out: int, *, bias: bool, stride: int = 1, kernel_size: int = 3
) -> nn.Conv2d:
    """Build a convolution whose output has ``ceil(size / stride)`` pixels a side."""
    return nn.Conv2d(
        num_in, num_out, kernel_size, stride=stride, padding=kernel_size // 2, bias=bias
    )


def build_shortcut(
    num_in: int,
    num_out: int,
    stride: int,
    kind: str,
    *,
    norm: NormFactory | None,
    has_bias: bool,
) -> Callable[[Tensor], Tensor]:
    """Build what stands beside the branch.

    Where the shape does not change it is the identity, as a plain function: calling an
    ``nn.Identity`` in every block would cost more than the block's additions.

    Args:
        num_in: Channels of the input.
        num_out: Channels of the output.
        stride: Stride of the block.
        kind: "projection" (1x1 convolution, option B of He et al. 2016) or "padding" (every
            stride-th pixel, missing channels filled with zeros, option A: no parameters).
        norm: What builds the norm after a projection; None for no norm there.
        has_bias: Whether a projection has a bias.

    Returns:
        A module for a projection, else a plain function.
    """
    if stride == 1 and num_in == num_out:
        return return_input
    if kind == "padding":
        return partial(pad_shortcut, stride=stride, num_missing=num_out - num_in)
    layers = OrderedDict[str, nn.Module](
        conv=build_conv(num_in, num_out, stride=stride, kernel_size=1, bias=has_bias)
    )
    if norm is not None:
        layers["norm"] = norm(num_out, role="downsample", dims=2)
    return nn.Sequential(layers)


def return_input(x: Images) -> Images:
    """Return the input itself: the identity shortcut."""
    return x


def pad_shortcut(x: Images, *, stride: int, num_missing: int) -> Output:
    """Return every stride-th pixel, with ``num_missing`` channels of zeros behind the others."""
    return F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, num_missing))
