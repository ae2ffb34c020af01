"""A false word on a card is found, whichever field and norm, and the message names the field."""

from __future__ import annotations

import dataclasses

import pytest
from contract_subjects import subject_of

from normexp.contract import CHECKS, Subject, run_check
from normexp.norms import NORMS, NormCard, WeightCard

OTHER_DIVISOR = {None: "M", "M": "M-1", "M-1": "M"}
OTHER_KERNEL = {"none": "composite", "composite": "fused", "fused": "composite"}


def other_eps_place(place):
    return "outside_sqrt" if place == "inside_sqrt" else "inside_sqrt"


def other_parameters(parameters):
    if not parameters:
        return {"weight": ("C",)}
    first, *_ = parameters
    return {**parameters, first: ("3", "7")}


def fewer_dims(card):
    if len(card.dims) == 1:
        return {"dims": (0, 1, 2), "statistic_sets": dict.fromkeys((0, 1, 2), ())}
    kept = card.dims[:-1]
    return {"dims": kept, "statistic_sets": {dims: card.statistic_sets[dims] for dims in kept}}


def other_sets(card):
    wrong = {
        dims: (("batch",),) if sets == (("channel",),) else (("channel",),)
        for dims, sets in card.statistic_sets.items()
    }
    return {"statistic_sets": wrong}


def flip(name):
    return lambda card: {name: not getattr(card, name)}


# How to make each field false.
FALSE_CARDS = {
    "formula": lambda card: {"formula": " "},
    "source": lambda card: {"source": ""},
    "dims": fewer_dims,
    "statistic_sets": other_sets,
    "is_centring": flip("is_centring"),
    "divisor": lambda card: {"divisor": OTHER_DIVISOR[card.divisor]},
    "eps_place": lambda card: {"eps_place": other_eps_place(card.eps_place)},
    "mixes_samples": flip("mixes_samples"),
    "mixes_positions": flip("mixes_positions"),
    "is_same_in_eval": flip("is_same_in_eval"),
    "is_shift_invariant": flip("is_shift_invariant"),
    "is_scale_invariant": flip("is_scale_invariant"),
    "state": lambda card: {"state": () if card.state else ("running_mean",)},
    "parameters": lambda card: {"parameters": other_parameters(card.parameters)},
    "single_value": lambda card: {
        "single_value": "zero" if card.single_value in (None, "finite", "sign") else "finite"
    },
    "takes_mask": flip("takes_mask"),
    "keeps_channels_last": flip("keeps_channels_last"),
    "kernel": lambda card: {"kernel": ""},
    "kernel_cpu": lambda card: {"kernel_cpu": OTHER_KERNEL[card.kernel_cpu]},
    # Without such a device only this much can be told.
    "kernel_cuda": lambda card: {"kernel_cuda": "fused" if card.kernel_cuda == "none" else "none"},
    "includes_activation": flip("includes_activation"),
    "takes_condition": flip("takes_condition"),
    "has_exact_gradient": flip("has_exact_gradient"),
    "is_vectorizable": flip("is_vectorizable"),
    "is_chained": flip("is_chained"),
    "is_experimental": lambda card: {"is_experimental": "perhaps"},  # a label, true or false
    "plain_at": lambda card: {"plain_at": {} if card.plain_at else {"no_such_parameter": 0.0}},
    "weight": lambda card: {
        "weight": card.weight and dataclasses.replace(card.weight, divisor="M-1", formula="")
    },
}

FALSE_WEIGHT_CARDS = {
    "formula": lambda card: {"formula": ""},
    "is_centring": flip("is_centring"),
    "is_scale_invariant": flip("is_scale_invariant"),
    "divisor": lambda card: {"divisor": OTHER_DIVISOR[card.divisor]},
    "eps_place": lambda card: {"eps_place": other_eps_place(card.eps_place)},
    "parameters": lambda card: {"parameters": {**card.parameters, "scale": ("O",)}},
    "parametrize": lambda card: {"parametrize": lambda module, **_: module},
}

WEIGHT_NORMS = [entry.name for entry in NORMS if entry.card.weight is not None]


def find_faults(name, card, field):
    """Return the messages of the checks about a field, with that card instead of the true one."""
    entry = NORMS.get(name)
    subject = Subject(dataclasses.replace(entry, card=card))
    if card.plain_at == entry.card.plain_at:
        subject.known = subject_of(name).known  # patterns depend on nothing else of the card
    checks = [check for check in CHECKS.values() if field in check.fields]
    assert checks, f"no check is about {field}"
    outcomes = [run_check(check, subject) for check in checks]
    return [m for outcome in outcomes if outcome.verdict == "fault" for m in outcome.messages]


def test_every_field_has_a_false_version():
    assert set(FALSE_CARDS) == {field.name for field in dataclasses.fields(NormCard)}
    assert set(FALSE_WEIGHT_CARDS) == {field.name for field in dataclasses.fields(WeightCard)}


@pytest.mark.parametrize("field", FALSE_CARDS)
@pytest.mark.parametrize("norm", NORMS.names())
def test_a_false_field_is_found(norm, field):
    card = NORMS.get(norm).card
    false = dataclasses.replace(card, **FALSE_CARDS[field](card))
    if false == card:
        pytest.skip("says nothing about weights")
    faults = find_faults(norm, false, field)
    assert [message for message in faults if field in message], faults


def false_nested_sets(norm):
    """Return sets that give the same pattern of dependence: one more or one less, inside others."""
    card = NORMS.get(norm).card
    if card.is_chained:
        return
    for dims, sets in card.statistic_sets.items():
        parts = {(axis,) for axes in sets if len(axes) > 1 for axis in axes} - set(sets)
        others = [(*sets, part) for part in sorted(parts)]
        if len(sets) > 1:
            others += [tuple(kept for kept in sets if kept != left) for left in sets]
        yield from ((dims, other) for other in others)


NESTED = [(norm, *false) for norm in NORMS.names() for false in false_nested_sets(norm)]


@pytest.mark.parametrize(("norm", "dims", "sets"), NESTED)
def test_a_statistic_inside_of_another_is_found(norm, dims, sets):
    card = NORMS.get(norm).card
    false = dataclasses.replace(card, statistic_sets={**card.statistic_sets, dims: sets})
    faults = find_faults(norm, false, "statistic_sets")
    assert [message for message in faults if "statistic_sets" in message], faults


@pytest.mark.parametrize("field", FALSE_WEIGHT_CARDS)
@pytest.mark.parametrize("norm", WEIGHT_NORMS)
def test_a_false_field_about_weights_is_found(norm, field):
    card = NORMS.get(norm).card
    weight = dataclasses.replace(card.weight, **FALSE_WEIGHT_CARDS[field](card.weight))
    about = "weight" if field == "formula" else f"weight.{field}"
    faults = find_faults(norm, dataclasses.replace(card, weight=weight), about)
    assert [message for message in faults if f"weight.{field}" in message], faults
