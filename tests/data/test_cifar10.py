import gzip
import hashlib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_data_files import cifar_batches, make_raw, python2_pickle, write_archive
from torchvision.datasets import CIFAR10

from normexp.data import Dataset, check_dataset, load_dataset
from normexp.errors import UserError

SHAPE = (3, 32, 32)
TRAIN, TEST = make_raw(23, SHAPE, 10), make_raw(7, SHAPE, 10)
BATCHES = cifar_batches(
    TRAIN, TEST, [f"data_batch_{k}" for k in range(1, 6)], "test_batch", "labels"
)
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"


def load(root: Path, **params: object) -> Dataset:
    return load_dataset(
        "cifar10", {"root": str(root), "num_val": 5, "verify_checksum": False, **params}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / FOLDER).mkdir()
    for name, content in BATCHES.items():
        (tmp_path / FOLDER / name).write_bytes(content)
    return tmp_path / FOLDER


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "packed" / ARCHIVE
    write_archive(path, {f"{FOLDER}/{name}": content for name, content in BATCHES.items()})
    return path


def test_archive_folder_and_batches_are_the_same_data(folder: Path, archive: Path) -> None:
    packed = load(archive.parent)
    assert packed.input_shape == SHAPE
    assert packed.num_classes == 10
    assert (len(packed.train), len(packed.val), len(packed.test)) == (18, 5, 7)
    assert packed.train.inputs.dtype == torch.float32
    assert load(folder.parent).fingerprint == packed.fingerprint
    assert load(folder).fingerprint == packed.fingerprint
    assert [path.name for path in archive.parent.iterdir()] == [ARCHIVE]  # Nothing is unpacked.


def test_pixels_and_labels_are_those_written(archive: Path) -> None:
    dataset = load(archive.parent)
    mean, std = (torch.tensor(x)[:, None, None] for x in (dataset.mean, dataset.std))
    pixels = ((dataset.test.inputs.double() * std + mean) * 255).round().numpy()
    np.testing.assert_array_equal(pixels, TEST.images)
    np.testing.assert_array_equal(dataset.test.targets, TEST.targets)
    # Every training image is once in train or val: compare their sums of pixels.
    pooled = torch.cat([dataset.train.inputs, dataset.val.inputs]).double() * std + mean
    sums = (pooled * 255).sum(dim=(1, 2, 3)).round().numpy()
    expected = TRAIN.images.astype(int).sum(axis=(1, 2, 3))
    assert len(np.unique(expected)) == len(expected)
    np.testing.assert_array_equal(np.sort(sums), np.sort(expected))


def test_the_written_format_is_what_torchvision_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = python2_pickle({"label_names": [f"class {k}" for k in range(10)]})
    (folder / "batches.meta").write_bytes(meta)
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in BATCHES.items()}
    names = [name for name in BATCHES if name != "test_batch"]
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name in names])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": hashlib.md5(meta).hexdigest()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Old pickles make some NumPy versions warn; ours not.
        theirs = CIFAR10(folder.parent, train=True)
    np.testing.assert_array_equal(theirs.data.transpose(0, 3, 1, 2), TRAIN.images)
    assert theirs.targets == TRAIN.targets.tolist()
    # With these checksums ours are verified too.
    check_dataset("cifar10", {"root": str(folder), "num_val": 5})


def test_missing_root_and_files_are_told(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder; name one that holds cifar-10"):
        load(tmp_path / "none")
    (folder / "data_batch_3").unlink()
    with pytest.raises(UserError, match="not there: data_batch_3; the folder must hold data_"):
        load(folder.parent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"must hold cifar-10-python\.tar\.gz or the folder cifar"):
        load(tmp_path / "empty")


@pytest.mark.parametrize("verify_checksum", [False, True])
def test_a_truncated_archive_is_told(archive: Path, verify_checksum: bool) -> None:
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"truncated file: {archive} ends early, after") as caught:
        load(archive.parent, verify_checksum=verify_checksum)
    assert caught.value.key == "data.params.root"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("verify_checksum", [False, True])
def test_a_truncated_batch_is_told(folder: Path, verify_checksum: bool) -> None:
    path = folder / "data_batch_1"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=f"truncated file: {path} ends early, after 5000 bytes"):
        load(folder, verify_checksum=verify_checksum)


def test_a_tar_that_ends_inside_a_whole_gzip_stream_is_told(archive: Path) -> None:
    content = gzip.decompress(archive.read_bytes())
    archive.write_bytes(gzip.compress(content[: len(content) // 2]))
    with pytest.raises(UserError, match="truncated file"):
        load(archive.parent)


def test_a_wrong_checksum_is_told_with_both(folder: Path, archive: Path) -> None:
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    says = f"wrong checksum: {archive} has MD5 {found}, expected c58f30108f718f92721af3b95e74349a"
    with pytest.raises(UserError, match=says):
        check_dataset("cifar10", {"root": str(archive.parent)})
    says = "wrong checksum: .*data_batch_1 has MD5 .*, expected c99cafc152244af753f735de768cd75f"
    with pytest.raises(UserError, match=says):
        check_dataset("cifar10", {"root": str(folder)})


def test_an_archive_without_a_batch_is_told(archive: Path) -> None:
    write_archive(archive, {f"{FOLDER}/test_batch": BATCHES["test_batch"]})
    with pytest.raises(UserError, match=r"it lacks data_batch_1, data_batch_2"):
        load(archive.parent)


def test_a_file_that_is_no_archive_is_told(archive: Path) -> None:
    for content in (b"<html>moved</html>", gzip.compress(b"no tar file" * 100)):
        archive.write_bytes(content)
        with pytest.raises(UserError, match="damaged file"):
            load(archive.parent)


def test_a_pickle_that_would_run_code_is_refused(folder: Path) -> None:
    (folder / "test_batch").write_bytes(b"cbuiltins\nprint\n(Vran\ntR.")
    with pytest.raises(UserError, match=r"builtins\.print is not allowed"):
        load(folder)


def test_a_batch_without_images_is_told(folder: Path) -> None:
    for value, says in (
        ({"data": np.zeros((2, 3072), np.uint8)}, "no data and labels in it"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, r"1 labels, but data of shape"),
        ({"data": np.zeros((1, 48), np.uint8), "labels": [1]}, r"data of shape \(1, 48\)"),
    ):
        (folder / "test_batch").write_bytes(python2_pickle(value))
        with pytest.raises(UserError, match=says):
            load(folder)


def test_without_a_root_the_archive_is_fetched(
    archive: Path, data_home: Path, fake_source, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_source.contents[ARCHIVE] = archive.read_bytes()
    monkeypatch.setattr(CIFAR10, "url", fake_source.url + ARCHIVE)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    check_dataset("cifar10", {})
    dataset = load_dataset("cifar10", {"num_val": 5})
    assert dataset.fingerprint == load(archive.parent).fingerprint
    assert fake_source.requests == [f"/{ARCHIVE}"]
    assert (data_home / "cifar10" / ARCHIVE).is_file()


def test_without_a_network_the_check_says_so(
    data_home: Path, fake_source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CIFAR10, "url", fake_source.url + ARCHIVE)
    with pytest.raises(UserError, match="answered 404") as caught:
        check_dataset("cifar10", {})
    assert caught.value.key == "data.params.root"
    assert not (data_home / "cifar10" / ARCHIVE).exists()
