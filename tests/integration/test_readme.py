"""What the README shows works as written."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from normexp.config.choices import list_choices
from normexp.records import read_plan

README = Path(__file__).parents[2] / "README.md"


def test_the_experiment_of_the_readme_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), flags=re.DOTALL)
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "stem_norm.yaml").write_text(block)
    reduced = ["budget.epochs=null", "budget.updates=2", "num_evaluations=1", "seeds=[0]"]
    command = ["run", "--config-dir", ".", "experiment=stem_norm", *reduced, "optimizer.lr=0.05"]
    done = subprocess.run(
        [sys.executable, "-m", "normexp", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan = read_plan(tmp_path / "results" / "stem_norm")
    assert plan is not None
    stems = [cell["factors"]["norm.roles.stem"] for cell in plan["cells"]]
    assert stems == ["group_norm", "batch_norm"]


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_norm_of_the_readme_works_as_written(tmp_path: Path) -> None:
    (block,) = [block for block in python_blocks() if block.startswith("# my_norm.py")]
    (tmp_path / "my_norm.py").write_text(block)
    (shell,) = re.findall(r"```sh\n(normexp check my_norm .*?)```", README.read_text(), re.DOTALL)
    check, sweep = shell.splitlines()
    reduced = " budget.epochs=null budget.updates=2 num_evaluations=1 seeds=[0]"
    for command in (check, sweep + reduced):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command, comments=True)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    summaries = list(tmp_path.glob("results/my_comparison/runs/*/seed=0/summary.json"))
    found = [json.loads(path.read_text()) for path in summaries]
    assert {layer["name"] for run in found for layer in run["model"]["norm_layers"]} == {
        "my_norm",
        "group_norm",
    }
    assert [run["status"] for run in found] == ["completed", "completed"]


def test_the_python_of_the_readme_runs() -> None:
    (tools,) = [block for block in python_blocks() if "fold_norms" in block]
    names: dict[str, object] = {}
    exec(compile(tools, "README.md", "exec"), names)
    assert isinstance(names["foldings"], list)
    assert sum(folding.is_folded for folding in names["foldings"]) == 20
    (replace,) = [block for block in python_blocks() if "replace_norms" in block]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(replace, "README.md", "exec"), {})
    assert printed.getvalue() in README.read_text()


def test_the_catalogue_is_what_the_cards_say() -> None:
    script = README.parent / "scripts" / "document_norms.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("group", ["norm", "model", "data", "placement", "logger"])
def test_the_readme_names_every_choice_it_lists(group: str) -> None:
    text = README.read_text()
    if group == "norm":
        text += (README.parent / "docs" / "norms.md").read_text()
    missing = [name for name in list_choices(group) if f"{name}" not in text]
    assert not missing


def test_the_readme_lists_every_experiment() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README.read_text(), flags=re.MULTILINE)
    assert set(list_choices("experiment")) <= set(rows)
