"""A Transformer: a causal language model or a masked encoder that classifies texts.

What it is follows from the data: where the next token is to be predicted, every position sees
itself and those before it; else all valid positions see each other and their mean is classified.

Legend: n texts, l positions, d width, h heads, e = d/h head width, v token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from normexp.data import PAD_ID, TokenTask
from normexp.errors import UserError
from normexp.models._registry import MODELS, ModelCard
from normexp.models.placements import PLACEMENTS
from normexp.models.residual import set_initial_std
from normexp.models.skips import SkipGain
from normexp.norms import NormFactory

CARD = ModelCard(
    description="Transformer: depth blocks of attention and feed-forward network; a causal "
    "language model or an encoder that classifies, as the data ask",
    source="Vaswani et al., NeurIPS 2017 (post); Xiong et al., ICML 2020 (pre)",
    placements=tuple(name for name, placement in PLACEMENTS.items() if placement.sequences),
    takes_tokens=True,
)

DEFAULT_LAYER_SCALE_INIT = 0.1
# Where the norms of a branch stand: before it, after it, behind the sum.
_NORMS_AT = {
    "pre": ("before",),
    "post": ("sum",),
    "res_post": ("after",),
    "sandwich": ("before", "after"),
    "deepnorm": ("sum",),
    "rezero": (),
    "rezero_pre": ("before",),
    "layer_scale": ("before",),
    "none": (),
}
# Their last sum is not normalized: one norm more stands behind the last block.
_HAS_FINAL_NORM = ("pre", "res_post", "sandwich", "rezero_pre", "layer_scale")
# Embeddings of positions start small beside those of tokens, which start with variance 1.
_POSITION_STD = 0.02
_ROTARY_BASE = 10_000.0

Sequences = Float[Tensor, "n l d"]
Mask = Bool[Tensor, "n l"] | None
ActivationName = Literal["relu", "gelu"]
PositionsName = Literal["learned", "rotary"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


def build_norm(num_features: int, norm: NormFactory, *, role: str, is_masked: bool) -> nn.Module:
    """Build a norm layer that notes whether it is to be given the mask of valid positions.

    Args:
        num_features: Channels.
        norm: What builds it.
        role: Its role.
        is_masked: Whether norms get the mask at all.

    Raises:
        UserError: If the norm has no place in sequences, or normalizes nothing without an
            activation right behind it, which no norm of a Transformer has.
    """
    layer = norm(num_features, role=role, dims=1)
    if norm.get_card(role).statistic_sets.get(1) and getattr(layer, "statistic_sets", None) == ():
        expected = "its statistics belong to an activation right behind it, and here is none: it "
        key = f"norm.roles.{role}" if role in norm.roles else "norm"
        raise UserError(key, norm.get_name(role), expected + "would be a gain and a shift alone")
    vars(layer)["is_masked"] = is_masked and norm.get_card(role).takes_mask
    return layer


def normalize(layer: nn.Module, x: Sequences, mask: Mask) -> Sequences:
    """Return normalized sequences. What stands in a norm's place by now gets no mask."""
    out: Tensor = layer(x, mask) if getattr(layer, "is_masked", False) else layer(x)
    return out


class Attention(nn.Module):
    """Multi-head self-attention.

    Args:
        width: Features d of a position.
        num_heads: Heads.
        norm: What builds the norm of queries and keys (role qk), if one is chosen.
        is_causal: Whether a position sees itself and earlier ones alone.
        is_masked: Whether norms get the mask.
        bias: Whether the linear layers have one.
        rotary: Rotation of queries and keys; None where positions are embedded.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        norm: NormFactory,
        is_causal: bool,
        is_masked: bool,
        bias: bool,
        rotary: Rotary | None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.rotary = rotary
        self.query, self.key, self.value, self.out = (
            _build_linear(width, width, norm, role="attention", bias=bias) for _ in range(4)
        )
        has_norm = "qk" in norm.roles
        self.query_norm, self.key_norm = (
            build_norm(width // num_heads, norm, role="qk", is_masked=is_masked)
            if has_norm
            else None
            for _ in range(2)
        )

    def forward(self, x: Sequences, mask: Mask) -> Sequences:
        """Return what each position takes from those that it sees."""
        query = self._split(self.query(x), self.query_norm, mask)
        key = self._split(self.key(x), self.key_norm, mask)
        value = self._split(self.value(x), None, mask)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        sees = None if mask is None else _visible(mask, is_causal=self.is_causal)
        taken = F.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, is_causal=self.is_causal and sees is None
        )
        out: Tensor = self.out(taken.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Sequences, norm: nn.Module | None, mask: Mask) -> Float[Tensor, "n h l e"]:
        """Return the heads, each normalized by the norm of its kind.

        To the norm a head is a position more: a sample stays a sample.
        """
        heads = x.reshape(*x.shape[:2], self.num_heads, -1)
        if norm is not None:
            wide = None if mask is None else mask.repeat_interleave(self.num_heads, dim=1)
            heads = normalize(norm, heads.flatten(1, 2), wide).reshape(heads.shape)
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with an activation between, at every position by itself.

    Args:
        width: Features d of a position.
        hidden_width: Features between.
        norm: What may act on the weights (role mlp).
        bias: Whether the linear layers have one.
        activation: "relu" or "gelu".
    """

    def __init__(
        self,
        width: int,
        hidden_width: int,
        *,
        norm: NormFactory,
        bias: bool,
        activation: ActivationName,
    ) -> None:
        super().__init__()
        self.activate = _ACTIVATIONS[activation]
        self.up = _build_linear(width, hidden_width, norm, role="mlp", bias=bias)
        self.down = _build_linear(hidden_width, width, norm, role="mlp", bias=bias)

    def forward(self, x: Sequences, mask: Mask) -> Sequences:
        """Return the features of each position, anew."""
        out: Tensor = self.down(self.activate(self.up(x)))
        return out


class Residual(nn.Module):
    """A branch with its shortcut and its norms; ``placements.py`` draws them.

    Args:
        branch: Attention or feed-forward network.
        width: Features d of a position.
        norm: What builds the norms.
        role: Their role.
        placement: Where they stand.
        depth: Blocks of the model, for deepnorm.
        is_masked: Whether norms get the mask.
        layer_scale_init: What the factors of layer_scale start at.
    """

    def __init__(
        self,
        branch: nn.Module,
        *,
        width: int,
        norm: NormFactory,
        role: str,
        placement: str,
        depth: int,
        is_masked: bool,
        layer_scale_init: float,
    ) -> None:
        super().__init__()
        self.branch = branch
        self.norm_before, self.norm_after, self.norm_sum = (
            build_norm(width, norm, role=role, is_masked=is_masked)
            if place in _NORMS_AT[placement]
            else None
            for place in ("before", "after", "sum")
        )
        self.gain: SkipGain | None = None
        if placement in ("rezero", "rezero_pre"):
            self.gain = SkipGain(0.0)
        elif placement == "layer_scale":
            self.gain = SkipGain(layer_scale_init, num_features=width, dims=1)
        self.shortcut_scale = (2.0 * depth) ** 0.25 if placement == "deepnorm" else 1.0

    def forward(self, x: Sequences, mask: Mask) -> Sequences:
        """Return the sequences with what the branch adds."""
        branch = x if self.norm_before is None else normalize(self.norm_before, x, mask)
        branch = self.branch(branch, mask)
        if self.norm_after is not None:
            branch = normalize(self.norm_after, branch, mask)
        if self.gain is not None:
            branch = self.gain(branch)
        shortcut = x if self.shortcut_scale == 1.0 else x * self.shortcut_scale
        out: Tensor = shortcut + branch
        return out if self.norm_sum is None else normalize(self.norm_sum, out, mask)


class Block(nn.Module):
    """Attention, then a feed-forward network, each with its shortcut."""

    def __init__(self, attention: Residual, mlp: Residual) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp

    def forward(self, x: Sequences, mask: Mask) -> Sequences:
        """Return the block's output."""
        out: Tensor = self.mlp(self.attention(x, mask), mask)
        return out


class Rotary(nn.Module):
    """Rotates pairs of features by an angle that grows with the position.

    Products of a query and a key then depend on how far apart they stand, not on where.

    Args:
        head_width: Features e of a head, even.
        max_length: Most positions.

    Source:
        Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, max_length: int) -> None:
        super().__init__()
        exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
        positions = torch.arange(max_length, dtype=torch.float64)
        angles = positions[:, None] * _ROTARY_BASE**-exponents
        default = torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(default), persistent=False)
        self.register_buffer("sin", angles.sin().to(default), persistent=False)

    def forward(self, x: Float[Tensor, "n h l e"]) -> Float[Tensor, "n h l e"]:
        """Return the rotated heads, in the input's type."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        first, second = x.chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


class Transformer(nn.Module):
    """Embeddings, blocks, a last norm where the placement needs one, and a linear head.

    Args:
        vocabulary_size: Token ids v.
        num_outputs: Logits of a prediction.
        max_length: Most positions of a text.
        is_causal: Whether it predicts the next token at every position, from those up to it.
        has_padding: Whether to take positions with ``PAD_ID`` as not valid if no mask is given.
        norm: What builds the norm layers.
        placement: Where they stand.
        depth: Blocks.
        width: Features d of a position.
        num_heads: Heads of attention.
        mlp_ratio: Features inside of a feed-forward network, as a multiple of the width.
        activation: "relu" or "gelu".
        positions: "learned" or "rotary".
        tie_embeddings: Whether the head has the weights of the token embedding.
        bias: Whether the linear layers of the blocks have one.
        mask_norms: Whether norms get the mask.
        scale_residual_init: Whether the last weights of each branch start smaller with depth.
        layer_scale_init: What the factors of layer_scale start at.

    Attributes:
        is_causal: Whether no position may see a later one.
        masks_norms: Whether norms get the mask.
        block_paths: Where its blocks are, in the order of the forward pass.
        last_branch_weight: Name of the weight that the last branch ends with.
    """

    input_dtype = torch.int64

    def __init__(
        self,
        vocabulary_size: int,
        num_outputs: int,
        max_length: int,
        *,
        is_causal: bool,
        has_padding: bool,
        norm: NormFactory,
        placement: str,
        depth: int,
        width: int,
        num_heads: int,
        mlp_ratio: int,
        activation: ActivationName,
        positions: PositionsName,
        tie_embeddings: bool,
        bias: bool,
        mask_norms: bool,
        scale_residual_init: bool,
        layer_scale_init: float,
    ) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.has_padding = has_padding
        self.masks_norms = mask_norms
        self.max_length = max_length
        self.embedding_scale = math.sqrt(width)
        self.token_embedding = nn.Embedding(vocabulary_size, width)
        set_initial_std(self.token_embedding, width**-0.5)
        self.position_embedding: nn.Embedding | None = None
        rotary = None
        if positions == "rotary":
            rotary = Rotary(width // num_heads, max_length)
        else:
            self.position_embedding = nn.Embedding(max_length, width)
            set_initial_std(self.position_embedding, _POSITION_STD)
        build_residual = partial(
            Residual,
            width=width,
            norm=norm,
            placement=placement,
            depth=depth,
            is_masked=mask_norms,
            layer_scale_init=layer_scale_init,
        )
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            attention = Attention(
                width,
                num_heads,
                norm=norm,
                is_causal=is_causal,
                is_masked=mask_norms,
                bias=bias,
                rotary=rotary,
            )
            mlp = FeedForward(width, mlp_ratio * width, norm=norm, bias=bias, activation=activation)
            _set_initial_sizes(
                attention,
                mlp,
                gain=(8.0 * depth) ** -0.25 if placement == "deepnorm" else 1.0,
                end_gain=(2.0 * depth) ** -0.5 if scale_residual_init else 1.0,
            )
            self.blocks.append(
                Block(build_residual(attention, role="attention"), build_residual(mlp, role="mlp"))
            )
        self.block_paths = tuple(f"blocks.{index}" for index in range(depth))
        self.last_branch_weight = f"{self.block_paths[-1]}.mlp.branch.down.weight"
        self.final_norm = (
            build_norm(width, norm, role="final", is_masked=mask_norms)
            if placement in _HAS_FINAL_NORM
            else None
        )
        self.head: nn.Linear | None = None
        if not tie_embeddings:
            self.head = nn.Linear(width, num_outputs, bias=not is_causal)
            set_initial_std(self.head, width**-0.5)

    def forward(
        self, tokens: Int64[Tensor, "n l"], mask: Mask = None
    ) -> Float[Tensor, "n l v"] | Float[Tensor, "n classes"]:
        """Return logits: of the next token at each position, or of the labels of each text.

        Args:
            tokens: Token ids.
            mask: True where a position is valid; by default where the token is not ``PAD_ID``,
                if the model is one of padded texts. What stands at other positions is seen by
                nothing but norms without the mask. A text without a valid position has the mean
                zero: its logits are the head's bias.

        Raises:
            ValueError: If there are more positions than the model was built for.
        """
        if tokens.shape[1] > self.max_length:
            has = f"{tokens.shape[1]} positions"
            raise ValueError(f"{has} are given, and the model has {self.max_length}")
        if mask is None and self.has_padding:
            mask = tokens != PAD_ID
        x = self.token_embedding(tokens) * self.embedding_scale
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        if self.final_norm is not None:
            x = normalize(self.final_norm, x, mask)
        if not self.is_causal:
            x = _mean_of_valid(x, mask)
        if self.head is None:
            return F.linear(x, self.token_embedding.weight)
        logits: Tensor = self.head(x)
        return logits


def _mean_of_valid(x: Sequences, mask: Mask) -> Float[Tensor, "n d"]:
    """Return the mean over the valid positions of each text; zero where there is none."""
    if mask is None:
        return x.mean(1)
    total = torch.where(mask[:, :, None], x, 0.0).sum(1)
    return total / mask.sum(1, keepdim=True).clamp(min=1).to(x.dtype)


def _visible(mask: Bool[Tensor, "n l"], *, is_causal: bool) -> Bool[Tensor, "n 1 q l"]:
    """Return which positions each one sees: valid ones, and so that none sees nothing.

    Nothing to see would make NaN of a position; what a position that is not valid takes from
    elsewhere is of no consequence.
    """
    if not is_causal:
        return (mask | ~mask.any(1, keepdim=True))[:, None, None, :]
    length = mask.shape[1]
    itself = torch.eye(length, dtype=torch.bool, device=mask.device)
    earlier = torch.ones_like(itself).tril()
    return ((mask[:, None, :] & earlier) | itself)[:, None]


def _build_linear(
    num_in: int, num_out: int, norm: NormFactory, *, role: str, bias: bool
) -> nn.Module:
    """Build a linear layer; a norm of weights acts on its weight."""
    linear = nn.Linear(num_in, num_out, bias=bias)
    _set_xavier(linear)
    return norm.parametrize(linear, role=role)


def _set_xavier(linear: nn.Linear, gain: float = 1.0) -> None:
    """Let a linear layer start Xavier normal: variance 2 / (inputs + outputs)."""
    set_initial_std(linear, gain * math.sqrt(2.0 / (linear.in_features + linear.out_features)))


def _set_initial_sizes(
    attention: Attention, mlp: FeedForward, *, gain: float, end_gain: float
) -> None:
    """Let the weights of a block start as the placement asks.

    Args:
        attention: The block's attention.
        mlp: The block's feed-forward network.
        gain: Factor on feed-forward, value and output weights.
        end_gain: Factor on the last weights of each branch.
    """
    for linear, factor in (
        (attention.value, gain),
        (attention.out, gain * end_gain),
        (mlp.up, gain),
        (mlp.down, gain * end_gain),
    ):
        assert isinstance(linear, nn.Linear)
        _set_xavier(linear, factor)


@MODELS.register("transformer", CARD)
def build_transformer(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    norm: NormFactory,
    placement: str | None,
    tokens: TokenTask,
    depth: int = 4,
    width: int = 128,
    num_heads: int = 4,
    mlp_ratio: int = 4,
    activation: ActivationName = "gelu",
    positions: PositionsName = "learned",
    tie_embeddings: bool = False,
    bias: bool = True,
    mask_norms: bool = True,
    scale_residual_init: bool = False,
    layer_scale_init: float = DEFAULT_LAYER_SCALE_INIT,
) -> nn.Module:
    """Build a Transformer; without dropout, which would draw from a random state of its own.

    Norms stand in attention (role attention) and feed-forward branches (mlp), behind the last
    block (final) where its sum is not normalized, and on queries and keys where the role qk has
    a norm of its own. Weights start Xavier normal, token embeddings with variance 1 after their
    scale sqrt(width), the head with 1/width.

    Args:
        input_shape: One sample, ``(L,)``: the most positions of a text.
        num_classes: Number of labels, or of token ids.
        norm: What builds the norm layers; it must be defined for sequences.
        placement: Where they stand; see ``placements.py``.
        tokens: What the texts ask for: a causal language model or an encoder that classifies.
        depth: Blocks.
        width: Features of a position, a multiple of num_heads.
        num_heads: Heads of attention.
        mlp_ratio: Features inside of a feed-forward network, as a multiple of the width.
        activation: Of the feed-forward networks.
        positions: learned (embeddings) or rotary (rotated queries and keys).
        tie_embeddings: Whether the head has the weights of the token embedding; language models.
            Where a block starts near its shortcut, features then start out alike their own
            token's embedding and predict that token, so that the first loss is above ln(v).
        bias: Whether the linear layers of the blocks have one, whatever the norm.
        mask_norms: Whether norms that reduce over positions get the mask of valid ones.
        scale_residual_init: Whether the last weights of each branch start (2 * depth)^(-1/2)
            times smaller, as in GPT-2; not for deepnorm, which has sizes of its own.
        layer_scale_init: What the factors of placement layer_scale start at.

    Returns:
        A module from token ids ``[N, L]`` to logits ``[N, L, num_classes]`` of a language model,
        else ``[N, num_classes]``.

    Raises:
        UserError: If a size is not possible or options do not fit each other.

    Source:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3; pre: Xiong et al.,
        ICML 2020; scale_residual_init: Radford et al., "Language Models are Unsupervised
        Multitask Learners", 2019, section 2.3; norm of queries and keys: Henry et al., Findings
        of EMNLP 2020.
    """
    if placement not in CARD.placements:
        raise UserError("placement", placement, f"one of {', '.join(CARD.placements)} is needed")
    sizes = {"depth": depth, "width": width, "num_heads": num_heads, "mlp_ratio": mlp_ratio}
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"model.params.{name}", size, "1 or more is needed")
    if width % num_heads:
        expected = f"a divisor of the width {width} is needed"
        raise UserError("model.params.num_heads", num_heads, expected)
    if positions == "rotary" and (width // num_heads) % 2:
        expected = (
            f"pairs of features are rotated, and a head has {width // num_heads}: use learned"
        )
        raise UserError("model.params.positions", positions, expected)
    if tie_embeddings and not tokens.is_language_modeling:
        expected = "only a language model predicts what it embeds; false is needed"
        raise UserError("model.params.tie_embeddings", tie_embeddings, expected)
    if scale_residual_init and placement == "deepnorm":
        expected = "placement deepnorm has initial sizes of its own; false is needed"
        raise UserError("model.params.scale_residual_init", scale_residual_init, expected)
    if layer_scale_init != DEFAULT_LAYER_SCALE_INIT and placement != "layer_scale":
        expected = f"placement layer_scale is needed, not {placement}"
        raise UserError("model.params.layer_scale_init", layer_scale_init, expected)
    return Transformer(
        tokens.vocabulary_size,
        num_classes,
        input_shape[0],
        is_causal=tokens.is_language_modeling,
        has_padding=tokens.has_padding,
        norm=norm,
        placement=placement,
        depth=depth,
        width=width,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio,
        activation=activation,
        positions=positions,
        tie_embeddings=tie_embeddings,
        bias=bias,
        mask_norms=mask_norms,
        scale_residual_init=scale_residual_init,
        layer_scale_init=layer_scale_init,
    )
