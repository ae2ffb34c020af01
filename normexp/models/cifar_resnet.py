"""The small ResNets for small images of He et al. 2016, section 4.2, with a choice of norm."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models._registry import MODELS, ModelCard
from normexp.models.blocks import ResPostBlock, build_block
from normexp.models.placements import PLACEMENTS
from normexp.models.residual import (
    Activation,
    build_conv,
    choose_activation,
    set_initial_scale,
)
from normexp.models.skips import SkipShift
from normexp.norms import NormFactory

CARD = ModelCard(
    description="Residual network of 6n+2 layers for small images: a 3x3 stem, num_stages stages "
    "of n basic blocks (half the side, twice the channels a stage), mean, classifier",
    source="He et al., CVPR 2016, section 4.2 (res_post); He et al., ECCV 2016 (pre)",
    placements=tuple(name for name, placement in PLACEMENTS.items() if placement.images),
)

DEFAULT_LAYER_SCALE_INIT = 0.1
# Their blocks start with the activation, so that none comes before the first and one after the
# last.
_PRE_ACTIVATED = ("pre", "rezero_pre", "skip_init", "layer_scale")


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
        layer_scale_init: What the factors of placement layer_scale start at.

    Attributes:
        block_paths: Where its residual blocks are, in the order of the forward pass.
        last_branch_weight: Name of the weight that the last branch ends with.
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
        layer_scale_init: float,
    ) -> None:
        super().__init__()
        is_pre_activated = placement in _PRE_ACTIVATED
        has_norm_layers = PLACEMENTS[placement].has_norm_layers
        has_stem_norm = has_norm_layers and not is_pre_activated
        has_final_norm = has_norm_layers and is_pre_activated
        is_fixup = placement == "fixup"
        has_bias = not (is_fixup or (has_stem_norm and norm.is_centring("stem")))
        self.stem = nn.Sequential()
        conv = build_conv(num_channels, width, norm, role="stem", bias=has_bias)
        self.stem.add_module("conv", conv)
        if has_stem_norm:
            self.stem.add_module("norm", norm(width, role="stem", dims=2, is_activated=True))
        if is_fixup:
            self.stem.add_module("shift", SkipShift())
        self.activate_stem: Activation | None = None
        if not is_pre_activated:
            self.activate_stem = choose_activation(norm, "stem") if has_stem_norm else F.relu
        num_in = width
        self.stages = nn.Sequential()
        for stage in range(num_stages):
            num_out = width * 2**stage
            blocks = nn.Sequential()
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                block = build_block(
                    placement,
                    num_in,
                    num_out,
                    stride,
                    norm,
                    shortcut,
                    num_branches=num_stages * num_blocks,
                    layer_scale_init=layer_scale_init,
                )
                blocks.append(block)
                num_in = num_out
            self.stages.append(blocks)
        self.block_paths = tuple(
            f"stages.{stage}.{index}" for stage in range(num_stages) for index in range(num_blocks)
        )
        self.last_branch_weight = f"{self.block_paths[-1]}.conv2.weight"
        self.final_norm = (
            norm(num_in, role="final", dims=2, is_activated=True) if has_final_norm else None
        )
        self.activate_final: Activation | None = None
        if is_pre_activated:
            self.activate_final = choose_activation(norm, "final") if has_final_norm else F.relu
        self.classifier_shift = SkipShift() if is_fixup else None
        self.classifier = nn.Linear(num_in, num_classes)
        if is_fixup:
            set_initial_scale(self.classifier, 0.0)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Return the logits of a batch of images."""
        x = self.stem(x)
        if self.activate_stem is not None:
            x = self.activate_stem(x)
        x = self.stages(x)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.activate_final is not None:
            x = self.activate_final(x)
        x = x.mean((2, 3))
        if self.classifier_shift is not None:
            x = self.classifier_shift(x)
        logits: Tensor = self.classifier(x)
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
    layer_scale_init: float = DEFAULT_LAYER_SCALE_INIT,
) -> nn.Module:
    """Build a residual network for small images.

    Args:
        input_shape: One sample, ``(C, H, W)``.
        num_classes: Number of classes.
        norm: What builds the norm layers.
        placement: Where they stand and what is learned of the skips; see ``placements.py``.
        depth: 6n+2 with n blocks a stage. It fixes n whatever num_stages is: the network then has
            2*n*num_stages+2 layers with weights, depth itself for the usual 3 stages.
        width: Channels of the first stage; each further stage has twice as many.
        num_stages: Stages; each but the first halves the map's side (rounded up).
        shortcut: Where the shape changes: projection (1x1 convolution, option B) or padding
            (zeros for the missing channels, option A: no parameters).
        zero_init_last_gain: Whether the gain of the last norm of every branch starts at zero, so
            that every block starts as its shortcut. Only for res_post: in the other placements
            a relu or the whole signal comes after that norm and would stay dead.
        layer_scale_init: What the factors of placement layer_scale start at, at every depth.
            Touvron et al. take 0.1 up to 18 blocks, 1e-5 up to 24 and 1e-6 beyond.

    Returns:
        A module from images ``[N, C, H, W]`` to logits ``[N, num_classes]``.

    Raises:
        UserError: If the depth is not 6n+2, the images are too small for the stages, a size is
            not positive, the zero gain is impossible, or layer_scale_init is given to another
            placement.

    Source:
        He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section
        4.2; "Identity Mappings in Deep Residual Networks", ECCV 2016; zero gain: Goyal et al.,
        arXiv:1706.02677, section 5.1; layer_scale_init: Touvron et al., ICCV 2021, section 2.
    """
    if placement not in CARD.placements:
        raise UserError("placement", placement, f"one of {', '.join(CARD.placements)} is needed")
    _check_sizes(input_shape, depth, width, num_stages)
    if layer_scale_init != DEFAULT_LAYER_SCALE_INIT and placement != "layer_scale":
        raise UserError(
            "model.params.layer_scale_init",
            layer_scale_init,
            f"placement layer_scale is needed, not {placement}",
        )
    model = CifarResNet(
        input_shape[0],
        num_classes,
        norm=norm,
        placement=placement,
        num_blocks=(depth - 2) // 6,
        width=width,
        num_stages=num_stages,
        shortcut=shortcut,
        layer_scale_init=layer_scale_init,
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
