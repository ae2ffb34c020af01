"""AG News: 127,600 short news texts, 4 topics.

Source: Zhang, Zhao and LeCun (2015), "Character-level Convolutional Networks for Text
Classification", out of Gulli's corpus; on the Hub ``fancyzhx/ag_news``.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from normexp.data._dataset import Dataset
from normexp.data._files import damaged_error
from normexp.data._huggingface import Original, Publication, find_files, read_utf8
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._text_classification import build_text_classification
from normexp.data._texts import LabelledTexts, PaddingName
from normexp.data._vocabulary import TokenizerName


def read_csv(path: Path) -> LabelledTexts:
    """Return the rows of the authors' file: topic from 1, title, description; no header.

    As on the Hub, topics count from 0 and a text is its title, a space and its description.

    Args:
        path: The file.

    Raises:
        UserError: If a row is another.
    """
    texts, labels = [], []
    file = io.StringIO(read_utf8(path), newline="")
    try:
        for topic, title, description in csv.reader(file, skipinitialspace=True, strict=True):
            labels.append(int(topic) - 1)
            texts.append(f"{title} {description}")
    except (ValueError, csv.Error) as error:
        problem = f"row {len(texts)} is not topic, title, description: {error}"
        raise damaged_error(path, problem) from error
    return LabelledTexts(texts, labels)


PUBLICATION = Publication(
    name="ag_news",
    hub_id="fancyzhx/ag_news",
    config="default",
    revision="eb185aade064a813bc0b7f42de02595523103ca4",
    folder="data",
    num_rows={"train": 120_000, "test": 7600},
    num_classes=4,
    original=Original("ag_news_csv", {"train": "train.csv", "test": "test.csv"}, read_csv),
)


def check_ag_news(*, root: str | None, **_: object) -> None:
    """Raise unless the files are there; fetch them if ``root`` is None.

    Args:
        root: Folder of the files, or None.
        **_: The builder's other parameters.

    Raises:
        UserError: If a file is missing or cannot be fetched.
    """
    find_files(PUBLICATION, root)


@DATASETS.register(
    "ag_news",
    DatasetCard(
        description="short news: tell the topic",
        source="Zhang et al. (2015), Character-level Convolutional Networks for Text "
        "Classification; fancyzhx/ag_news",
        num_classes=4,
        is_text=True,
        needs_download=True,
        check_files=check_ag_news,
    ),
)
def build_ag_news(
    *,
    root: str | None = None,
    tokenizer: TokenizerName = "words",
    max_vocabulary: int | None = 10_000,
    max_length: int = 64,
    min_length: int = 0,
    padding: PaddingName = "batch",
    padding_share: float = 0.0,
    split_seed: int = 0,
    num_val: int = 5000,
    num_test: int | None = None,
    num_train: int | None = None,
) -> Dataset:
    """Return AG News with its official test split: World, Sports, Business, Sci/Tech.

    Args:
        root: Folder of the Hub's Parquet files or the authors' ``train.csv`` and ``test.csv``;
            None downloads. A folder that is named is only read.
        tokenizer: bytes, characters or words.
        max_vocabulary: Most token ids of characters or words; None for no limit.
        max_length: Most tokens of a text; the rest is cut off.
        min_length: Fewest tokens of a text; shorter ones are left out before the split.
        padding: ``batch``: a batch is as long as its longest text. ``longest``: all batches are
            as long as the longest text.
        padding_share: Share of positions that even the longest text leaves to padding; needs
            ``longest``.
        split_seed: Seed of the choice of validation texts out of the training texts, and of the
            order of the texts in each split.
        num_val: Texts of the validation split.
        num_test: Texts of the test split, the first ones; None for all.
        num_train: Texts of the training split, the first ones; None for all that are left.

    Raises:
        UserError: If a size is impossible, or a file is missing, damaged or cannot be fetched.
    """
    return build_text_classification(
        PUBLICATION,
        root=root,
        tokenizer=tokenizer,
        max_vocabulary=max_vocabulary,
        max_length=max_length,
        min_length=min_length,
        padding=padding,
        padding_share=padding_share,
        split_seed=split_seed,
        num_val=num_val,
        num_test=num_test,
        num_train=num_train,
    )
