from __future__ import annotations

import math

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results
from normexp.analysis.cost import (
    aggregate_memory,
    aggregate_timing,
    conditions_text,
    show_memory,
    show_timing,
)


def test_what_follows_from_an_update_of_4_ms(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa", update_ms=4.0)
    row = aggregate_timing(load_results(two_norms.path)).iloc[0]
    assert row["norm"] == "batch_norm"
    assert (row["update_ms_median"], row["update_ms_q25"], row["update_ms_q75"]) == (4, 3, 5)
    # 8 samples in 4 ms; 100 updates of 4 ms.
    assert row["samples_per_s"] == pytest.approx(2000.0, rel=1e-15)
    assert row["train_s_estimated"] == pytest.approx(0.4, rel=1e-15)
    assert show_timing(row)["update (ms)"] == "4 [3, 5]"
    assert show_timing(row)["samples/s"] == "2,000"


def test_without_a_completed_run_training_time_is_not_guessed(
    two_norms: ExperimentFolder,
) -> None:
    for seed in range(3):
        two_norms.add_run("batch_norm-aaaaaaaa", seed, None, status="diverged", updates=10 + seed)
    two_norms.add_cost("batch_norm-aaaaaaaa")
    row = aggregate_timing(load_results(two_norms.path)).iloc[0]
    assert math.isnan(row["train_s_estimated"])
    assert show_timing(row)["training (s, estimated)"] == "-"


def test_bytes_and_mebibytes_agree(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa")
    row = aggregate_memory(load_results(two_norms.path)).iloc[0]
    assert row["saved_for_backward_bytes"] == 3 * 2**20
    assert row["saved_for_backward_mib"] == 3.0
    assert row["parameter_mib"] == 4936 / 2**20
    assert math.isnan(row["peak_allocated_mib"])
    assert show_memory(row)["peak allocated (MiB)"] == "-"


def test_conditions_that_differ_are_marked(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa", memory_format="contiguous")
    two_norms.add_cost("group_norm-aaaaaaaa", memory_format="channels_last")
    text = conditions_text(load_results(two_norms.path))
    assert "MIXED, so rows do not compare: memory_format (channels_last | contiguous)." in text
    assert "measured_at" not in text
    assert "num_threads 1" in text
