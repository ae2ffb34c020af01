import gzip
import hashlib
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_data_files import idx_bytes, make_raw, write_fashion_mnist
from torchvision.datasets import FashionMNIST

from normexp.data import check_dataset, load_dataset
from normexp.errors import UserError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SHAPE = (1, 28, 28)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "fashion"
    write_fashion_mnist(folder, make_raw(30, SHAPE, 10), make_raw(8, SHAPE, 10))
    return folder


def load(root: Path, **params: object):
    return load_dataset(
        "fashion_mnist", {"root": str(root), "num_val": 5, "verify_checksum": False, **params}
    )


def test_a_folder_of_the_four_packed_files_is_read(root: Path) -> None:
    dataset = load(root)
    assert dataset.input_shape == SHAPE
    assert dataset.num_classes == 10
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (25, 5, 8)
    assert dataset.train.inputs.dtype == torch.float32
    assert dataset.train.targets.dtype == torch.int64
    # The official test split stays as it is, in its order.
    raw = make_raw(8, SHAPE, 10)
    pixels = (dataset.test.inputs.double() * dataset.std[0] + dataset.mean[0]) * 255
    np.testing.assert_array_equal(pixels.round().numpy(), raw.images)
    np.testing.assert_array_equal(dataset.test.targets, raw.targets)
    assert [path.suffix for path in root.iterdir()] == [".gz"] * 4


def test_files_unpacked_by_torchvision_are_the_same_data(root: Path, tmp_path: Path) -> None:
    unpacked = tmp_path / "tv" / "FashionMNIST" / "raw"
    unpacked.mkdir(parents=True)
    for path in root.iterdir():
        (unpacked / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    assert load(tmp_path / "tv").fingerprint == load(root).fingerprint
    assert load(unpacked).fingerprint == load(root).fingerprint
    assert len(FashionMNIST(tmp_path / "tv", train=True)) == 30  # As torchvision finds them.


def test_a_missing_folder_and_a_missing_file_are_told_apart(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder; name one that holds train-im"):
        load(tmp_path / "none")
    with pytest.raises(UserError, match="not there: the files; the folder must hold train-images"):
        load(tmp_path)
    (root / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"not there: t10k-labels-idx1-ubyte\.gz; the folder"):
        load(root)


@pytest.mark.parametrize("verify_checksum", [False, True])
def test_a_truncated_file_is_told(root: Path, verify_checksum: bool) -> None:
    path = root / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:1000])
    says = rf"truncated file: {path} ends early, after 1000 bytes"
    with pytest.raises(UserError, match=says) as caught:
        load(root, verify_checksum=verify_checksum)
    assert caught.value.key == "data.params.root"


def test_a_wrong_checksum_is_told_with_both(root: Path) -> None:
    says = r"wrong checksum: \S+/train-images-idx3-ubyte.gz has SHA-256 of its content [0-9a-f]{64}"
    with pytest.raises(UserError, match=says) as caught:
        check_dataset("fashion_mnist", {"root": str(root)})
    assert "expected c59f468a2f672dc8" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_something_else_is_told(root: Path) -> None:
    path = root / "train-labels-idx1-ubyte.gz"
    for content, says in (
        (b"<html>not found</html>", "Not a gzipped file"),
        (gzip.compress(b"\x00\x00\x08\x03" + bytes(12)), "not an idx file"),
        (gzip.compress(idx_bytes(np.zeros(7, dtype=np.uint8))), "7 labels for 30 images"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"damaged file: {path} \\(.*{says}"):
            load(root)


def test_images_of_another_size_are_told(root: Path, tmp_path: Path) -> None:
    write_fashion_mnist(root, make_raw(30, (1, 14, 14), 10), make_raw(8, (1, 14, 14), 10))
    with pytest.raises(UserError, match=r"images of shape \(14, 14\), not \(28, 28\)"):
        load(root)


def test_labels_outside_the_classes_are_told(root: Path) -> None:
    write_fashion_mnist(root, make_raw(30, SHAPE, 12), make_raw(8, SHAPE, 10))
    with pytest.raises(UserError, match="labels from 0 to 9 are needed, found 10"):
        load(root)


def test_without_a_root_the_files_are_fetched_once(
    root: Path, data_home: Path, fake_source, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_source.contents = {path.name: path.read_bytes() for path in root.iterdir()}
    monkeypatch.setattr(FashionMNIST, "mirrors", [fake_source.url])
    monkeypatch.setattr(
        FashionMNIST,
        "resources",
        [
            (name, hashlib.md5(content).hexdigest())
            for name, content in fake_source.contents.items()
        ],
    )
    params = {"num_val": 5, "verify_checksum": False}
    check_dataset("fashion_mnist", params)
    dataset = load_dataset("fashion_mnist", params)
    assert dataset.fingerprint == load(root).fingerprint
    assert sorted(fake_source.requests) == sorted(f"/{name}" for name in fake_source.contents)
    assert (data_home / "fashion_mnist" / "train-images-idx3-ubyte.gz").is_file()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_debians_files_are_the_published_ones() -> None:
    start = time.perf_counter()
    dataset = load_dataset("fashion_mnist", {"root": str(DEBIAN)})
    elapsed_s = time.perf_counter() - start
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (55_000, 5000, 10_000)
    # Published for the 60,000 training images: mean 0.2860, std 0.3530; ours leave out 5000.
    assert dataset.mean[0] == pytest.approx(0.2860, abs=2e-3)
    assert dataset.std[0] == pytest.approx(0.3530, abs=2e-3)
    assert torch.bincount(dataset.test.targets).tolist() == [1000] * 10
    assert (
        torch.bincount(torch.cat([dataset.train.targets, dataset.val.targets])).tolist()
        == [6000] * 10
    )
    # About 1.4 s on two cores; the bound catches a loop over samples, not a busy machine.
    assert elapsed_s < 10
