"""The verb list: for people and for programs."""

from __future__ import annotations

import dataclasses
import json

import pytest
from command_line import normexp

from normexp.cli.list import KINDS
from normexp.config.choices import list_choices
from normexp.data import DATASETS
from normexp.models import PLACEMENTS
from normexp.norms import NORMS, NormCard, WeightCard

GROUPS = {
    "norms": "norm",
    "models": "model",
    "data": "data",
    "placements": "placement",
    "experiments": "experiment",
}


def test_every_kind_is_tested():
    assert set(KINDS) == set(GROUPS)


@pytest.mark.parametrize("kind", GROUPS)
def test_every_choice_of_the_configuration_is_listed(kind):
    outcome = normexp("list", kind, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    rows = json.loads(outcome.out)
    assert sorted(row["name"] for row in rows) == list_choices(GROUPS[kind])
    assert len({frozenset(row) for row in rows}) == 1, "rows with different keys"


@pytest.mark.parametrize("kind", GROUPS)
def test_a_person_sees_every_name_unbroken(kind):
    outcome = normexp("list", kind)
    assert (outcome.code, outcome.err) == (0, "")
    for name in list_choices(GROUPS[kind]):
        assert name in outcome.out
    # A column more than a terminal holds would squeeze the others.
    assert "source" not in "".join(outcome.out.splitlines()[:3])


def test_placements_show_their_drawing_of_each_family():
    rows = {row["name"]: row for row in json.loads(normexp("list", "placements", "--json").out)}
    out = normexp("list", "placements").out
    for name, placement in PLACEMENTS.items():
        assert rows[name] == dataclasses.asdict(placement)
        for family in ("images", "sequences"):
            drawing = getattr(placement, family)
            if drawing is not None:
                assert f"{family}: {drawing.formula}\n\n{drawing.picture}" in out
    # A family without a drawing has no heading either.
    text = out[out.index("sandwich: ") :].partition("deepnorm: ")[0]
    assert "sequences: " in text
    assert "images: " not in text


def test_norms_have_every_field_of_their_cards():
    rows = {row["name"]: row for row in json.loads(normexp("list", "norms", "--json").out)}
    fields = {field.name for field in dataclasses.fields(NormCard)}
    for entry in NORMS:
        row, card = rows[entry.name], entry.card
        assert fields | {"name", "inputs"} == set(row)
        for name in fields - {"statistic_sets", "weight"}:
            assert row[name] == json.loads(json.dumps(getattr(card, name))), name
        words = [{0: "features", 1: "sequences", 2: "images"}[dims] for dims in card.dims]
        assert row["inputs"] == words
        assert row["statistic_sets"] == {
            word: [list(axes) for axes in card.statistic_sets[dims]]
            for word, dims in zip(words, card.dims, strict=True)
        }
        if card.weight is None:
            assert row["weight"] is None
        else:
            names = {field.name for field in dataclasses.fields(WeightCard)} - {"parametrize"}
            assert set(row["weight"]) == names
            assert row["weight"]["formula"] == card.weight.formula


def test_data_tell_images_from_texts_and_labels_from_next_tokens():
    rows = {row["name"]: row for row in json.loads(normexp("list", "data", "--json").out)}
    for entry in DATASETS:
        row, card = rows[entry.name], entry.card
        for name in ("description", "source", "num_classes", "is_text", "needs_download"):
            assert row[name] == getattr(card, name), name
        # A card's 0 is "not declared": no data set is empty.
        assert (row["num_train_val"] is None) == (row["num_test"] is None) == card.is_text
        assert row["num_test"] != 0
    facts = {name: (row["inputs"], row["targets"]) for name, row in rows.items()}
    assert facts["cifar10"] == ("3 x 32 x 32", "10 labels")
    assert facts["docstrings"] == ("text", "8 labels")
    assert facts["python_docs"] == facts["text_file"] == ("text", "next token")
    out = normexp("list", "data").out
    for name, (inputs, targets) in facts.items():
        (line,) = [line for line in out.splitlines() if line.split()[1:2] == [name]]
        assert inputs in line
        assert targets in line


def find_row(out: str, name: str) -> str:
    (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
    return " ".join(line.split()[1:])


def test_norms_fit_100_columns_with_all_that_tells_them_apart(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = normexp("list", "norms").out
    assert max(map(len, out.splitlines())) <= 100
    expected = {
        "batch_norm": "all batch x position yes no running_mean fused",
        "layer_norm_channel": "all channel no yes - fused",
        "instance_norm": "sequences position no yes - fused",
        "dynamic_tanh": "all - no yes - composite",
        "weight_norm": "all weight's fan-in no yes - none",
    }
    for name, row in expected.items():
        assert find_row(out, name) == row
    assert "sequences [N, L, C]" in out


def test_norms_of_a_narrow_terminal_have_fewer_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = normexp("list", "norms").out
    assert find_row(out, "batch_norm") == "all batch x position yes no"
    assert "100 columns" in out
