"""What makes two configurations the same cell: everything that can change a number, and no more."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normexp.config.schema import (
    BudgetConfig,
    CellConfig,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    PlacementConfig,
    RoleNormConfig,
    RolesConfig,
    ScheduleConfig,
)
from normexp.records import NUMERICS_VERSION, cell_name, hash_of, identity, identity_of, run_id

CELL = CellConfig(
    data=DataConfig("digits", {"root": "/data", "path": "/data/a.txt", "num_val": 297}),
    model=ModelConfig("cifar_resnet", {"depth": 8, "width": 16}),
    norm=NormConfig(
        "group_norm", {"num_groups": 8}, RolesConfig(stem=RoleNormConfig("batch_norm"))
    ),
    placement=PlacementConfig("res_post"),
    optimizer=OptimizerConfig("sgd", 0.1, 5e-4, ["weight"], {"momentum": 0.9}),
    schedule=ScheduleConfig("cosine", 0.1, {"final_fraction": 0.0}),
    budget=BudgetConfig(epochs=4.0),
    probes=["running_statistics"],
    logger=LoggerConfig({"csv": {}}),
).to_plain()

# Everything else must change the hash: a new key counts until somebody says here that it cannot.
CANNOT_CHANGE_A_NUMBER = {
    "name",
    "output_root",
    "experiment",
    "plugins",
    "seeds",
    "data.params.root",
    "data.params.path",
    "trainer.checkpoint_interval_s",
    "logger.trackers.csv",
}


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def changed(key: str) -> dict[str, Any]:
    config = copy.deepcopy(CELL)
    *parents, last = key.split(".")
    node: Any = config
    for parent in parents:
        node = node[parent]
    node[last] = "something else"
    return config


@pytest.mark.parametrize("key", sorted(leaves(CELL)))
def test_a_leaf_changes_the_cell_unless_it_cannot_change_a_number(key):
    is_same = cell_name(changed(key), "f").rpartition("-")[2] == cell_name(CELL, "f")[-8:]
    assert is_same == (key in CANNOT_CHANGE_A_NUMBER)
    assert (run_id(0, changed(key), "f") == run_id(0, CELL, "f")) == is_same


def test_the_keys_left_out_are_all_there():
    assert set(leaves(CELL)) >= CANNOT_CHANGE_A_NUMBER


def test_identity_leaves_the_configuration_as_it_was():
    before = copy.deepcopy(CELL)
    identity_of(CELL)
    assert before == CELL


def shuffled(value: Any, draw: st.DataObject) -> Any:
    if not isinstance(value, dict):
        return value
    keys = draw.draw(st.permutations(list(value)))
    return {key: shuffled(value[key], draw) for key in keys}


@given(st.data())
def test_the_order_of_keys_does_not_matter(data):
    assert cell_name(shuffled(CELL, data), "f") == cell_name(CELL, "f")


def test_seed_data_and_numerics_make_another_run(monkeypatch):
    first = run_id(0, CELL, "f")
    assert len(first) == 16
    assert set(first) <= set("0123456789abcdef")
    assert run_id(1, CELL, "f") != first
    assert run_id(0, CELL, "g") != first
    assert cell_name(CELL, "g") != cell_name(CELL, "f")
    before = cell_name(CELL, "f")
    monkeypatch.setattr(identity, "NUMERICS_VERSION", NUMERICS_VERSION + 1)
    assert run_id(0, CELL, "f") != first
    assert cell_name(CELL, "f") != before


def test_one_type_of_number_is_not_another():
    # 1, 1.0 and True are equal in Python, but not as settings of a layer.
    assert len({hash_of({"a": value}) for value in (1, 1.0, True, "1", None)}) == 5


def test_a_cell_is_named_for_people_and_safe_for_every_file_system():
    name = cell_name(CELL, "f")
    assert name.startswith("digits-cifar_resnet-group_norm-res_post-mb32x1-")
    # R58: brackets, commas, slashes and length of what a user wrote must not reach a path.
    wild = {**CELL, "norm": {"name": "a/b,[c]=d é" + "x" * 200, "params": {}, "roles": {}}}
    name = cell_name(wild, "f")
    assert len(name) <= 89
    assert all(character.isascii() for character in name)
    assert not set(name) & set("/\\,[]= :*?")


def test_a_model_without_branches_has_no_placement_in_its_name():
    assert cell_name({**CELL, "placement": None}, "f").startswith(
        "digits-cifar_resnet-group_norm-mb32x1-"
    )


def test_the_hash_is_that_of_every_other_machine():
    # sha256 of {"a":[1,2.5,null],"b":true}: sorted keys, no blanks, so others can recompute it.
    digest = "5bfed00731eb76e3e9217d76fb62e4e7e9c588f33fb29cd3234a5204672b3f47"
    assert hash_of({"b": True, "a": [1, 2.5, None]}) == digest
