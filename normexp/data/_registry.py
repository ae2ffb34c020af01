"""The registry of data sets and what each one declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normexp.registry import Registry


@dataclass(frozen=True)
class DatasetCard:
    """What is known about a data set without opening a file.

    Attributes:
        description: One line for ``normexp list data``.
        source: Where the data come from.
        num_classes: Number of labels; None where the next token is to be predicted.
        image_shape: Of images: channels, height and width as stored, before ``image_size``.
        num_train_val: Of images: samples that training and validation share.
        num_test: Of images: samples of the test split.
        is_text: Whether samples are texts; what is not declared here the data tell.
        needs_download: Whether files outside the installed packages are needed.
        check_files: Called with the builder's parameters; raises UserError when files are
            missing or damaged, and fetches what may be fetched. None where no file is read.
    """

    description: str
    source: str
    num_classes: int | None = None
    image_shape: tuple[int, int, int] | None = None
    num_train_val: int = 0
    num_test: int = 0
    is_text: bool = False
    needs_download: bool = False
    check_files: Callable[..., None] | None = None


DATASETS: Registry[DatasetCard] = Registry("data", "normexp.data")
