"""From raw images to standardised, disjoint splits: the same way for every data set.

Shapes: N samples, C channels, H and W pixels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from normexp.data._dataset import Dataset, Split
from normexp.data._sizes import check_sizes
from normexp.errors import UserError
from normexp.random import random_stream

# Images handled at once: bounds the float64 and resizing temporaries to some tens of MB.
CHUNK_SIZE = 2048


@dataclass(frozen=True, eq=False)
class RawImages:
    """Images as stored, ``[N, C, H, W]`` uint8, and their labels, ``[N]`` int64."""

    images: NDArray[np.uint8]
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: NDArray[np.int64]) -> RawImages:
        """Return the samples at ``indices``, in that order."""
        return RawImages(self.images[indices], self.targets[indices])


def assemble_dataset(
    name: str,
    train_val: RawImages,
    test: RawImages,
    *,
    num_classes: int,
    max_value: int,
    split_seed: int,
    num_val: int,
    num_train: int | None,
    image_size: int | None,
) -> Dataset:
    """Split, resize and standardise raw images.

    The permutation of ``split_seed`` puts validation first and training after it, so a smaller
    ``num_train`` keeps the validation samples and a prefix of the training samples.

    Args:
        name: The registered name; part of the permutation's stream.
        train_val: Samples that training and validation share.
        test: The test samples, left as they are.
        num_classes: Number of labels.
        max_value: The raw value that means 1.0.
        split_seed: Seed of the permutation.
        num_val: Size of the validation split.
        num_train: Size of the training split; None takes all that is left.
        image_size: New height and width; None keeps the stored ones.

    Raises:
        UserError: If a size is below 1 or more than there is, or a label is none of the classes.
    """
    _check_labels(name, np.concatenate([train_val.targets, test.targets]), num_classes)
    num_train = check_sizes(
        num_available=len(train_val), num_val=num_val, num_train=num_train, image_size=image_size
    )
    order = random_stream(split_seed, "validation_split", name).permutation(len(train_val))
    raw = {
        "train": train_val.take(order[num_val : num_val + num_train]),
        "val": train_val.take(order[:num_val]),
        "test": test,
    }
    mean, std = _compute_statistics(raw["train"].images, max_value, image_size)
    splits = {
        split: Split(
            _standardise(samples.images, max_value, image_size, mean, std),
            torch.from_numpy(samples.targets.astype(np.int64)),
        )
        for split, samples in raw.items()
    }
    return Dataset(
        name=name,
        num_classes=num_classes,
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
        fingerprint=_compute_fingerprint(raw, splits["train"].inputs.shape[2:]),
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
    )


def _check_labels(name: str, targets: NDArray[np.int64], num_classes: int) -> None:
    """Raise unless every label is one of the classes; files may be a user's own."""
    wrong = targets[(targets < 0) | (targets >= num_classes)]
    if len(wrong):
        raise UserError(
            "data", name, f"labels from 0 to {num_classes - 1} are needed, found {wrong[0]}"
        )


def _resize(images: NDArray[np.uint8], image_size: int | None) -> NDArray[np.float64]:
    """Return one chunk as float64, resized by antialiased bilinear interpolation."""
    values = images.astype(np.float64)
    if image_size is None or images.shape[2:] == (image_size, image_size):
        return values
    resized = functional.interpolate(
        torch.from_numpy(values), size=(image_size, image_size), mode="bilinear", antialias=True
    )
    return resized.numpy()


def _compute_statistics(
    images: NDArray[np.uint8], max_value: int, image_size: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation per channel, in units of ``max_value``.

    The sums run in NumPy over raw values: whole numbers add exactly in float64, so that
    without resizing neither threads nor chunks can change a digit.
    """
    total = np.zeros(images.shape[1])
    total_of_squares = np.zeros(images.shape[1])
    num_pixels = 0
    for start in range(0, len(images), CHUNK_SIZE):
        values = _resize(images[start : start + CHUNK_SIZE], image_size)
        total += values.sum(axis=(0, 2, 3))
        total_of_squares += np.square(values).sum(axis=(0, 2, 3))
        num_pixels += values.size // values.shape[1]
    mean = total / num_pixels
    variance = np.maximum(total_of_squares / num_pixels - np.square(mean), 0.0)
    # A channel without contrast carries nothing to scale.
    std = np.where(variance > 0.0, np.sqrt(variance), float(max_value))
    return mean / max_value, std / max_value


def _standardise(
    images: NDArray[np.uint8],
    max_value: int,
    image_size: int | None,
    mean: NDArray[np.float64],
    std: NDArray[np.float64],
) -> Tensor:
    """Return ``(pixel / max_value - mean) / std`` as float32, one chunk at a time."""
    size = images.shape[2:] if image_size is None else (image_size, image_size)
    out = np.empty((len(images), images.shape[1], *size), dtype=np.float32)
    scale = (1.0 / (std * max_value))[:, None, None]
    shift = (mean / std)[:, None, None]
    for start in range(0, len(images), CHUNK_SIZE):
        chunk = _resize(images[start : start + CHUNK_SIZE], image_size)
        out[start : start + CHUNK_SIZE] = chunk * scale - shift
    return torch.from_numpy(out)


def _compute_fingerprint(raw: dict[str, RawImages], shown_size: torch.Size) -> str:
    """Return a hash over pixels, labels, their order, and the size they are shown at.

    Pixels are hashed before resizing: those bytes are the same on every machine.
    """
    digest = hashlib.sha256(f"shown_size={tuple(shown_size)}".encode())
    for split, samples in raw.items():
        digest.update(f";{split}:{samples.images.shape}".encode())
        digest.update(np.ascontiguousarray(samples.images).data)
        digest.update(np.ascontiguousarray(samples.targets.astype("<i8")).data)
    return digest.hexdigest()
