"""Fashion-MNIST: 70,000 grey images of clothing, 28x28, ten classes.

Source: Xiao, Rasul & Vollgraf (2017), arXiv:1708.07747.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from normexp.data._dataset import Dataset
from normexp.data._download import RemoteFile, fetch_file
from normexp.data._files import (
    check_checksum,
    damaged_error,
    data_home,
    hash_file,
    missing_files_error,
    reading,
    resolve_root,
)
from normexp.data._images import RawImages, assemble_dataset
from normexp.data._registry import DATASETS, DatasetCard

# SHA-256 of the unpacked content: the same for the original .gz files, for Debian's (whose gzip
# headers are normalised, so that their own checksums differ), and for torchvision's unpacked files.
CONTENT_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
HOLDS = (
    "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
    "t10k-labels-idx1-ubyte.gz (Debian's package dataset-fashion-mnist puts them into "
    "/usr/share/datasets/fashion-mnist)"
)


def check_fashion_mnist(*, root: str | None, verify_checksum: bool, **_: object) -> None:
    """Raise unless the four files are there, whole and right; fetch them if ``root`` is None.

    Args:
        root: Folder of the files, or None.
        verify_checksum: Whether the content must be the published one.
        **_: The builder's other parameters.

    Raises:
        UserError: If a file is missing, truncated or another than published.
    """
    for stem, path in _find_files(root).items():
        found = hash_file(path, "sha256", unpacked=path.suffix == ".gz")
        if verify_checksum:
            check_checksum(path, CONTENT_SHA256[stem], found, "SHA-256 of its content")


@DATASETS.register(
    "fashion_mnist",
    DatasetCard(
        description="grey images of clothing",
        source="Xiao, Rasul & Vollgraf (2017), arXiv:1708.07747",
        num_classes=10,
        image_shape=(1, 28, 28),
        num_train_val=60_000,
        num_test=10_000,
        needs_download=True,
        check_files=check_fashion_mnist,
    ),
)
def build_fashion_mnist(
    *,
    root: str | None = None,
    split_seed: int = 0,
    num_val: int = 5000,
    num_train: int | None = None,
    image_size: int | None = None,
    verify_checksum: bool = True,
) -> Dataset:
    """Return Fashion-MNIST with its official test split.

    Args:
        root: Folder that holds the four files, packed or not, directly or as torchvision lays
            them out; None downloads them. A folder that is named is only read.
        split_seed: Seed of the choice of validation samples out of the training set.
        num_val: Size of the validation split.
        num_train: Size of the training split; None takes all that is left (55,000).
        image_size: New height and width; None keeps 28.
        verify_checksum: Whether the files must be the published ones.

    Raises:
        UserError: If a size is impossible or a file is missing, truncated or another than
            published.
    """
    check_fashion_mnist(root=root, verify_checksum=verify_checksum)
    paths = _find_files(root)
    return assemble_dataset(
        "fashion_mnist",
        _read_images(paths["train-images-idx3-ubyte"], paths["train-labels-idx1-ubyte"]),
        _read_images(paths["t10k-images-idx3-ubyte"], paths["t10k-labels-idx1-ubyte"]),
        num_classes=10,
        max_value=255,
        split_seed=split_seed,
        num_val=num_val,
        num_train=num_train,
        image_size=image_size,
    )


def _find_files(root: str | None) -> dict[str, Path]:
    """Return the path of each of the four files."""
    if root is None:
        folder = data_home() / "fashion_mnist"
        return {stem: fetch_file(remote, folder) for stem, remote in _remote_files().items()}
    base = resolve_root(root, holds=HOLDS)
    for folder in (base, base / "FashionMNIST" / "raw"):
        paths = {stem: _packed_or_not(folder, stem) for stem in CONTENT_SHA256}
        missing = [f"{stem}.gz" for stem, path in paths.items() if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise missing_files_error(folder, holds=HOLDS, missing=missing)
    raise missing_files_error(base, holds=HOLDS)


def _packed_or_not(folder: Path, stem: str) -> Path:
    """Return the .gz file if there is one: an unpacked file beside it may be half written."""
    packed = folder / f"{stem}.gz"
    return packed if packed.is_file() else folder / stem


def _remote_files() -> dict[str, RemoteFile]:
    """Return what torchvision knows about the downloads."""
    from torchvision.datasets import FashionMNIST

    return {
        filename.removesuffix(".gz"): RemoteFile(FashionMNIST.mirrors[0] + filename, filename, md5)
        for filename, md5 in FashionMNIST.resources
    }


def _read_images(images_path: Path, labels_path: Path) -> RawImages:
    """Return the images and labels of one official split."""
    # Imported here: it takes longer than everything else in this module.
    from torchvision.datasets.mnist import read_image_file, read_label_file

    images = _read_idx(images_path, read_image_file)
    targets = _read_idx(labels_path, read_label_file)
    if images.shape[1:] != (28, 28):
        raise damaged_error(images_path, f"images of shape {tuple(images.shape[1:])}, not (28, 28)")
    if len(images) != len(targets):
        raise damaged_error(labels_path, f"{len(targets)} labels for {len(images)} images")
    return RawImages(images.numpy()[:, None], targets.numpy().astype(np.int64))


def _read_idx(path: Path, read: Callable[[str], Tensor]) -> Tensor:
    """Read an idx file, packed or not, with torchvision's reader, which wants a plain file."""
    with tempfile.TemporaryDirectory(prefix="normexp-") as folder, reading(path):
        plain = path
        if path.suffix == ".gz":
            plain = Path(folder) / path.stem
            with gzip.open(path) as packed, plain.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        try:
            return read(str(plain))
        except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise damaged_error(path, f"not an idx file: {error}") from error
