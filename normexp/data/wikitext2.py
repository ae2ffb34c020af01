"""WikiText-2, raw: Wikipedia articles as they stand, unknown words and all, for language modeling.

Source: Merity et al. (2016), "Pointer Sentinel Mixture Models"; on the Hub
``Salesforce/wikitext``, ``wikitext-2-raw-v1``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from normexp.data._dataset import Dataset
from normexp.data._huggingface import Original, Publication, find_files, read_splits, read_utf8
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._texts import LabelledTexts, assemble_language_model
from normexp.data._vocabulary import TokenizerName
from normexp.errors import UserError

# "= Title =" begins an article, "= = Section = =" a section of one.
_TITLE = re.compile(r"= (?!= ).*(?<! =) =")


def read_lines(path: Path) -> LabelledTexts:
    """Return the lines of the authors' file; they have no labels.

    Args:
        path: The file.

    Raises:
        UserError: If it cannot be read.
    """
    return LabelledTexts(read_utf8(path).removesuffix("\n").split("\n"), [])


def join_articles(lines: Sequence[str]) -> list[str]:
    r"""Return the articles of a split: each from its title to the line before the next one's.

    The Hub and the authors publish lines. A title is a line of the form ``= Title =`` between
    two empty ones; what stands before the first is an article too if it has any text. Every line
    ends in one line feed. Empty lines hold a space in the authors' files, and nothing on the Hub
    and here.

    Args:
        lines: In their order, with or without their line feed.

    Examples:
        >>> join_articles(["", " = A = \n", "", " One . \n", "", " = B = \n", ""])
        [' = A = \n\n One . \n\n', ' = B = \n\n']
    """
    # One more on each side: line i is between i and i + 2.
    is_empty = [True, *(not line.strip() for line in lines), True]
    articles: list[list[str]] = [[]]
    for index, line in enumerate(lines):
        stands_alone = is_empty[index] and is_empty[index + 2]
        if stands_alone and _TITLE.fullmatch(line.strip()):
            articles.append([])
        articles[-1].append("\n" if is_empty[index + 1] else line.rstrip("\r\n") + "\n")
    joined = ("".join(article) for article in articles)
    return [article for article in joined if article.strip()]


PUBLICATION = Publication(
    name="wikitext2",
    hub_id="Salesforce/wikitext",
    config="wikitext-2-raw-v1",
    revision="b08601e04326c79dfdd32d625aee71d232d685c3",
    folder="wikitext-2-raw-v1",
    num_rows={"train": 36_718, "validation": 3760, "test": 4358},
    num_classes=None,
    original=Original(
        "wikitext-2-raw",
        {"train": "wiki.train.raw", "validation": "wiki.valid.raw", "test": "wiki.test.raw"},
        read_lines,
    ),
)


def check_wikitext2(*, root: str | None, **_: object) -> None:
    """Raise unless the files are there; fetch them if ``root`` is None.

    Args:
        root: Folder of the files, or None.
        **_: The builder's other parameters.

    Raises:
        UserError: If a file is missing or cannot be fetched.
    """
    find_files(PUBLICATION, root)


@DATASETS.register(
    "wikitext2",
    DatasetCard(
        description="Wikipedia articles: predict the next token",
        source="Merity et al. (2016), Pointer Sentinel Mixture Models; Salesforce/wikitext",
        is_text=True,
        needs_download=True,
        check_files=check_wikitext2,
    ),
)
def build_wikitext2(
    *,
    root: str | None = None,
    tokenizer: TokenizerName = "bytes",
    max_vocabulary: int | None = None,
    context_length: int = 128,
    num_val_articles: int | None = None,
    num_test_articles: int | None = None,
    num_train: int | None = None,
) -> Dataset:
    """Return WikiText-2 in its official splits; a document is an article.

    Args:
        root: Folder of the Hub's Parquet files or of the authors' ``wiki.*.raw``; None
            downloads. A folder that is named is only read.
        tokenizer: bytes, characters or words.
        max_vocabulary: Most token ids of characters or words; None for no limit.
        context_length: Positions of a sample.
        num_val_articles: Articles of the validation split, the first ones; None for all.
        num_test_articles: Articles of the test split, the first ones; None for all.
        num_train: Samples of the training split, the first ones; None for all.

    Raises:
        UserError: If a size is impossible, or a file is missing, damaged or cannot be fetched.
    """
    articles = {
        split: join_articles(rows.texts) for split, rows in read_splits(PUBLICATION, root).items()
    }
    return assemble_language_model(
        "wikitext2",
        {
            "train": articles["train"],
            "val": _first("num_val_articles", articles["validation"], num_val_articles),
            "test": _first("num_test_articles", articles["test"], num_test_articles),
        },
        tokenizer=tokenizer,
        max_vocabulary=max_vocabulary,
        context_length=context_length,
        num_train=num_train,
    )


def _first(key: str, articles: list[str], count: int | None) -> list[str]:
    """Return the first articles of a split."""
    if count is not None and not 1 <= count <= len(articles):
        expected = f"a whole number from 1 to {len(articles)} is needed, or null for all"
        raise UserError(f"data.params.{key}", count, expected)
    return articles[:count]
