"""Exact accounting: which samples an update takes, and where evaluations stand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normexp.data.batches import IndexStream, UpdatePlan, epoch_order


@st.composite
def plans(draw: st.DrawFn) -> UpdatePlan:
    micro = draw(st.integers(1, 6))
    steps = draw(st.integers(1, 4))
    num_train = draw(st.integers(micro * steps, 60))
    budget = draw(st.integers(1, 6 * num_train))
    most = math.ceil(budget / (micro * steps))
    return UpdatePlan(num_train, micro, steps, budget, draw(st.integers(1, most)))


SEEDS = st.integers(0, 2**63 - 1)


@given(plans())
def test_the_budget_is_reached_and_overshot_by_less_than_an_update(plan):
    size = plan.effective_batch_size
    assert size == plan.micro_batch_size * plan.accumulation_steps
    assert 0 <= plan.num_updates * size - plan.budget_samples < size


@given(plans())
def test_evaluations_stand_at_the_first_boundary_at_or_after_their_share(plan):
    updates = plan.evaluation_updates
    assert len(updates) == plan.num_evaluations
    assert updates[-1] == plan.num_updates
    assert list(updates) == sorted(set(updates)), "two evaluations at one update"
    for k, update in enumerate(updates, start=1):
        share = Fraction(k * plan.budget_samples, plan.num_evaluations)
        assert (update - 1) * plan.effective_batch_size < share
        assert share <= update * plan.effective_batch_size


@given(plans(), SEEDS)
def test_an_epoch_takes_whole_updates_of_disjoint_samples_and_drops_the_rest(plan, seed):
    rows = IndexStream(plan, seed).indices(0, plan.num_updates)
    assert rows.shape == (plan.num_updates, plan.effective_batch_size)
    per_epoch = plan.updates_per_epoch
    dropped = 0
    for first in range(0, plan.num_updates, per_epoch):
        taken = rows[first : first + per_epoch].reshape(-1)
        assert len(set(taken.tolist())) == len(taken)
        assert set(taken.tolist()) <= set(range(plan.num_train))
        if first + per_epoch <= plan.num_updates:
            dropped += plan.num_train - len(taken)
    assert plan.dropped_samples == dropped
    assert 0 <= plan.dropped_per_epoch < plan.effective_batch_size


@given(plans(), SEEDS, st.data())
def test_updates_are_the_same_from_wherever_a_run_resumes(plan, seed, data):
    whole = IndexStream(plan, seed).indices(0, plan.num_updates)
    first = data.draw(st.integers(0, plan.num_updates - 1))
    count = data.draw(st.integers(1, plan.num_updates - first))
    stream = IndexStream(plan, seed)
    np.testing.assert_array_equal(stream.indices(first, count), whole[first : first + count])
    # The remembered order must not leak into an earlier epoch.
    np.testing.assert_array_equal(stream.indices(0, 1), whole[:1])


@given(SEEDS, st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]))
def test_the_split_into_micro_batches_leaves_the_order_as_it_is(seed, split):
    whole = UpdatePlan(30, 8, 1, 90, 3)
    parts = UpdatePlan(30, *split, 90, 3)
    assert parts.evaluation_updates == whole.evaluation_updates
    np.testing.assert_array_equal(
        IndexStream(parts, seed).indices(0, 12), IndexStream(whole, seed).indices(0, 12)
    )


@given(SEEDS, st.integers(0, 9))
def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch_alone(seed, epoch):
    order = epoch_order(seed, epoch, 50)
    assert sorted(order.tolist()) == list(range(50))
    np.testing.assert_array_equal(order, epoch_order(seed, epoch, 50))
    # 50! orders: a repeat by chance does not happen.
    assert not np.array_equal(order, epoch_order(seed + 1, epoch, 50))
    assert not np.array_equal(order, epoch_order(seed, epoch + 1, 50))


@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("steps", [1, 4])
def test_two_epochs_of_a_thousand_by_hand(micro, steps):
    # R38: samples consumed equal the budget within one update, whatever the batch.
    plan = UpdatePlan(1000, micro, steps, 2000, 8)
    assert plan.num_updates == -(-2000 // (micro * steps))
    # ceil(250 k / effective batch), with whole numbers only.
    assert plan.evaluation_updates == tuple(-(-250 * k // (micro * steps)) for k in range(1, 9))


def test_what_is_left_of_an_epoch_is_dropped_and_counted():
    # R1: 9 samples at micro-batch 4 leave one; no update ever sees a batch of one.
    plan = UpdatePlan(9, 4, 1, 27, 1)
    assert (plan.updates_per_epoch, plan.dropped_per_epoch) == (2, 1)
    assert plan.num_updates == 7
    assert plan.dropped_samples == 3
