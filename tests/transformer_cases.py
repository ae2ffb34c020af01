"""What tests of the Transformer share: small models of any norm and placement, and their inputs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from normexp.data import PAD_ID, TokenTask
from normexp.models import MODELS, PLACEMENTS, build_model, initialize
from normexp.norms import NORMS, NormFactory

SIZES = {"depth": 2, "width": 8, "num_heads": 2, "mlp_ratio": 2}
# What the defaults of some norms do not divide.
FITTING = {"num_groups": 2, "fraction": 0.5, "ghost_size": 2}
VOCABULARY_SIZE = 11
NUM_CLASSES = 3

# Refused: without an activation right behind them they are gain and shift alone.
WITHOUT_EFFECT = ("evo_norm_b0", "evo_norm_s0")
NORM_NAMES = [
    entry.name
    for entry in NORMS
    if 1 in entry.card.dims and not entry.card.takes_condition and entry.name not in WITHOUT_EFFECT
]
PLACEMENT_NAMES = list(MODELS.get("transformer").card.placements)


def is_admitted(norm, placement):
    """Tell whether a norm has a place there."""
    card, chosen = NORMS.get(norm).card, PLACEMENTS[placement]
    if norm == "no_norm":
        return True
    if chosen.sets_weight_scale and card.weight is not None:
        return False
    return chosen.has_norm_layers or (
        card.weight is not None and not any(card.statistic_sets.values())
    )


# Every norm at every placement that has it; and of each norm two, all placements in turn.
CROSS = [pair for pair in itertools.product(NORM_NAMES, PLACEMENT_NAMES) if is_admitted(*pair)]
SPREAD = []
for number, name in enumerate(NORM_NAMES):
    admitted = [placement for norm, placement in CROSS if norm == name]
    SPREAD += [(name, admitted[(number + step) % len(admitted)]) for step in (0, 4)]


def mixes_positions(norm):
    """Tell whether a norm's card says that positions of a sequence see each other."""
    return NORMS.get(norm).card.mixes_positions


def fit(norm, **params):
    """Return a norm's options for few channels and samples."""
    return {k: v for k, v in FITTING.items() if k in NORMS.get(norm).parameters()} | params


def build(
    norm="layer_norm",
    placement="pre",
    *,
    is_causal=True,
    has_padding=None,
    length=8,
    norm_params=None,
    roles=None,
    seed=0,
    dtype=torch.float64,
    **params,
):
    """Return a small model, initialised; a causal one of full texts, else of padded ones."""
    model = build_model(
        "transformer",
        SIZES | params,
        input_shape=(length,),
        num_classes=VOCABULARY_SIZE if is_causal else NUM_CLASSES,
        norm=NormFactory(norm, fit(norm, **(norm_params or {})), roles or {}),
        placement=placement,
        tokens=TokenTask(
            VOCABULARY_SIZE,
            is_language_modeling=is_causal,
            has_padding=not is_causal if has_padding is None else has_padding,
        ),
    )
    initialize(model, seed)
    return model.to(dtype)


def stir(model, seed=0):
    """Move every parameter away from where it starts, so that no gain is 1 and no bias 0."""
    rng = np.random.default_rng([seed, 2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.from_numpy(np.asarray(rng.uniform(-0.4, 0.4, parameter.shape))))
    return model


def draw_tokens(num_texts=4, length=8, seed=0):
    """Return token ids of full texts; none is padding."""
    ids = np.random.default_rng(seed).integers(1, VOCABULARY_SIZE, (num_texts, length))
    return torch.from_numpy(ids)


def pad(texts, length):
    """Return texts (lists of ids) as one array of that length."""
    out = torch.full((len(texts), length), PAD_ID)
    for row, text in zip(out, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int64)
    return out


def normalize_by_hand(layer, x):
    """Return layer_norm's formula."""
    mean = x.mean(-1, keepdim=True)
    var = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt() * layer.weight + layer.bias


def attend_by_hand(attention, x, sees):
    """Return multi-head attention, one head and one text after the other.

    Args:
        attention: The model's layer.
        x: Sequences ``[n, l, d]``.
        sees: Which positions each one sees, ``[n, l, l]``.
    """
    size = x.shape[-1] // attention.num_heads
    parts = []
    for head in range(attention.num_heads):
        rows = slice(head * size, (head + 1) * size)
        q, k, v = (
            x @ layer.weight[rows].T + layer.bias[rows]
            for layer in (attention.query, attention.key, attention.value)
        )
        scores = torch.where(sees, q @ k.transpose(1, 2) / math.sqrt(size), -math.inf)
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        parts.append(shares / shares.sum(-1, keepdim=True) @ v)
    return torch.cat(parts, -1) @ attention.out.weight.T + attention.out.bias
