"""Later tokens never change earlier logits, for every admitted norm and placement; others do."""

from __future__ import annotations

import copy

import pytest
import torch
from transformer_cases import (
    CROSS,
    NORM_NAMES,
    SPREAD,
    build,
    draw_tokens,
    fit,
    mixes_positions,
    stir,
)

from normexp.errors import UserError
from normexp.norms import describe_norm_layers
from normexp.training.positions import check_causality, find_leak

LENGTH = 8
CAUSAL = [pair for pair in CROSS if not mixes_positions(pair[0])]
LEAKING = [pair for pair in CROSS if mixes_positions(pair[0])]
# What a leak moves logits of size 1 by, at least, when later tokens change.
VISIBLE = 1e-3
ROLES = ("attention", "mlp", "final", "qk")


def measure_leak(model):
    """Return how far logits move when later tokens change, and how they depend on these.

    Returns:
        The largest change of a logit at or before a position when all tokens behind it are others;
        the largest derivative of such a logit by an embedding of a later token.
    """
    tokens = draw_tokens(4, LENGTH)
    other = (tokens + 3) % 11

    def run(tokens):
        # A copy, since a pass in training may move running statistics that the next one takes.
        return copy.deepcopy(model)(tokens)

    changes, slopes = [], []
    for position in (0, LENGTH - 2):
        later = torch.arange(LENGTH) > position
        mixed = torch.where(later, other, tokens)
        assert (mixed != tokens)[:, later].all()
        change = (run(mixed) - run(tokens))[:, : position + 1]
        changes.append(change.abs().max().item())

        kept, twin = [], copy.deepcopy(model)
        twin.token_embedding.register_forward_hook(
            lambda *call, kept=kept: (kept.append(call[2]), call[2].retain_grad())[1]
        )
        # A sum of squares: the sum of what layer_norm returns is a constant.
        twin(tokens)[:, : position + 1].square().sum().backward()
        slopes.append(kept[0].grad[:, position + 1 :].abs().max().item())
        assert kept[0].grad[:, : position + 1].abs().amax((0, 2)).min() > 0
    return max(changes), max(slopes)


def check(model):
    """Check a model as it is before training; return the layer that is refused."""
    layers = describe_norm_layers(model, (LENGTH,), 4)
    check_causality(layers, model)
    return find_leak(layers, model)


@pytest.mark.parametrize(("norm", "placement"), CAUSAL)
def test_later_tokens_change_no_earlier_logit(norm, placement):
    model = stir(build(norm, placement, length=LENGTH))
    assert check(model) is None
    assert measure_leak(model) == (0, 0)


@pytest.mark.parametrize(("norm", "placement"), [pair for pair in CAUSAL if pair in SPREAD])
def test_nor_do_they_in_evaluation(norm, placement):
    assert measure_leak(stir(build(norm, placement, length=LENGTH)).eval()) == (0, 0)


@pytest.mark.parametrize("norm", sorted({norm for norm, _ in CAUSAL}))
def test_nor_do_they_with_rotary_positions_and_norms_of_queries_and_keys(norm):
    roles = {"qk": {"name": norm, "params": fit(norm)}}
    model = stir(build(roles=roles, positions="rotary", length=LENGTH))
    assert check(model) is None
    assert measure_leak(model) == (0, 0)


def check_refusal(norm, placement):
    """Raise unless a pair is refused in one line that says why, and leaks in training."""
    model = stir(build(norm, placement, length=LENGTH))
    with pytest.raises(UserError) as refused:
        check(model)
    assert str(refused.value).startswith(f"norm={norm}: layer blocks.0.attention.norm_")
    assert "would see the tokens that it is to predict" in str(refused.value)
    assert "allow_leak=true" in str(refused.value)
    assert "\n" not in str(refused.value)
    change, slope = measure_leak(model)
    assert change > VISIBLE
    assert slope > VISIBLE
    # The same norms in a model that sees all positions anyway are nothing to refuse.
    assert check(build(norm, placement, is_causal=False, length=LENGTH)) is None


@pytest.mark.parametrize(("norm", "placement"), [pair for pair in LEAKING if pair in SPREAD])
def test_what_leaks_is_refused_and_does_leak(norm, placement):
    check_refusal(norm, placement)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "placement"), [pair for pair in LEAKING if pair not in SPREAD])
def test_what_leaks_is_refused_and_does_leak_at_any_placement(norm, placement):
    check_refusal(norm, placement)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("norm", [norm for norm in NORM_NAMES if mixes_positions(norm)])
def test_one_leaking_role_is_enough(norm, role):
    model = build(roles={role: {"name": norm, "params": fit(norm)}}, length=LENGTH)
    with pytest.raises(UserError, match=rf"^norm\.roles\.{role}={norm}: layer [^\n]+$") as refused:
        check(stir(model))
    path = {
        "attention": "blocks.0.attention.norm_before",
        "mlp": "blocks.0.mlp.norm_before",
        "final": "final_norm",
        "qk": "blocks.0.attention.branch.query_norm",
    }[role]
    assert f"layer {path} " in str(refused.value)
    assert measure_leak(model)[0] > VISIBLE


@pytest.mark.parametrize(
    ("norm", "params", "leaks"),
    [
        ("frozen_batch_norm", {"freeze_after_micro_batches": 0}, False),
        ("frozen_batch_norm", {"freeze_after_micro_batches": 5}, True),
        ("power_norm", {"warmup_micro_batches": 5}, True),
        ("instance_norm", {"track_running_stats": True}, True),
    ],
)
def test_options_that_decide_about_a_leak(norm, params, leaks):
    model = stir(build(norm, "post", norm_params=params, length=LENGTH))
    if leaks:
        with pytest.raises(UserError, match=rf"^norm={norm}: "):
            check(model)
        assert measure_leak(model)[0] > VISIBLE
    else:
        assert check(model) is None
        assert measure_leak(model) == (0, 0)


def test_an_encoder_does_see_later_tokens():
    model = stir(build(is_causal=False, has_padding=False, length=LENGTH))
    kept = []
    model.blocks[0].register_forward_hook(lambda *call: kept.append(call[2]))
    tokens = draw_tokens(4, LENGTH)
    model(tokens)
    model(torch.cat([tokens[:, :-1], (tokens[:, -1:] + 3) % 11], 1))
    assert (kept[0] - kept[1])[:, 0].abs().max() > VISIBLE
