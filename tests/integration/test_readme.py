"""What the README shows works as written."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("group", ["norm", "model", "data", "placement", "logger"])
def test_the_readme_names_every_choice_it_lists(group: str) -> None:
    text = README.read_text()
    if group == "norm":
        text += (README.parent / "CHANGELOG.md").read_text()
    missing = [name for name in list_choices(group) if f"{name}" not in text]
    assert not missing


def test_the_readme_lists_every_experiment() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README.read_text(), flags=re.MULTILINE)
    assert set(list_choices("experiment")) <= set(rows)
