"""IMDB: 50,000 film reviews with a clear opinion, for or against.

Source: Maas et al. (2011), "Learning Word Vectors for Sentiment Analysis"; on the Hub
``stanfordnlp/imdb``. Its split ``unsupervised`` has no labels and is not used.
"""

from __future__ import annotations

from pathlib import Path

from normexp.data._dataset import Dataset
from normexp.data._files import missing_files_error
from normexp.data._huggingface import Original, Publication, find_files, read_utf8
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._text_classification import build_text_classification
from normexp.data._texts import LabelledTexts, PaddingName
from normexp.data._vocabulary import TokenizerName

# Folders of the authors' archive, in the order of the labels.
OPINIONS = ("neg", "pos")


def read_folders(path: Path) -> LabelledTexts:
    """Return the reviews of one of the authors' folders: a file each, those against first.

    Args:
        path: Folder with ``neg`` and ``pos``.

    Raises:
        UserError: If one of them has no review.
    """
    texts: list[str] = []
    labels: list[int] = []
    for label, opinion in enumerate(OPINIONS):
        files = sorted((path / opinion).glob("*.txt"), key=lambda file: file.name)
        if not files:
            holds = " and ".join(f"{name}/*.txt" for name in OPINIONS)
            raise missing_files_error(path, holds=holds, missing=[f"{opinion}/*.txt"])
        texts += [read_utf8(file) for file in files]
        labels += [label] * len(files)
    return LabelledTexts(texts, labels)


PUBLICATION = Publication(
    name="imdb",
    hub_id="stanfordnlp/imdb",
    config="plain_text",
    revision="e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
    folder="plain_text",
    num_rows={"train": 25_000, "test": 25_000},
    num_classes=2,
    original=Original("aclImdb", {"train": "train", "test": "test"}, read_folders),
)


def check_imdb(*, root: str | None, **_: object) -> None:
    """Raise unless the files are there; fetch them if ``root`` is None.

    Args:
        root: Folder of the files, or None.
        **_: The builder's other parameters.

    Raises:
        UserError: If a file is missing or cannot be fetched.
    """
    find_files(PUBLICATION, root)


@DATASETS.register(
    "imdb",
    DatasetCard(
        description="film reviews: for or against",
        source="Maas et al. (2011), Learning Word Vectors for Sentiment Analysis; stanfordnlp/imdb",
        num_classes=2,
        is_text=True,
        needs_download=True,
        check_files=check_imdb,
    ),
)
def build_imdb(
    *,
    root: str | None = None,
    tokenizer: TokenizerName = "words",
    max_vocabulary: int | None = 10_000,
    max_length: int = 256,
    min_length: int = 0,
    padding: PaddingName = "batch",
    padding_share: float = 0.0,
    split_seed: int = 0,
    num_val: int = 2500,
    num_test: int | None = None,
    num_train: int | None = None,
) -> Dataset:
    """Return the reviews with their official test split: 0 against, 1 for.

    Args:
        root: Folder of the Hub's Parquet files or of the authors' unpacked archive; None
            downloads. A folder that is named is only read.
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
