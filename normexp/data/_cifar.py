"""CIFAR-10 and CIFAR-100 lie on disk in one format, which is read here.

The published archive is read as it is, in memory: where nothing is unpacked, nothing can be
half unpacked. The batches are Python 2 pickles; the reader takes arrays and plain values from
them and refuses everything else, so a data file cannot run code.
"""

from __future__ import annotations

import codecs
import io
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from normexp.data._download import RemoteFile, fetch_file
from normexp.data._files import (
    check_checksum,
    damaged_error,
    data_home,
    hash_file,
    missing_files_error,
    reading,
    resolve_root,
    truncated_error,
)
from normexp.data._images import RawImages
from normexp.errors import UserError


@dataclass(frozen=True)
class CifarFiles:
    """The files of one of the two data sets; checksums are MD5, as published."""

    name: str
    archive: RemoteFile
    base_folder: str
    train: dict[str, str]
    test: dict[str, str]
    label_key: str

    @property
    def holds(self) -> str:
        """What a root folder must hold, for messages."""
        return f"{self.archive.filename} or the folder {self.base_folder}"


def describe_cifar10() -> CifarFiles:
    """Return what torchvision knows about CIFAR-10's files."""
    from torchvision.datasets import CIFAR10

    return _describe("cifar10", CIFAR10, "labels")


def describe_cifar100() -> CifarFiles:
    """Return what torchvision knows about CIFAR-100's files; labels are the 100 fine ones."""
    from torchvision.datasets import CIFAR100

    return _describe("cifar100", CIFAR100, "fine_labels")


def check_cifar(files: CifarFiles, root: str | None, verify_checksum: bool) -> Path:
    """Return the archive or the folder of batches once it is found to be whole.

    Args:
        files: What must be there.
        root: Folder that holds it; None for the download.
        verify_checksum: Whether the files must be the published ones.

    Raises:
        UserError: If a file is missing, truncated or another than published.
    """
    path = _find(files, root)
    if not verify_checksum:
        return path
    if path.is_dir():
        for filename, md5 in {**files.train, **files.test}.items():
            _check_batch(path / filename, md5)
        return path
    found = hash_file(path, "md5")
    if found != files.archive.md5:
        hash_file(path, "md5", unpacked=True)  # Tells a truncated file from an exchanged one.
    check_checksum(path, files.archive.md5, found, "MD5")
    return path


def read_cifar(files: CifarFiles, path: Path) -> tuple[RawImages, RawImages]:
    """Return the official training and test images.

    Args:
        files: Which batches there are.
        path: The archive or the folder of batches.

    Raises:
        UserError: If a batch is missing or cannot be read.
    """
    names = [*files.train, *files.test]
    batches = _read_folder(path, names) if path.is_dir() else _read_archive(files, path, names)
    train = [_to_images(batches[name], files.label_key, path / name) for name in files.train]
    test = [_to_images(batches[name], files.label_key, path / name) for name in files.test]
    return _concatenate(train), _concatenate(test)


def _describe(name: str, source: Any, label_key: str) -> CifarFiles:
    """Read the attributes of a torchvision class."""
    return CifarFiles(
        name=name,
        archive=RemoteFile(source.url, source.filename, source.tgz_md5),
        base_folder=source.base_folder,
        train=dict(source.train_list),
        test=dict(source.test_list),
        label_key=label_key,
    )


def _find(files: CifarFiles, root: str | None) -> Path:
    """Return the archive or the folder of batches."""
    if root is None:
        return fetch_file(files.archive, data_home() / files.name)
    base = resolve_root(root, holds=files.holds)
    names = [*files.train, *files.test]
    # The archive first: a folder beside it may be half unpacked.
    if (base / files.archive.filename).is_file():
        return base / files.archive.filename
    for folder in (base / files.base_folder, base):
        missing = [name for name in names if not (folder / name).is_file()]
        if not missing:
            return folder
        if folder.is_dir() and len(missing) < len(names):
            raise missing_files_error(folder, holds=", ".join(names), missing=missing)
    raise missing_files_error(base, holds=files.holds)


def _check_batch(path: Path, md5: str) -> None:
    """Check one unpacked batch, telling a truncated file from an exchanged one."""
    found = hash_file(path, "md5")
    if found != md5:
        try:
            _unpickle(path.read_bytes(), path)
        except UserError as error:
            if "truncated" in error.expected:
                raise
        check_checksum(path, md5, found, "MD5")


def _read_folder(path: Path, names: list[str]) -> dict[str, Any]:
    """Return the unpickled batches of a folder."""
    batches = {}
    for name in names:
        with reading(path / name):
            batches[name] = _unpickle((path / name).read_bytes(), path / name)
    return batches


def _read_archive(files: CifarFiles, path: Path, names: list[str]) -> dict[str, Any]:
    """Return the unpickled batches of the archive, in one pass over it."""
    wanted = {f"{files.base_folder}/{name}": name for name in names}
    batches = {}
    try:
        with reading(path), tarfile.open(path, "r|gz") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.name in wanted else None
                if stream is not None:
                    batches[wanted[member.name]] = _unpickle(stream.read(), path)
    except tarfile.ReadError as error:
        if "unexpected end" in str(error):
            raise truncated_error(path) from error
        raise damaged_error(path, error) from error
    missing = [name for name in names if name not in batches]
    if missing:
        raise damaged_error(path, f"it lacks {', '.join(missing)}")
    return batches


def _to_images(batch: Any, label_key: str, path: Path) -> RawImages:
    """Return the images and labels of one batch."""
    try:
        images = np.asarray(batch["data"])
        targets = np.asarray(batch[label_key], dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_error(path, f"no data and {label_key} in it") from error
    if images.dtype != np.uint8 or images.shape != (len(targets), 3 * 32 * 32):
        raise damaged_error(path, f"{len(targets)} labels, but data of shape {images.shape}")
    return RawImages(images.reshape(-1, 3, 32, 32), targets)


def _concatenate(parts: list[RawImages]) -> RawImages:
    """Return several batches as one."""
    return RawImages(
        np.concatenate([part.images for part in parts]),
        np.concatenate([part.targets for part in parts]),
    )


def _unpickle(content: bytes, path: Path) -> Any:
    """Return the value of a Python 2 pickle of arrays and plain values."""
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except EOFError as error:
        raise truncated_error(path) from error
    except Exception as error:  # A damaged pickle can raise almost anything.
        if "truncated" in str(error):
            raise truncated_error(path) from error
        raise damaged_error(path, f"not a batch of images: {error}") from error


def _reconstruct(kind: type, shape: tuple[int, ...], code: object) -> NDArray[Any]:
    """Return the empty array that the pickle then fills."""
    return np.ndarray(shape, dtype=np.uint8)


def _make_dtype(name: str, *_: object) -> np.dtype[Any]:
    """Return a dtype; the flags after the name, as old NumPy wrote them, make new NumPy warn."""
    return np.dtype(name)


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that makes NumPy arrays and nothing else."""

    _allowed: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {
        # The modules as old and as new NumPy calls them.
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): _make_dtype,
        # How Python 3 writes bytes for Python 2.
        ("_codecs", "encode"): codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return one of the few allowed callables."""
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it") from None
