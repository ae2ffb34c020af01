"""Handwritten digits, 8x8: real images that come with scikit-learn.

Source: E. Alpaydin, C. Kaynak (1998), "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, test part; as ``sklearn.datasets.load_digits``.
"""

from __future__ import annotations

import numpy as np

from normexp.data._dataset import Dataset
from normexp.data._images import RawImages, assemble_dataset
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._sizes import check_num_test
from normexp.random import random_stream

NUM_SAMPLES = 1797
MAX_VALUE = 16  # Each stored pixel counts the set pixels of a 4x4 block.


@DATASETS.register(
    "digits",
    DatasetCard(
        description="handwritten digits, comes with scikit-learn",
        source="UCI Optical Recognition of Handwritten Digits (Alpaydin & Kaynak 1998)",
        num_classes=10,
        image_shape=(1, 8, 8),
        num_train_val=NUM_SAMPLES - 500,
        num_test=500,
    ),
)
def build_digits(
    *,
    split_seed: int = 0,
    num_val: int = 297,
    num_test: int = 500,
    num_train: int | None = None,
    image_size: int | None = None,
) -> Dataset:
    """Return the 1797 digits, split at random: there is no official split.

    Args:
        split_seed: Seed of the split; the test samples depend on it and ``num_test`` alone.
        num_val: Size of the validation split.
        num_test: Size of the test split.
        num_train: Size of the training split; None takes all that is left (1000).
        image_size: New height and width; None keeps 8.

    Raises:
        UserError: If a size is below 1 or more than there is.
    """
    # Imported here: listing data sets must not cost the import of scikit-learn.
    from sklearn.datasets import load_digits

    check_num_test(num_test, NUM_SAMPLES)
    stored = load_digits()
    samples = RawImages(
        stored.images.astype(np.uint8)[:, None], np.asarray(stored.target, dtype=np.int64)
    )
    order = random_stream(split_seed, "test_split", "digits").permutation(NUM_SAMPLES)
    return assemble_dataset(
        "digits",
        samples.take(order[num_test:]),
        samples.take(order[:num_test]),
        num_classes=10,
        max_value=MAX_VALUE,
        split_seed=split_seed,
        num_val=num_val,
        num_train=num_train,
        image_size=image_size,
    )
