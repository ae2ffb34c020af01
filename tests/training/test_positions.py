"""Norms that would see later tokens, or leave nothing to classify: told before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import normexp
from small_texts import LABELS, LANGUAGE

from normexp.config.schema import CellConfig, NormConfig, RoleNormConfig, RolesConfig
from normexp.errors import UserError
from normexp.training.check import check_cell

MakeCell = Callable[..., CellConfig]
MEAN = "which is then the same for every text"
# A copied card over a layer that subtracts the mean over positions.
SNEAKY = """
from dataclasses import replace

from torch import nn

from normexp.norms import NORMS


class Sneaky(nn.Module):
    def forward(self, x):
        return x {0}


@NORMS.register("sneaky", replace(NORMS.get("no_norm").card))
def build_sneaky(num_features, *, dims):
    return Sneaky()
"""


@pytest.mark.parametrize(
    ("norm", "params", "changes"),
    [
        ("instance_norm", {}, {}),
        ("group_norm", {"num_groups": 8}, {}),
        ("batch_norm", {}, {"micro_batch_size": 1}),
        ("ghost_batch_norm", {"ghost_size": 1}, {}),
    ],
)
def test_an_encoder_must_not_average_what_its_last_norm_centred(
    make_text_cell: MakeCell, norm: str, params: dict[str, int], changes: dict[str, int]
) -> None:
    config = make_text_cell(LABELS, NormConfig(norm, params), **changes)
    with pytest.raises(UserError, match=rf"^norm={norm}: layer final_norm [^\n]*{MEAN}"):
        check_cell(config)
    config.norm.roles.final = RoleNormConfig("layer_norm")
    check_cell(config)


@pytest.mark.parametrize(
    ("norm", "params"),
    [("layer_norm", {}), ("group_norm", {"num_groups": 4}), ("batch_norm", {}), ("rms_norm", {})],
)
def test_what_leaves_something_to_the_mean_is_admitted(
    make_text_cell: MakeCell, norm: str, params: dict[str, int]
) -> None:
    check_cell(make_text_cell(LABELS, NormConfig(norm, params)))


def test_the_key_is_that_of_the_role(make_text_cell: MakeCell) -> None:
    roles = RolesConfig(qk=RoleNormConfig("instance_norm"))
    config = make_text_cell(LANGUAGE, NormConfig("layer_norm", roles=roles))
    config.allow_leak = False
    with pytest.raises(UserError, match=r"^norm\.roles\.qk=instance_norm: layer blocks\.0\."):
        check_cell(config)


@pytest.mark.parametrize(
    ("name", "code", "leaks"), [("one", "- x.mean(1, keepdim=True)", True), ("two", "* 2", False)]
)
def test_the_card_of_an_own_norm_is_not_taken_for_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, leaks: bool
) -> None:
    from normexp.norms import NORMS

    monkeypatch.setattr(NORMS, "_entries", dict(NORMS._entries))
    plugin = tmp_path / f"sneaky_{name}.py"
    plugin.write_text(SNEAKY.replace("{0}", code))
    command = f"train plugins=[{plugin}] norm=sneaky data=python_docs model=transformer"
    sizes = "placement=rezero_pre model.params.depth=1 model.params.width=8 budget.epochs=0.001"
    ended = normexp(
        *f"{command} {sizes} num_evaluations=1 seeds=[0]".split(), "data.params.num_train=40"
    )
    if leaks:
        assert ended.code == 2
        assert ended.err.startswith("normexp: norm=sneaky: its card says that positions do not mix")
        assert list(tmp_path.iterdir()) == [plugin]
    else:
        assert ended.code == 0
