from __future__ import annotations

import json
import math

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results, write_report
from normexp.analysis.cost import (
    aggregate_memory,
    aggregate_timing,
    conditions_text,
    memory_caption,
    show_memory,
    show_timing,
    timing_caption,
    warn_of_company,
)
from normexp.analysis.tables import cost_table


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


def test_times_beside_other_processes_are_marked(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa", foreign_cpu_share=0.374, is_alone=False)
    two_norms.add_cost("group_norm-aaaaaaaa", foreign_cpu_share=0.01, is_alone=True)
    results = load_results(two_norms.path)
    table = cost_table(results, "timing")
    notes = [row[table.headers.index("notes")] for row in table.rows]
    assert notes == ["not alone: other processes used 37% of the cores", ""]
    assert "not always with nothing else running (see the notes)" in table.caption
    assert table.frame["conditions.foreign_cpu_share"].tolist() == [0.374, 0.01]
    warning = warn_of_company(results)
    assert warning.startswith("Time was not measured alone in 1 of 2 measured cells")
    assert "(up to 37% of the cores)" in warning
    write_report(two_norms.path)
    assert f"- **Note.** {warning}" in (two_norms.path / "REPORT.md").read_text()


def test_a_load_that_is_not_known_is_no_number(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa", foreign_cpu_share=None, is_alone=False)
    results = load_results(two_norms.path)
    note = show_timing(aggregate_timing(results).iloc[0])["notes"]
    assert note == "not alone: how much other processes used is not known"
    assert "% of the cores" not in warn_of_company(results)


def test_a_measurement_alone_claims_what_was_found(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa", foreign_cpu_share=0.03, is_alone=True)
    two_norms.add_cost("group_norm-aaaaaaaa", foreign_cpu_share=0.01, is_alone=True)
    results = load_results(two_norms.path)
    assert "with nothing else running (other processes used at most 3%" in timing_caption(results)
    # A share is never twice the same, and that is no other condition.
    assert "MIXED" not in timing_caption(results)
    assert warn_of_company(results) == ""


def test_nothing_is_claimed_where_the_system_does_not_tell(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa", foreign_cpu_share=None, is_alone=None)
    results = load_results(two_norms.path)
    assert "whether anything else ran beside it is not known" in timing_caption(results)
    assert "with nothing else running" not in timing_caption(results)
    assert warn_of_company(results) == ""


def test_records_without_the_newer_conditions_load(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa")
    path = two_norms.path / "runs" / "batch_norm-aaaaaaaa" / "cost.json"
    cost = json.loads(path.read_text())
    del cost["conditions"]["is_alone"]
    path.write_text(json.dumps(cost))
    results = load_results(two_norms.path)
    assert cost_table(results, "timing").rows[0][-1] == ""
    assert "is not known" in timing_caption(results)
    assert warn_of_company(results) == ""
    # Beside a newer record, an older one neither accuses nor hides the other.
    two_norms.add_cost("group_norm-aaaaaaaa", foreign_cpu_share=0.5, is_alone=False)
    rows = cost_table(load_results(two_norms.path), "timing").rows
    assert [row[-1] for row in rows] == ["", "not alone: other processes used 50% of the cores"]


def test_whether_algorithms_were_deterministic_is_a_condition(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa", is_deterministic=True)
    assert "is_deterministic true" in timing_caption(load_results(two_norms.path))
    two_norms.add_cost("group_norm-aaaaaaaa", is_deterministic=False)
    results = load_results(two_norms.path)
    assert "MIXED, so rows do not compare: is_deterministic (false | true)." in memory_caption(
        results
    )
    assert aggregate_memory(results)["conditions.is_deterministic"].tolist() == [True, False]


def test_other_processes_do_not_make_memory_mixed(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa", foreign_cpu_share=0.3, is_alone=False)
    two_norms.add_cost("group_norm-aaaaaaaa", foreign_cpu_share=0.0, is_alone=True)
    results = load_results(two_norms.path)
    assert "MIXED" not in memory_caption(results)
    assert "MIXED, so rows do not compare: is_alone (false | true)." in timing_caption(results)


def test_the_caption_tells_what_each_column_is(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("batch_norm-aaaaaaaa")
    results = load_results(two_norms.path)
    caption = timing_caption(results)
    assert "the median update times the updates of a completed run, without evaluation" in caption
    assert "Prediction: one batch of 256 samples, in eval mode" in caption
    for text in (caption, memory_caption(results)):
        assert "Conditions: device cpu, cpu Example CPU, num_threads 1, precision 32-true" in text


def test_folded_prediction_is_shown_where_it_was_measured(two_norms: ExperimentFolder) -> None:
    two_norms.add_cost("group_norm-aaaaaaaa")
    table = cost_table(load_results(two_norms.path), "timing")
    assert not any("folded" in header for header in table.headers)
    assert "Folded" not in table.caption
    two_norms.add_cost("batch_norm-aaaaaaaa")
    path = two_norms.path / "runs" / "batch_norm-aaaaaaaa" / "cost.json"
    cost = json.loads(path.read_text())
    cost["timing"]["folded_prediction_ms"] = {"median": 2.5, "q25": 2.0, "q75": 3.0}
    path.write_text(json.dumps(cost))
    table = cost_table(load_results(two_norms.path), "timing")
    column = table.headers.index("folded prediction (ms)")
    assert table.headers[column - 1] == "prediction (ms)"
    shown = {row[0]: row[column] for row in table.rows}
    assert shown == {"batch_norm": "2.5 [2, 3]", "group_norm": "-"}
    assert "Folded prediction: the same" in table.caption
    frame = table.frame.set_index("norm")
    assert frame.at["batch_norm", "folded_prediction_ms_median"] == 2.5
    assert math.isnan(frame.at["group_norm", "folded_prediction_ms_median"])
