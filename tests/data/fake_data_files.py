"""Small files in the formats of the published data sets."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from normexp.data._images import RawImages


def make_raw(num_samples: int, shape: tuple[int, int, int], num_classes: int) -> RawImages:
    rng = np.random.default_rng(num_samples)
    images = rng.integers(0, 256, size=(num_samples, *shape), dtype=np.uint8)
    return RawImages(images, np.arange(num_samples) % num_classes)


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(">I", 0x0800 + array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_fashion_mnist(folder: Path, train: RawImages, test: RawImages) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, raw in (("train", train), ("t10k", test)):
        for stem, array in (
            (f"{prefix}-images-idx3-ubyte", raw.images[:, 0]),
            (f"{prefix}-labels-idx1-ubyte", raw.targets.astype(np.uint8)),
        ):
            (folder / f"{stem}.gz").write_bytes(gzip.compress(idx_bytes(array), mtime=0))


class Python2Pickler(pickle._Pickler):
    """Writes byte strings as Python 2 did, and dtype flags as NumPy did before 2."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def save_string(self, value: bytes | str) -> None:
        encoded = value if isinstance(value, bytes) else value.encode()
        self.write(pickle.BINSTRING + struct.pack("<i", len(encoded)) + encoded)
        self.memoize(value)

    dispatch[bytes] = save_string
    dispatch[str] = save_string


def python2_pickle(value: object) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(value)
    content = buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    # dtype('u1', False, True) of today was dtype('u1', 0, 1).
    return content.replace(b"\x89\x88\x87", b"K\x00K\x01\x87")


def cifar_batches(
    train: RawImages, test: RawImages, train_names: list[str], test_name: str, label_key: str
) -> dict[str, bytes]:
    parts = np.array_split(np.arange(len(train)), len(train_names))
    samples = {name: train.take(part) for name, part in zip(train_names, parts, strict=True)}
    samples[test_name] = test
    return {
        name: python2_pickle(
            {"data": raw.images.reshape(len(raw), -1), label_key: raw.targets.tolist()}
        )
        for name, raw in samples.items()
    }


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
