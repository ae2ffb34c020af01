"""The small ResNets for small images of He et al. 2016, section 4.2, with a choice of norm."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models._registry import MODELS, ModelCard
from normexp.models.residual import (
    BLOCKS,
    Activation,
    ResPostBlock,
    build_conv,
    choose_activation,
)
from normexp.norms import NormFactory

CARD = ModelCard(
    description="Residual network of 6n+2 layers for small images: a 3x3 stem, num_stages stages "
    "of n basic blocks (half the side, twice the channels a stage), mean, classifier",
    source="He et al., CVPR 2016, section 4.2 (res_post); He et al., ECCV 2016 (pre)",
    placements=("res_post", "pre", "post", "none"),
)


class CifarResNet(nn.Module):
    """Stem, stages of residual blocks, mean over positions, linear classifier.

    Args:
        num_channels: Channels of the images.
        num_classes: Outputs.
        norm: What builds the norm layers.
        placement: Where they stand.
        num_blocks: Residual blocks a stage.
        width: Channels of the first stage.
        num_stages: Stages.
        shortcut: "projection" or "padding".
    """

    def __init__(
        self,
        num_channels: int,
        num_classes: int,
        *,
        norm: NormFactory,
        placement: str,
        num_blocks: int,
        width: int,
        num_stages: int,
        shortcut: str,
    ) -> None:
        super().__init__()
        has_stem_norm = placement in ("res_post", "post")
        self.stem = nn.Sequential()
        self.stem.add_module(
            "conv",
            build_conv(num_channels, width, bias=not (has_stem_norm and norm.is_centring("stem"))),
        )
        if has_stem_norm:
            self.stem.add_module("norm", norm(width, role="stem", dims=2, is_activated=True))
        # In v2 the first block starts with its own norm and relu.
        self.activate_stem: Activation | None = None
        if placement != "pre":
            self.activate_stem = choose_activation(norm, "stem") if has_stem_norm else F.relu
        self.activate_final = choose_activation(norm, "final")
        block, num_in = BLOCKS[placement], width
        self.stages = nn.Sequential()
        for stage in range(num_stages):
            num_out = width * 2**stage
            blocks = nn.Sequential()
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(num_in, num_out, stride, norm, shortcut))
                num_in = num_out
            self.stages.append(blocks)
        self.final_norm = (
            norm(num_in, role="final", dims=2, is_activated=True) if placement == "pre" else None
        )
        self.classifier = nn.Linear(num_in, num_classes)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Return the logits of a batch of images."""
        x = self.stem(x)
        if self.activate_stem is not None:
            x = self.activate_stem(x)
        x = self.stages(x)
        if self.final_norm is not None:
            x = self.activate_final(self.final_norm(x))
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


@MODELS.register("cifar_resnet", CARD)
def build_cifar_resnet(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    norm: NormFactory,
    placement: str | None,
    depth: int = 8,
    width: int = 16,
    num_stages: int = 3,
    shortcut: Literal["projection", "padding"] = "projection",
    zero_init_last_gain: bool = False,
) -> nn.Module:
    """Build a residual network for small images.

    Args:
        input_shape: One sample, ``(C, H, W)``.
        num_classes: Number of classes.
        norm: What builds the norm layers.
        placement: Where they stand: res_post (v1), pre (v2), post or none.
        depth: 6n+2 with n blocks a stage. It fixes n whatever num_stages is: the network then has
            2*n*num_stages+2 layers with weights, depth itself for the usual 3 stages.
        width: Channels of the first stage; each further stage has twice as many.
        num_stages: Stages; each but the first halves the map's side (rounded up).
        shortcut: Where the shape changes: projection (1x1 convolution, option B) or padding
            (zeros for the missing channels, option A: no parameters).
        zero_init_last_gain: Whether the gain of the last norm of every branch starts at zero, so
            that every block starts as its shortcut. Only for res_post: in the other placements
            a relu or the whole signal comes after that norm and would stay dead.

    Returns:
        A module from images ``[N, C, H, W]`` to logits ``[N, num_classes]``.

    Raises:
        UserError: If the depth is not 6n+2, the images are too small for the stages, a size is
            not positive, or the zero gain is impossible.

    Source:
        He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section
        4.2; "Identity Mappings in Deep Residual Networks", ECCV 2016; zero gain: Goyal et al.,
        arXiv:1706.02677, section 5.1.
    """
    if placement not in CARD.placements:
        raise UserError("placement", placement, f"one of {', '.join(CARD.placements)} is needed")
    _check_sizes(input_shape, depth, width, num_stages)
    model = CifarResNet(
        input_shape[0],
        num_classes,
        norm=norm,
        placement=placement,
        num_blocks=(depth - 2) // 6,
        width=width,
        num_stages=num_stages,
        shortcut=shortcut,
    )
    if zero_init_last_gain:
        _zero_last_gains(model, placement, norm)
    return model


def _check_sizes(input_shape: tuple[int, ...], depth: int, width: int, num_stages: int) -> None:
    """Raise unless the network exists and every stage has something to halve."""
    if len(input_shape) != 3:
        raise UserError("model.name", "cifar_resnet", f"needs images, not samples of {input_shape}")
    if depth < 8 or (depth - 2) % 6:
        raise UserError("model.params.depth", depth, "6n+2 is needed: 8, 14, 20, 32, 44, 56, 110")
    if width < 1:
        raise UserError("model.params.width", width, "1 or more is needed")
    if num_stages < 1:
        raise UserError("model.params.num_stages", num_stages, "1 or more is needed")
    side, most = min(input_shape[1:]), 1
    while side > 1:
        side, most = -(-side // 2), most + 1
    if num_stages > most:
        raise UserError(
            "model.params.num_stages",
            num_stages,
            f"images of {input_shape[1]}x{input_shape[2]} allow at most {most}: "
            "every further stage halves a side of 1",
        )


def _zero_last_gains(model: CifarResNet, placement: str, norm: NormFactory) -> None:
    """Set the gain of the last norm of every branch to zero."""
    key = "model.params.zero_init_last_gain"
    if placement != "res_post":
        raise UserError(key, True, f"placement res_post is needed, not {placement}")
    for block in model.modules():
        if isinstance(block, ResPostBlock):
            gain = getattr(block.norm2, "weight", None)
            if not isinstance(gain, nn.Parameter):
                raise UserError(key, True, f"norm {norm.get_name('block')} has no gain here")
            nn.init.zeros_(gain)
