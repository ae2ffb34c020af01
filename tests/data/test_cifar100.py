import hashlib
from pathlib import Path

import numpy as np
import pytest
from fake_data_files import cifar_batches, make_raw, write_archive

from normexp.data import check_dataset, load_dataset
from normexp.errors import UserError

SHAPE = (3, 32, 32)
TRAIN, TEST = make_raw(120, SHAPE, 100), make_raw(101, SHAPE, 100)
BATCHES = cifar_batches(TRAIN, TEST, ["train"], "test", "fine_labels")
ARCHIVE = "cifar-100-python.tar.gz"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / ARCHIVE
    write_archive(path, {f"cifar-100-python/{name}": text for name, text in BATCHES.items()})
    return path


def test_the_hundred_fine_labels_are_read(archive: Path) -> None:
    dataset = load_dataset(
        "cifar100", {"root": str(archive.parent), "num_val": 20, "verify_checksum": False}
    )
    assert dataset.input_shape == SHAPE
    assert dataset.num_classes == 100
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (100, 20, 101)
    np.testing.assert_array_equal(dataset.test.targets, TEST.targets)
    assert dataset.test.targets.max() == 99


def test_ten_class_batches_are_refused(archive: Path) -> None:
    batches = cifar_batches(TRAIN, TEST, ["train"], "test", "labels")
    write_archive(archive, {f"cifar-100-python/{name}": text for name, text in batches.items()})
    with pytest.raises(UserError, match="no data and fine_labels in it"):
        load_dataset("cifar100", {"root": str(archive.parent), "verify_checksum": False})


def test_a_wrong_checksum_is_told_with_both(archive: Path) -> None:
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    says = f"{archive} has MD5 {found}, expected eb9058c3a382ffc7106e4002c42a8d85"
    with pytest.raises(UserError, match=says):
        check_dataset("cifar100", {"root": str(archive.parent)})
