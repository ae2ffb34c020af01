"""CIFAR-10: 60,000 colour photographs, 32x32, 10 classes.

Source: Krizhevsky (2009), "Learning Multiple Layers of Features from Tiny Images".
"""

from __future__ import annotations

from normexp.data._cifar import check_cifar, describe_cifar10, read_cifar
from normexp.data._dataset import Dataset
from normexp.data._images import assemble_dataset
from normexp.data._registry import DATASETS, DatasetCard


def check_cifar10(*, root: str | None, verify_checksum: bool, **_: object) -> None:
    """Raise unless the files are there, whole and right; fetch them if ``root`` is None.

    Args:
        root: Folder of the files, or None.
        verify_checksum: Whether the files must be the published ones.
        **_: The builder's other parameters.

    Raises:
        UserError: If a file is missing, truncated or another than published.
    """
    check_cifar(describe_cifar10(), root, verify_checksum)


@DATASETS.register(
    "cifar10",
    DatasetCard(
        description="colour photographs of animals, things and vehicles",
        source="Krizhevsky (2009), Learning Multiple Layers of Features from Tiny Images",
        num_classes=10,
        image_shape=(3, 32, 32),
        num_train_val=50_000,
        num_test=10_000,
        needs_download=True,
        check_files=check_cifar10,
    ),
)
def build_cifar10(
    *,
    root: str | None = None,
    split_seed: int = 0,
    num_val: int = 5000,
    num_train: int | None = None,
    image_size: int | None = None,
    verify_checksum: bool = True,
) -> Dataset:
    """Return CIFAR-10 with its official test split.

    Args:
        root: Folder that holds the published archive or its unpacked folder of batches; None
            downloads the archive. A folder that is named is only read.
        split_seed: Seed of the choice of validation samples out of the training set.
        num_val: Size of the validation split.
        num_train: Size of the training split; None takes all that is left (45,000).
        image_size: New height and width; None keeps 32.
        verify_checksum: Whether the files must be the published ones.

    Raises:
        UserError: If a size is impossible or a file is missing, truncated or another than
            published.
    """
    files = describe_cifar10()
    train_val, test = read_cifar(files, check_cifar(files, root, verify_checksum))
    return assemble_dataset(
        "cifar10",
        train_val,
        test,
        num_classes=10,
        max_value=255,
        split_seed=split_seed,
        num_val=num_val,
        num_train=num_train,
        image_size=image_size,
    )
