"""The verb inspect: its numbers against counts on the real model, its warnings, its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import normexp

from normexp.models import build_model
from normexp.norms import NormFactory

RESNET = ["model=cifar_resnet", "data=digits"]


def inspect(*arguments: str) -> list[dict[str, Any]]:
    outcome = normexp("inspect", *arguments, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


def codes(rows: list[dict[str, Any]]) -> dict[str, set[str]]:
    return {row["path"]: {warning["code"] for warning in row["warnings"]} for row in rows}


def messages(rows: list[dict[str, Any]], code: str) -> set[str]:
    return {w["message"] for row in rows for w in row["warnings"] if w["code"] == code}


# How many elements share a mean, counted on a real input of the layer.
COUNTS = {
    "batch_norm": lambda x, _layer: x[:, 0].numel(),
    "group_norm": lambda x, layer: x[0].numel() // layer.num_groups,
    "instance_norm": lambda x, _layer: x[0, 0].numel(),
    "layer_norm_chw": lambda x, _layer: x[0].numel(),
    "layer_norm_channel": lambda x, _layer: x[0, :, 0, 0].numel(),
}


@pytest.mark.parametrize(
    ("norm", "micro_batch_size"), [("batch_norm", 6), *((norm, 2) for norm in COUNTS)]
)
def test_m_is_what_a_real_forward_pass_counts(norm: str, micro_batch_size: int) -> None:
    rows = inspect(*RESNET, f"norm={norm}", f"micro_batch_size={micro_batch_size}")
    model = build_model(
        "cifar_resnet",
        {},
        input_shape=(1, 8, 8),
        num_classes=10,
        norm=NormFactory(norm),
        placement="res_post",
    )
    counted: list[tuple[str, list[int], int, int]] = []

    def count(path):
        def hook(layer, inputs, _output):
            (x,) = inputs
            size = sum(p.numel() for p in layer.parameters())
            counted.append((path, list(x.shape), COUNTS[norm](x, layer), size))

        return hook

    for path, layer in model.named_modules():
        if hasattr(layer, "norm_record"):
            layer.register_forward_hook(count(path))
    model(torch.randn(micro_batch_size, 1, 8, 8))
    assert len(counted) == 9
    # In the order of the forward pass too.
    seen = [(row["path"], row["shape"], row["M"], row["num_parameters"]) for row in rows]
    assert seen == counted
    assert all(row["statistics"][0]["size"] == row["M"] for row in rows)
    assert {(row["norm"], row["acts_on"], row["refusal"]) for row in rows} == {
        (norm, "input", None)
    }


def test_facts_of_a_layer_are_those_of_its_card_and_options() -> None:
    row = inspect(*RESNET, "norm=group_norm", "norm.params.num_groups=4", "micro_batch_size=2")[1]
    assert row["path"] == "stages.0.0.norm1"
    assert row["role"] == "block"
    assert row["statistics"] == [
        {"axes": ["group", "position"], "size": 256, "size_at_world_size": 256}
    ]
    assert row["kernel"] == "fused"
    assert "torch.nn.functional.group_norm" in row["kernel_words"]
    assert row["params"]["channels_per_group"] == 4


@pytest.mark.parametrize(("norm", "factor"), [("batch_norm", 1), ("sync_batch_norm", 4)])
def test_only_synchronized_statistics_grow_with_ranks(norm: str, factor: int) -> None:
    rows = inspect(*RESNET, f"norm={norm}", "--world-size", "4")
    assert all(row["M_at_world_size"] == factor * row["M"] for row in rows)
    assert {row["world_size"] for row in rows} == {4}
    assert {row["world_size"] for row in inspect(*RESNET)} == {2}


def test_weights_are_listed_with_their_fan_in() -> None:
    rows = inspect(*RESNET, "norm=weight_norm", "norm.roles.stem.name=batch_norm")
    weights = {row["path"]: row for row in rows if row["acts_on"] == "weight"}
    assert weights["stages.2.0.conv2"]["M"] == 64 * 3 * 3
    assert weights["stages.2.0.conv2"]["shape"] == [64, 64, 3, 3]
    assert weights["stages.2.0.conv2"]["num_parameters"] == 64  # the gains
    assert weights["stages.2.0.shortcut.conv"]["M"] == 32
    assert len({row["path"] for row in rows}) == len(rows)
    assert rows[0]["norm"] == "batch_norm"
    assert rows[0]["M"] == 32 * 64


def test_few_values_in_a_batch_statistic() -> None:
    """On 8x8 images the last stage has 2x2 maps, or 1x1 with a fourth stage."""
    found = codes(inspect(*RESNET, "norm=batch_norm", "micro_batch_size=2"))
    assert found["stages.2.0.norm1"] == {"noisy_statistics"}  # M = 8
    assert found["stages.1.0.norm1"] == set()  # M = 32
    found = codes(inspect(*RESNET, "norm=batch_norm", "micro_batch_size=1"))
    assert found["stages.2.0.norm1"] == {"nearly_fixed_output"}  # M = 4
    small = [*RESNET, "model.params.num_stages=4"]
    rows = inspect(*small, "norm=batch_norm", "micro_batch_size=2")
    assert codes(rows)["stages.3.0.norm1"] == {"fixed_output"}  # M = 2
    assert messages(rows, "fixed_output") == {
        "M = 2 (batch x position): every output is +1 or -1 before gain and shift, whatever the "
        "input"
    }
    # Which is so:
    y = torch.nn.BatchNorm1d(3, eps=1e-12)(torch.randn(2, 3))
    torch.testing.assert_close(y.detach().abs(), torch.ones(2, 3))
    # M = 9 is no matter; nor are few values in a statistic that is over no samples, unless 2.
    assert codes(inspect("model=mlp", "micro_batch_size=9"))["norms.0"] == set()
    found = codes(inspect(*RESNET, "norm=instance_norm", "micro_batch_size=2"))
    assert found["stages.2.0.norm1"] == set()  # M = 4
    pairs = ["norm=group_norm", "norm.params.num_groups=null", "norm.params.channels_per_group=2"]
    found = codes(inspect(*small, *pairs))
    assert found["stages.3.0.norm1"] == {"fixed_output"}
    assert found["stages.2.0.norm1"] == set()
    # The two values of a root mean square keep a relation.
    small_rms = ["model=mlp", "model.params.width=2", "norm=rms_norm"]
    assert "fixed_output" not in codes(inspect(*small_rms))["norms.0"]


def test_a_refusal_is_shown_and_no_failure() -> None:
    arguments = ["model=mlp", "norm=batch_norm", "micro_batch_size=1"]
    rows = inspect(*arguments)
    assert [row["M"] for row in rows] == [1, 1, 1]
    trained = normexp("train", *arguments)
    assert trained.code == 2
    assert trained.err == f"normexp: {rows[0]['refusal']}\n"
    shown = normexp("inspect", *arguments)
    assert (shown.code, shown.err) == (0, "")
    assert " ".join(shown.out.split()).endswith(f"training would refuse {rows[0]['refusal']}")


def test_groups_that_are_another_norm() -> None:
    rows = inspect(*RESNET, "norm=group_norm", "norm.params.num_groups=16")
    assert codes(rows)["stem.norm"] == {"one_channel_a_group"}
    assert codes(rows)["stages.1.0.norm1"] == set()
    assert messages(rows, "one_channel_a_group") == {
        "as many groups as channels (16): this is instance_norm"
    }
    rows = inspect(*RESNET, "norm=group_norm", "norm.params.num_groups=1")
    assert messages(rows, "one_group") == {
        f"one group of all {channels} channels: this is layer_norm_chw" for channels in (16, 32, 64)
    }
    rows = inspect("model=mlp", "norm=group_norm", "norm.params.num_groups=1")
    assert messages(rows, "one_group") == {"one group of all 128 channels: this is layer_norm"}


def test_batch_statistics_and_accumulation() -> None:
    arguments = [*RESNET, "micro_batch_size=4", "accumulation_steps=8"]
    rows = inspect(*arguments, "norm=batch_norm")
    assert messages(rows, "statistics_per_micro_batch") == {
        "statistics are over each micro-batch of 4, not over the 32 samples of an update"
    }
    assert all("statistics_per_micro_batch" in found for found in codes(rows).values())
    assert not messages(inspect(*arguments, "norm=group_norm"), "statistics_per_micro_batch")
    assert not messages(inspect(*RESNET, "norm=batch_norm"), "statistics_per_micro_batch")


def test_ghosts() -> None:
    ghosts = ["norm=ghost_batch_norm", "norm.params.ghost_size=16"]
    rows = inspect(*RESNET, *ghosts, "micro_batch_size=8")
    assert messages(rows, "one_ghost") == {
        "ghost_size = 16 is larger than the micro-batch of 8: one chunk, as in batch_norm"
    }
    assert {row["M"] // (row["shape"][2] * row["shape"][3]) for row in rows} == {8}
    rows = inspect(*RESNET, *ghosts, "micro_batch_size=32")
    assert not messages(rows, "one_ghost")
    assert {row["M"] // (row["shape"][2] * row["shape"][3]) for row in rows} == {16}
    rows = inspect(*RESNET, *ghosts, "micro_batch_size=24")
    assert "ghost_size=16 does not divide the 24 samples" in rows[0]["refusal"]


def test_a_budget_that_ends_in_the_warm_up_is_told() -> None:
    # 1,000 digits in micro-batches of 2, twice.
    budget = ["micro_batch_size=2", "budget.epochs=2", "norm=batch_renorm"]
    assert messages(inspect(*RESNET, *budget), "warmup_beyond_budget") == {
        "warmup_micro_batches = 5,000 is no less than the 1,000 micro-batches of the budget: the "
        "norm stays in its warm-up"
    }
    short = inspect(*RESNET, *budget, "norm.params.warmup_micro_batches=999")
    assert messages(short, "warmup_beyond_budget") == set()


def test_running_statistics_that_keep_their_start_are_told() -> None:
    rows = inspect(*RESNET, "micro_batch_size=8", "budget.epochs=1", "norm.params.momentum=0.01")
    assert messages(rows, "slow_running_statistics") == {
        "after the 125 micro-batches of the budget, running statistics with momentum 0.01 still "
        "are 28% of what they started as"  # 0.99^125 = 0.285
    }
    for momentum in ("0.1", "null"):
        rows = inspect(*RESNET, "micro_batch_size=8", f"norm.params.momentum={momentum}")
        assert messages(rows, "slow_running_statistics") == set()


def test_a_composite_is_told() -> None:
    assert messages(inspect(*RESNET, "norm=rms_norm"), "composite_kernel") == {
        "no fused kernel on cpu: a time measured here is of several kernels"
    }
    assert not messages(inspect(*RESNET, "norm=group_norm"), "composite_kernel")


TRANSFORMER = ["model=transformer", "placement=pre", "model.params.depth=1"]
LANGUAGE = [*TRANSFORMER, "data=python_docs", "data.params.num_train=64"]
TEXTS = [*TRANSFORMER, "data=docstrings"]


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_a_norm_over_positions_leaks_in_a_causal_model(norm: str) -> None:
    rows = inspect(*LANGUAGE, f"norm={norm}")
    assert [row["path"] for row in rows] == [
        "blocks.0.attention.norm_before",
        "blocks.0.mlp.norm_before",
        "final_norm",
    ]
    assert {tuple(row["shape"]) for row in rows} == {(32, 128, 128)}
    is_leaking = norm == "batch_norm"
    assert {"leak" in found for found in codes(rows).values()} == {is_leaking}
    assert {row["refusal"] is not None for row in rows} == {is_leaking}
    # Among encoders it has the positions of a text for what they are.
    assert "leak" not in codes(inspect(*TEXTS, f"norm={norm}"))["final_norm"]


def test_a_leak_is_refused_until_it_is_allowed() -> None:
    arguments = [*LANGUAGE, "norm=batch_norm"]
    refused = normexp("train", *arguments)
    assert refused.code == 2
    line = refused.err.removeprefix("normexp: ").strip()
    assert "allow_leak=true" in line
    shown = " ".join(normexp("inspect", *arguments).out.split())
    assert shown.endswith(f"training would refuse {line}")
    allowed = " ".join(normexp("inspect", *arguments, "allow_leak=true").out.split())
    assert allowed.endswith("training refuses no layer")
    assert "all: mixes positions in a causal model: each one sees what follows it" in allowed


def test_statistics_that_are_frozen_later_leak_until_then() -> None:
    frozen = [*LANGUAGE, "norm=frozen_batch_norm"]
    assert {row["refusal"] for row in inspect(*frozen)} == {None}
    warming = inspect(*frozen, "norm.params.freeze_after_micro_batches=3")
    assert all("allow_leak=true" in row["refusal"] for row in warming)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["norm=spectral_band_norm"], "model.params.mask_norms=false lets it see padding"),
        (["norm=batch_norm", "model.params.mask_norms=false"], "longest is needed"),
    ],
)
def test_what_padding_does_not_go_with_is_shown_as_training_tells_it(
    arguments: list[str], line: str
) -> None:
    refused = normexp("train", *TEXTS, *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert line in refused.err
    shown = " ".join(normexp("inspect", *TEXTS, *arguments).out.split())
    assert shown.endswith(f"training would refuse {refused.err.removeprefix('normexp: ').strip()}")


def test_m_of_texts_is_of_the_longest() -> None:
    rows = inspect(*TEXTS, "norm=batch_norm", "micro_batch_size=4")
    longest = rows[0]["shape"][1]
    assert {row["M"] for row in rows} == {4 * longest}
    found = codes(rows)["final_norm"]
    assert {"longest_text", "valid_positions", "composite_kernel"} <= found
    assert {row["kernel"] for row in rows} == {"composite"}
    # A norm of single positions sees no other; batches are cut all the same.
    assert codes(inspect(*TEXTS, "norm=layer_norm"))["final_norm"] == {"longest_text"}
    whole = [*TEXTS, "data.params.padding=longest"]
    assert codes(inspect(*whole, "norm=layer_norm"))["final_norm"] == set()
    seeing = inspect(*whole, "norm=batch_norm", "model.params.mask_norms=false")
    assert "sees_padding" in codes(seeing)["final_norm"]
    assert "valid_positions" not in codes(seeing)["final_norm"]
    assert {row["kernel"] for row in seeing} == {"fused"}
    # Blocks of a language model have no padding.
    blocks = codes(inspect(*LANGUAGE, "norm=batch_norm"))["final_norm"]
    assert not blocks & {"longest_text", "valid_positions", "sees_padding", "composite_kernel"}


def test_an_experiment_is_one_cell_once_its_axes_are_set() -> None:
    rows = inspect("experiment=small_batch", "norm=group_norm", "micro_batch_size=2")
    assert {(row["norm"], row["shape"][0]) for row in rows} == {("group_norm", 2)}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["norm=batch_norm,group_norm"], "norm=batch_norm,group_norm: inspect shows one cell"),
        (["-m", "norm=batch_norm"], "command line=-m: inspect shows one cell"),
        (["experiment=small_batch"], "experiment=small_batch: is a grid of cells, and inspect"),
        (["norm=batchnorm"], "norm=batchnorm: did you mean"),
        (["micro_batch_size=0"], "micro_batch_size=0: 1 or more is needed"),
        (["norm=group_norm", "norm.params.num_groups=5"], "norm.params.num_groups=5: does not"),
        (["--world-size", "0"], "--world-size=0: 1 or more is needed"),
        (["--world-size", "two"], "Invalid value for '--world-size'"),
        (["--jsn"], "command line=--jsn: "),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], line: str) -> None:
    outcome = normexp("inspect", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"normexp: {line}")
    assert outcome.err.count("\n") == 1


def test_a_person_sees_one_row_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    norms = ["norm=switchable_norm", "norm.roles.stem.name=group_norm"]
    for arguments in ([], norms, ["norm=weight_standardization"], ["norm=sync_batch_norm"]):
        outcome = normexp("inspect", *RESNET, "micro_batch_size=2", *arguments)
        assert (outcome.code, outcome.err) == (0, "")
        assert max(map(len, outcome.out.splitlines())) <= 100
    outcome = normexp(
        "inspect", *RESNET, "norm=batch_norm", "micro_batch_size=2", "accumulation_steps=2"
    )
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert "stages.2.0.norm1 block 2x64x2x2 batch x position 8 128 1" in lines
    assert "stages.2.0.shortcut.norm downsample 2x64x2x2 batch x position 8 128 1" in lines
    assert "M with 2 ranks of this micro-batch: the same" in lines
    assert lines[-3].startswith("all: statistics are over each micro-batch of 2")
    assert lines[-2].startswith("(1) M = 8 (batch x position): noisy; ")
    assert lines[-1] == "training refuses no layer"
    none = normexp("inspect", *RESNET, "norm=no_norm", "placement=none")
    assert none.out == "cifar_resnet has no norm layer here\n"


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        (["norm=batch_norm", "model.params.num_stages=1"], ""),
        (["norm=batch_norm"], "no room for params: "),
        (["norm=group_norm", "norm.roles.stem.name=batch_norm"], "no room for params and role: "),
    ],
)
def test_a_narrow_terminal_keeps_paths_whole(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], left_out: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = normexp("inspect", *RESNET, "micro_batch_size=2", *arguments).out
    assert max(map(len, out.splitlines())) <= 80
    for path in (row["path"] for row in inspect(*RESNET, *arguments)):
        assert f" {path} " in out
    assert left_out in out
    assert ("no room" in out) == bool(left_out)


def test_nothing_is_written_and_no_data_opened(tmp_path: Path) -> None:
    """The images of cifar10 are not here."""
    rows = inspect("data=cifar10", "norm=batch_norm")
    assert rows[0]["shape"] == [32, 16, 32, 32]
    assert list(tmp_path.iterdir()) == []
