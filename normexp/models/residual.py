"""Parts of residual networks: convolutions, shortcuts, what follows a norm, initial sizes.

A norm that acts on weights acts on every convolution that is built here.
Legend: n samples, c channels, h, w height and width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms import NormFactory

Images = Float[Tensor, "n c h w"]
Output = Float[Tensor, "n c_out h_out w_out"]
Activation = Callable[[Tensor], Tensor]


def choose_activation(norm: NormFactory, role: str) -> Activation:
    """Return what follows a norm of that role directly: relu, unless it brings its own."""
    return return_input if norm.includes_activation(role) else F.relu


def set_initial_scale(layer: nn.Module, scale: float) -> None:
    """Let ``initialize`` multiply what it draws for the layer's weight."""
    vars(layer)["initial_scale"] = scale


def set_initial_std(layer: nn.Module, std: float) -> None:
    """Let ``initialize`` draw the layer's weight with that standard deviation."""
    vars(layer)["initial_std"] = std


def build_conv(
    num_in: int,
    num_out: int,
    norm: NormFactory,
    *,
    role: str = "block",
    bias: bool,
    stride: int = 1,
    kernel_size: int = 3,
) -> nn.Module:
    """Build a convolution whose output has ``ceil(size / stride)`` pixels a side.

    Args:
        num_in: Channels of the input.
        num_out: Channels of the output.
        norm: What may act on the weight.
        role: The norm's role there.
        bias: Whether it has a bias.
        stride: Stride.
        kernel_size: Side of the kernel, odd.
    """
    conv = nn.Conv2d(
        num_in, num_out, kernel_size, stride=stride, padding=kernel_size // 2, bias=bias
    )
    return norm.parametrize(conv, role=role)


def build_shortcut(
    num_in: int,
    num_out: int,
    stride: int,
    kind: str,
    *,
    norm: NormFactory,
    has_norm: bool = False,
    has_bias: bool = True,
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
        norm: What builds the norm after a projection, or acts on its weight.
        has_norm: Whether a norm stands there.
        has_bias: Whether a projection has a bias.

    Returns:
        A module for a projection, else a plain function.
    """
    if stride == 1 and num_in == num_out:
        return return_input
    if kind == "padding":
        return partial(pad_shortcut, stride=stride, num_missing=num_out - num_in)
    layers = OrderedDict[str, nn.Module](
        conv=build_conv(
            num_in, num_out, norm, role="downsample", stride=stride, kernel_size=1, bias=has_bias
        )
    )
    if has_norm:
        layers["norm"] = norm(num_out, role="downsample", dims=2)
    return nn.Sequential(layers)


def return_input(x: Images) -> Images:
    """Return the input itself: the identity shortcut."""
    return x


def pad_shortcut(x: Images, *, stride: int, num_missing: int) -> Output:
    """Return every stride-th pixel, with ``num_missing`` channels of zeros behind the others."""
    return F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, num_missing))
