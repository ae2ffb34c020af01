"""Padding changes nothing where norms are of single positions or take the mask; else it does."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_cases import (
    CROSS,
    NUM_CLASSES,
    SPREAD,
    VOCABULARY_SIZE,
    build,
    draw_tokens,
    fit,
    mixes_positions,
    pad,
    stir,
)

from normexp.data import PAD_ID
from normexp.norms import NORMS

TEXTS = [[3, 4, 5, 6, 7], [8, 2, 9], [5, 5, 1, 9, 10, 3], [4]]
TARGETS = torch.tensor([0, 1, 2, 0])
# What a norm that sees padding moves logits of size 1 by, at least.
VISIBLE = 1e-3


def is_safe(norm):
    """Tell whether padding may have no influence: single positions, or the mask is taken."""
    return not mixes_positions(norm) or NORMS.get(norm).card.takes_mask


SAFE = [pair for pair in SPREAD if is_safe(pair[0])]
SAFE_CROSS = [pair for pair in CROSS if is_safe(pair[0])]
UNSAFE = [pair for pair in CROSS if mixes_positions(pair[0])]


def fill(tokens, mask, seed):
    """Return the tokens with others at positions that are not valid."""
    generator = torch.Generator().manual_seed(seed)
    other = torch.randint(1, VOCABULARY_SIZE, tokens.shape, generator=generator)
    return torch.where(mask, tokens, other)


class Outcome(NamedTuple):
    """What a pass gives: logits, gradients of the summed loss, and buffers, each by name."""

    logits: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run(model, tokens, mask=None):
    """Return the outcome of a forward and a backward pass of a copy."""
    model = copy.deepcopy(model)
    logits = model(tokens, mask)
    F.cross_entropy(logits, TARGETS[: len(tokens)], reduction="sum").backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return Outcome({"logits": logits.detach()}, gradients, dict(model.named_buffers()))


def assert_equal(one, other):
    """Raise unless two outcomes are the same to the last bit."""
    for values, others in zip(one, other, strict=True):
        assert values.keys() == others.keys()
        assert all(torch.equal(values[name], others[name]) for name in values)


def check_content(norm, placement, **options):
    """Raise unless what stands at padding changes logits, gradients and buffers by exactly 0."""
    model = stir(build(norm, placement, is_causal=False, **options))
    model(pad([[3, 4, 5], [6]], 8))  # running statistics of their own
    tokens = pad(TEXTS, 8)
    mask = tokens != PAD_ID
    for mode in (True, False):
        model.train(mode)
        expected = run(model, tokens)
        for seed in (0, 1):
            assert_equal(run(model, fill(tokens, mask, seed), mask), expected)


def check_length(norm, placement, dtype, **options):
    """Raise unless padding to 20 and to 200 give the same loss, gradients and buffers.

    To 1e-12 in float64 and 1e-6 in float32 of the largest gradient, if that is above 1: small ones
    come of sums of large terms. A statistic that 13 tokens hardly determine spoils more digits of
    float32 than that, whatever the length: then what counts is what it spoils at one length.
    """
    model = build(norm, placement, is_causal=False, length=200, **options)
    model = stir(model).to(dtype)
    for mode in (True, False):
        model.train(mode)
        short, long = (run(model, pad(TEXTS, length)) for length in (20, 200))
        exact = run(copy.deepcopy(model).double(), pad(TEXTS, 20))
        for kind in ("logits", "gradients", "buffers"):
            one, other, wide = (getattr(part, kind) for part in (short, long, exact))
            size = max([1.0, *(value.abs().max().item() for value in one.values())])
            spoilt = max([0.0, *((one[n] - wide[n]).abs().max().item() for n in one)])
            tolerance = size * 1e-12 if dtype == torch.float64 else max(size * 1e-6, 2 * spoilt)
            for name, value in one.items():
                error = (other[name] - value).abs().max().item()
                assert error <= tolerance, (mode, name, error, tolerance)


@pytest.mark.parametrize(("norm", "placement"), SAFE)
def test_content_of_padding_changes_nothing(norm, placement):
    check_content(norm, placement)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "placement"), sorted(set(SAFE_CROSS) - set(SAFE)))
def test_content_of_padding_changes_nothing_at_any_placement(norm, placement):
    check_content(norm, placement)


@pytest.mark.parametrize("number", range(len(SAFE)), ids=["-".join(pair) for pair in SAFE])
def test_length_of_padding_changes_nothing(number):
    norm, placement = SAFE[number]
    check_length(norm, placement, torch.float64)
    positions = "rotary" if number % 2 else "learned"
    check_length(norm, placement, torch.float32, positions=positions)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("norm", "placement"), SAFE_CROSS)
def test_length_of_padding_changes_nothing_at_any_placement(norm, placement, dtype, positions):
    check_length(norm, placement, dtype, positions=positions)


@pytest.mark.parametrize(
    "norm", sorted({norm for norm, _ in SAFE if NORMS.get(norm).card.takes_mask})
)
def test_nor_does_padding_where_queries_and_keys_have_a_norm_with_the_mask(norm):
    options = {"roles": {"qk": {"name": norm, "params": fit(norm)}}, "positions": "rotary"}
    check_content("layer_norm", "pre", **options)
    check_length("layer_norm", "pre", torch.float64, **options)


@pytest.mark.parametrize(("norm", "placement"), UNSAFE)
def test_a_norm_over_positions_without_the_mask_sees_padding(norm, placement):
    model = stir(build(norm, placement, is_causal=False, mask_norms=False))
    tokens = pad(TEXTS, 8)
    mask = tokens != PAD_ID
    one, other = (model(fill(tokens, mask, seed), mask) for seed in (0, 1))
    assert (one - other).abs().max() > VISIBLE
    # Its length too, which needs no other content than padding.
    longer = (
        model(pad(TEXTS, 8)),
        stir(build(norm, placement, is_causal=False, mask_norms=False, length=8))(pad(TEXTS, 6)),
    )
    assert (longer[0] - longer[1]).abs().max() > VISIBLE


@pytest.mark.parametrize("norm", ["layer_norm", "no_norm", "rms_norm", "frozen_batch_norm"])
def test_norms_of_single_positions_need_no_mask(norm):
    with_mask, without = (
        stir(build(norm, "pre", is_causal=False, mask_norms=masked)) for masked in (True, False)
    )
    assert torch.equal(with_mask(pad(TEXTS, 8)), without(pad(TEXTS, 8)))


@pytest.mark.parametrize("roles", ["qk", "attention", "mlp", "final"])
def test_one_role_without_a_mask_is_enough_to_see_padding(roles):
    # spectral_band_norm takes no mask; all others are of single positions.
    changes = []
    for norm in ("spectral_band_norm", "scale_norm"):
        model = stir(build(is_causal=False, roles={roles: {"name": norm}}))
        tokens = pad(TEXTS, 8)
        mask = tokens != PAD_ID
        changes.append((model(tokens) - model(fill(tokens, mask, 0), mask)).abs().max().item())
    assert changes[0] > VISIBLE
    assert changes[1] == 0


@pytest.mark.parametrize(("norm", "placement"), SAFE)
def test_texts_of_no_and_of_one_token_are_defined(norm, placement):
    model = stir(build(norm, placement, is_causal=False))
    for texts in (
        [[3, 4, 5], [], [6], [7, 7]],
        [[], [], [], []],
        [[3], [4], [5], [6]],
        [[3]],
        [[]],
    ):
        for length in (1, 8) if max(map(len, texts)) < 2 else (8,):
            for mode in (True, False):
                model.train(mode)
                outcome = run(model, pad(texts, length))
                logits = outcome.logits["logits"]
                assert logits.shape == (len(texts), NUM_CLASSES)
                for values in outcome:
                    assert all(value.isfinite().all() for value in values.values())
                for row, text in zip(logits, texts, strict=True):
                    if not text:
                        # No position, so the mean is zero.
                        assert torch.equal(row, model.head.bias)


@pytest.mark.parametrize("norm", sorted({norm for norm, _ in SAFE}))
def test_empty_texts_alone_leave_statistics_and_blocks_as_they_are(norm):
    placement = next(placement for name, placement in SAFE if name == norm)
    model = stir(build(norm, placement, is_causal=False))
    before = copy.deepcopy(dict(model.named_buffers()))
    outcome = run(model, pad([[], [], [], []], 8))
    after, gradients = outcome.buffers, outcome.gradients
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = {name for name, gradient in gradients.items() if gradient.any()}
    assert moved == {"head.bias"}


@pytest.mark.parametrize("norm", sorted({norm for norm, _ in SAFE}))
def test_an_empty_text_leaves_its_batch_mates_alone(norm):
    # Norms over the batch too: it has no position that could enter their statistics.
    placement = next(placement for name, placement in SAFE if name == norm)
    model = stir(build(norm, placement, is_causal=False))
    # A ghost of ghost_batch_norm is the first two texts here.
    with_empty, without = [[3, 4], [5], [], []], [[3, 4], [5]]
    found, expected = run(model, pad(with_empty, 8)), run(model, pad(without, 8))
    rows = [bool(text) for text in with_empty]
    logits, alone = found.logits["logits"][rows], expected.logits["logits"]
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-12)
    for name, value in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], value, rtol=0, atol=1e-12)


def test_a_padded_causal_model_takes_each_text_as_it_is_alone():
    # No data set of ours asks for it; the model is defined for it all the same.
    model = stir(build(has_padding=True))
    texts = [*TEXTS, []]
    logits = model(pad(texts, 8))
    assert logits.isfinite().all()
    for row, text in zip(logits, texts, strict=True):
        if text:
            alone = model(torch.tensor([text]))[0]
            torch.testing.assert_close(row[: len(text)], alone, rtol=0, atol=1e-12)


def test_full_texts_need_no_mask():
    with_mask, without = (
        stir(build("batch_norm", "post", is_causal=False, has_padding=has)) for has in (True, False)
    )
    tokens = draw_tokens()
    torch.testing.assert_close(without(tokens), with_mask(tokens), rtol=0, atol=1e-12)
