from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import FIGURES, load_results
from normexp.analysis.figures import NotApplicable, plot_frame, write_figures
from normexp.analysis.figures._style import NORM_LOOKS, norm_look
from normexp.config.choices import list_choices
from normexp.errors import UserError


def test_all_files_of_each_figure(grid: ExperimentFolder) -> None:
    written = write_figures(load_results(grid.path), grid.path / "figures")
    assert [figure.name for figure in written] == FIGURES.names()
    names = [figure.name for figure in written if figure.skipped is None]
    assert names == ["convergence", "micro_batch", "statistic_set"]
    for figure in written:
        if figure.skipped:
            continue
        assert sorted(figure.paths) == ["csv", "pdf", "png", "svg"]
        assert figure.paths["png"].read_bytes().startswith(b"\x89PNG")
        assert figure.paths["pdf"].read_bytes().startswith(b"%PDF")
        assert b"<svg" in figure.paths["svg"].read_bytes()


def test_the_same_data_give_the_same_bytes(grid: ExperimentFolder) -> None:
    def contents() -> dict[str, bytes]:
        figures = write_figures(load_results(grid.path), grid.path / "figures")
        return {path.name: path.read_bytes() for f in figures for path in f.paths.values()}

    first = contents()
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "other", "axes.facecolor": "red"}):
        assert contents() == first


def test_a_figure_that_does_not_apply_is_listed_with_the_reason(
    two_norms: ExperimentFolder,
) -> None:
    written = write_figures(load_results(two_norms.path), two_norms.path / "figures")
    reasons = {figure.name: figure.skipped for figure in written}
    assert reasons["convergence"] is None
    assert reasons["micro_batch"] == "micro_batch_size does not vary"
    assert "does not vary" in str(reasons["statistic_set"])


def test_only_the_figures_asked_for(grid: ExperimentFolder) -> None:
    written = write_figures(load_results(grid.path), grid.path / "figures", ["micro_batch"])
    assert [figure.name for figure in written] == ["micro_batch"]
    assert sorted(path.stem for path in (grid.path / "figures").iterdir()) == ["micro_batch"] * 4


def test_a_misspelt_figure_is_refused(grid: ExperimentFolder) -> None:
    with pytest.raises(UserError, match=r"figures=microbatch: did you mean micro_batch\?"):
        write_figures(load_results(grid.path), grid.path / "figures", ["microbatch"])


def test_thirty_figures_without_a_display_leave_none_open(grid: ExperimentFolder) -> None:
    script = f"""
import sys
from normexp.analysis import FIGURES, load_results
from normexp.analysis.figures import plot_frame
results = load_results({str(grid.path)!r})
names = ("convergence", "micro_batch", "statistic_set")
frames = {{entry.name: entry.card.frame(results) for entry in FIGURES if entry.name in names}}
for _ in range(10):
    for name, frame in frames.items():
        plot_frame(name, frame)
loaded = set(sys.modules)
# pyplot is what keeps figures open; a GUI backend is what needs a display.
assert "matplotlib.pyplot" not in loaded
assert not {{name for name in loaded if name.startswith(("tkinter", "PyQt", "gi."))}}
assert not {{"torch", "lightning", "hydra"}} & loaded
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    root = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = root
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_axes_carry_names_and_units(grid: ExperimentFolder) -> None:
    results = load_results(grid.path)
    words = {}
    for entry in FIGURES:
        try:
            data = entry.card.frame(results)
        except NotApplicable:
            continue
        figure = plot_frame(entry.name, data)
        texts = [figure.get_supxlabel(), figure.get_supylabel()]
        texts += [t for axes in figure.axes for t in (axes.get_xlabel(), axes.get_ylabel())]
        words[entry.name] = " ".join(texts)
    assert "training samples seen" in words["convergence"]
    assert "val error (%)" in words["convergence"]
    assert "micro-batch (samples)" in words["micro_batch"]
    assert "test error (%)" in words["micro_batch"]
    assert "smallest statistic set M (elements)" in words["statistic_set"]
    assert "percentage points" in words["statistic_set"]


def test_every_figure_has_title_and_caption() -> None:
    for entry in FIGURES:
        assert entry.card.title
        assert entry.card.caption.endswith(".")
        module = inspect.getmodule(entry.build)
        assert module is not None
        assert module.__name__.rpartition(".")[2] == entry.name


def test_norms_differ_in_more_than_colour() -> None:
    looks = [norm_look(name) for name in NORM_LOOKS]
    assert len({(look.marker, look.dashes) for look in looks}) == len(looks)
    assert set(NORM_LOOKS) == set(list_choices("norm"))
    assert norm_look("group_norm") == NORM_LOOKS["group_norm"]
    assert norm_look("group_norm", 1) != norm_look("group_norm")
    assert norm_look("my_norm") == norm_look("my_norm")
    assert norm_look("my_norm").colour not in {look.colour for look in looks}
