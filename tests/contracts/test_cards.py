"""Every norm of the registry through every check of the contract suite."""

from __future__ import annotations

import dataclasses

import pytest
from contract_subjects import subject_of
from torch import nn

from normexp.contract import CHECKS, Check, check_norm, run_check
from normexp.contract._checks import DoesNotApply
from normexp.norms import NORMS, check_dims


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("norm", NORMS.names())
def test_experiments_confirm_the_card(norm, check):
    outcome = run_check(CHECKS[check], subject_of(norm))
    assert outcome.verdict != "fault", "; ".join(outcome.messages)


def test_checks_say_what_they_prove():
    assert all(check.proves.endswith(".") for check in CHECKS.values())
    assert all(name == check.name for name, check in CHECKS.items())


def test_check_norm_gathers_the_faults_of_all_checks():
    entry = NORMS.get("no_norm")
    assert check_norm(entry) == []
    false = dataclasses.replace(entry.card, divisor="M", source="")
    assert [fault.check for fault in check_norm(dataclasses.replace(entry, card=false))] == [
        "well_formed",
        "divisor",
    ]


def test_a_layer_that_raises_is_a_fault_and_not_an_end():
    def build(num_features: int, *, dims: int) -> nn.Module:
        check_dims("raises", dims, supported=(0, 2), instead="features")
        return nn.Conv1d(1, 1, 1)

    entry = dataclasses.replace(NORMS.get("no_norm"), name="raises", build=build)
    faults = check_norm(entry)
    assert {fault.check for fault in faults} == {"dims"}
    assert "ends in RuntimeError" in faults[0].message


def test_what_was_found_counts_where_an_experiment_ends_early():
    def experiment(subject):
        yield "a fault"
        raise DoesNotApply("nothing more to try")

    check = Check("early", "It ends.", (), experiment)
    outcome = run_check(check, subject_of("no_norm"))
    assert (outcome.verdict, outcome.messages) == ("fault", ("a fault",))
