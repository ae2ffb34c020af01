"""Data sets whole in memory, and the augmentation of batches.

One data set a file; a file registers the name of its stem.
"""

from normexp.data._dataset import IGNORED_TARGET, PAD_ID, Dataset, Split, TextBytes, TokenTask
from normexp.data._load import DatasetFacts, check_dataset, describe_dataset, load_dataset
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data.augment import AugmentDraws, augment, draw_augmentation

__all__ = [
    "DATASETS",
    "IGNORED_TARGET",
    "PAD_ID",
    "AugmentDraws",
    "Dataset",
    "DatasetCard",
    "DatasetFacts",
    "Split",
    "TextBytes",
    "TokenTask",
    "augment",
    "check_dataset",
    "describe_dataset",
    "draw_augmentation",
    "load_dataset",
]
