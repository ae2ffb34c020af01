import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from fake_data_files import make_raw, write_fashion_mnist

from normexp.data import DATASETS, check_dataset, describe_dataset, load_dataset
from normexp.errors import UserError

CONF = Path(__file__).parents[2] / "conf" / "data"


def test_datasets_are_those_with_a_configuration() -> None:
    assert DATASETS.names() == sorted(path.stem for path in CONF.glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_configuration_holds_every_parameter_with_its_default(name: str) -> None:
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    defaults = {
        # "???" is how Hydra writes a value that only the user can give.
        key: "???" if parameter.default is parameter.empty else parameter.default
        for key, parameter in DATASETS.get(name).parameters().items()
    }
    assert config["name"] == name
    assert config["params"] == defaults
    assert set(config["augment"]) == {"crop_padding", "horizontal_flip"}


def test_what_is_declared_is_what_is_loaded() -> None:
    params = {"num_test": 400, "num_val": 100, "image_size": 16}
    facts = describe_dataset("digits", params)
    dataset = load_dataset("digits", params)
    assert facts.input_shape == dataset.input_shape == (1, 16, 16)
    assert facts.num_classes == dataset.num_classes
    assert (facts.num_train, facts.num_val, facts.num_test) == (1297, 100, 400)
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (1297, 100, 400)


@pytest.mark.parametrize(
    ("name", "num_train", "shape"),
    [("fashion_mnist", 55_000, (1, 28, 28)), ("cifar10", 45_000, (3, 32, 32))],
)
def test_sizes_are_declared_without_files(
    name: str, num_train: int, shape: tuple[int, int, int], data_home: Path
) -> None:
    facts = describe_dataset(name, {})
    assert (facts.num_train, facts.num_val, facts.num_test) == (num_train, 5000, 10_000)
    assert facts.input_shape == shape
    assert not data_home.exists()


def test_two_loads_are_identical_and_the_second_is_free() -> None:
    first = load_dataset("digits", {"split_seed": 9})
    assert load_dataset("digits", {"split_seed": 9, "num_val": 297}) is first
    load_dataset("digits", {"split_seed": 10})  # Takes the one place in memory.
    again = load_dataset("digits", {"split_seed": 9})
    assert again is not first
    assert again.fingerprint == first.fingerprint
    for split in ("train", "val", "test"):
        assert torch.equal(getattr(again, split).inputs, getattr(first, split).inputs)
        assert torch.equal(getattr(again, split).targets, getattr(first, split).targets)


def test_texts_do_not_depend_on_hash_seed_locale_or_process(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("naïve \u2603 text\n" * 100, encoding="utf-8")
    texts = {"python_docs": {}, "docstrings": {}, "text_file": {"path": str(path)}}
    code = f"""
from normexp.data import load_dataset
for name, params in {texts!a}.items():
    print(load_dataset(name, params).fingerprint)
"""
    expected = [load_dataset(name, params).fingerprint for name, params in texts.items()]
    # An ASCII locale, and kept so: Python would turn to UTF-8 by itself. Strings hash otherwise
    # than in this process, unless its seed is set to this one.
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONHASHSEED": "7"}
    environment = {**os.environ, **settings}
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.split() == expected


def test_unknown_names_come_with_the_choices() -> None:
    for act in (load_dataset, check_dataset, describe_dataset):
        with pytest.raises(UserError, match="data=digit: did you mean digits") as caught:
            act("digit", {})
        assert caught.value.key == "data"


def test_a_relative_root_is_taken_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"root": "files", "verify_checksum": False, "num_val": 2}
    for folder, num_train in (("one", 6), ("two", 9)):
        write_fashion_mnist(
            tmp_path / folder / "files",
            make_raw(num_train, (1, 28, 28), 10),
            make_raw(3, (1, 28, 28), 10),
        )
        monkeypatch.chdir(tmp_path / folder)
        assert len(load_dataset("fashion_mnist", params).train) == num_train - 2


def test_check_finds_what_a_load_would() -> None:
    check_dataset("digits", {})
    with pytest.raises(UserError, match=r"data\.params\.num_train=5000: a whole number from 1"):
        check_dataset("digits", {"num_train": 5000})
    with pytest.raises(UserError, match=r"data\.params\.root=/nowhere/at all: there is no such"):
        check_dataset("fashion_mnist", {"root": "/nowhere/at all"})
