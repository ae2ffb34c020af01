"""Grids, sweeps on the command line, and the typed cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from normexp.config.compose import check_overrides, expand_grid, load_plugins, to_cell
from normexp.config.schema import BudgetConfig, CellConfig, LrScalingConfig
from normexp.config.validate import budget_samples
from normexp.errors import UserError

GRID = [
    {"norm": ["batch_norm", "group_norm"], "micro_batch_size": [2, 8]},
    {"norm": ["layer_norm_chw"], "model.params.depth": [14]},
]


def cells(grid, *overrides):
    return [set(cell) for cell in expand_grid(grid, list(overrides))[0]]


def test_a_block_stands_for_all_its_combinations():
    jobs, axes = expand_grid(GRID, ["experiment=x"])
    assert jobs == [
        ["experiment=x", "norm=batch_norm", "micro_batch_size=2"],
        ["experiment=x", "norm=batch_norm", "micro_batch_size=8"],
        ["experiment=x", "norm=group_norm", "micro_batch_size=2"],
        ["experiment=x", "norm=group_norm", "micro_batch_size=8"],
        ["experiment=x", "norm=layer_norm_chw", "model.params.depth=14"],
    ]
    assert axes == ["norm", "micro_batch_size", "model.params.depth"]


def test_a_sweep_takes_the_place_of_the_axis_in_every_block():
    jobs, axes = expand_grid(GRID, ["norm=no_norm,instance_norm"])
    assert len(jobs) == 2 * 2 + 2
    assert {word for job in jobs for word in job if word.startswith("norm=")} == {
        "norm=no_norm",
        "norm=instance_norm",
    }
    assert axes[0] == "norm"


def test_a_sweep_over_a_new_key_is_a_further_axis_of_every_block():
    jobs, axes = expand_grid(GRID, ["optimizer.lr=0.1,0.2"])
    assert len(jobs) == 2 * 5
    assert "optimizer.lr" in axes


def test_a_single_value_pins_its_axis_and_doubles_fall_together():
    assert cells(GRID, "norm=no_norm") == [
        {"norm=no_norm", "micro_batch_size=2"},
        {"norm=no_norm", "micro_batch_size=8"},
        {"norm=no_norm", "model.params.depth=14"},
    ]
    assert len(cells(GRID[:1] * 3)) == 4
    assert len(cells([{"micro_batch_size": [2, 4, 8]}], "micro_batch_size=4")) == 1


def test_without_a_grid_the_command_line_alone_makes_the_cells():
    assert expand_grid([], ["a=1,2", "b=3"]) == ([["b=3", "a=1"], ["b=3", "a=2"]], ["a"])
    assert expand_grid([], []) == ([[]], [])


@pytest.mark.parametrize("override", ["a=range(1,4)", "a=choice(1,2,3)", "a=1,2,3"])
def test_the_sweeps_of_hydra_are_sweeps_here(override):
    assert expand_grid([{"a": [9]}], [override])[0] == [["a=1"], ["a=2"], ["a=3"]]


@pytest.mark.parametrize("values", [3, "x", [], None, {"a": 1}])
def test_an_axis_without_a_list_is_refused(values):
    with pytest.raises(UserError, match=r"^experiment\.grid\.norm=.*a list of values is needed"):
        expand_grid([{"norm": values}], [])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 10)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=8),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=4,
)


@given(VALUES)
def test_a_value_of_yaml_reaches_the_cell_as_it_was(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    ((word,),) = expand_grid([{"key": [value]}], [])[0]
    parsed = OverridesParser.create().parse_override(word).value()
    plain = _plain(parsed)
    assert (plain, type(plain)) == (value, type(value))


def _plain(parsed):
    if isinstance(parsed, list):
        return [_plain(item) for item in parsed]
    return str(parsed) if type(parsed).__name__ == "QuotedString" else parsed


def test_a_list_where_one_choice_belongs_is_refused():
    with pytest.raises(UserError, match="normexp sweep norm=batch_norm,no_norm"):
        check_overrides(["norm=[batch_norm,no_norm]"])
    check_overrides(["logger=[csv,tensorboard]", "seeds=[0,1]", "norm=batch_norm,no_norm"])


def test_paths_are_made_absolute_once_in_the_parent(composed, monkeypatch, tmp_path):
    # R57: the same in all jobs, whatever their working folder is.
    monkeypatch.chdir(tmp_path)
    overrides = ["data=fashion_mnist", "data.params.root=./data", "output_root=out"]
    cell = to_cell(composed(*overrides, "plugins=[my.py]"))
    assert cell.output_root == str(tmp_path / "out")
    assert Path(cell.data.params["root"]) == tmp_path / "data"
    assert cell.plugins == [str(tmp_path / "my.py")]
    cell = to_cell(composed("data=text_file", "data.params.path=a.txt"))
    assert cell.data.params["path"] == str(tmp_path / "a.txt")


def test_a_cell_is_plain(composed):
    # R64, R65: nothing of OmegaConf goes further, nothing is left unresolved.
    config = composed("data.params.num_val=${micro_batch_size}", "+norm.roles.stem.name=no_norm")
    cell = to_cell(config)
    assert isinstance(cell, CellConfig)
    assert cell.data.params["num_val"] == 32

    def check(value):
        assert not OmegaConf.is_config(value)
        assert type(value) in (dict, list, str, int, float, bool, type(None)), type(value)
        for item in value.values() if isinstance(value, dict) else ():
            check(item)
        for item in value if isinstance(value, list) else ():
            check(item)

    check(cell.to_plain())


def test_a_plugin_is_imported_once_and_its_fault_is_told(tmp_path):
    path = tmp_path / "counting_plugin.py"
    path.write_text(
        "import builtins\nbuiltins.num_imports = 1 + getattr(builtins, 'num_imports', 0)\n"
    )
    load_plugins([str(path)])
    load_plugins([str(path)])
    import builtins

    assert builtins.num_imports == 1
    broken = tmp_path / "broken_plugin.py"
    broken.write_text("import a_package_that_is_missing\n")
    # R61: the root cause, not "error locating target".
    with pytest.raises(UserError, match="No module named 'a_package_that_is_missing'"):
        load_plugins([str(broken)])
    broken.write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError, match="SystemExit: 3"):
        load_plugins([str(broken)])


def budget(**amounts) -> CellConfig:
    return CellConfig(micro_batch_size=8, accumulation_steps=2, budget=BudgetConfig(**amounts))


@pytest.mark.parametrize(
    ("config", "samples"),
    [
        (budget(samples=123), 123),
        (budget(updates=7), 7 * 16),
        (budget(epochs=2), 110_000),
        (budget(epochs=0.5), 27_500),
        # 1.1 * 55000 is 60500.00000000001 in binary.
        (budget(epochs=1.1), 60_500),
        (budget(epochs=1e-05), 1),
    ],
)
def test_a_budget_in_samples(config, samples):
    assert budget_samples(config, 55_000) == samples


@pytest.mark.parametrize(("rule", "lr"), [("none", 0.1), ("linear", 0.05), ("sqrt", 0.05 * 2**0.5)])
def test_the_rate_follows_the_effective_batch(rule, lr):
    # 8 x 2 over a base of 32: half.
    config = budget(epochs=1)
    config.optimizer.lr = 0.1
    config.lr_scaling = LrScalingConfig(rule, 32)
    assert config.scaled_lr == pytest.approx(lr, rel=1e-15)
