"""Published texts with labels: validation out of training, test as published."""

from __future__ import annotations

from normexp.data._dataset import Dataset
from normexp.data._huggingface import Publication, read_splits
from normexp.data._sizes import check_sizes
from normexp.data._texts import PaddingName, assemble_texts, drop_short
from normexp.data._vocabulary import TokenizerName
from normexp.errors import UserError
from normexp.random import random_stream


def build_text_classification(
    publication: Publication,
    *,
    root: str | None,
    tokenizer: TokenizerName,
    max_vocabulary: int | None,
    max_length: int,
    min_length: int,
    padding: PaddingName,
    padding_share: float,
    split_seed: int,
    num_val: int,
    num_test: int | None,
    num_train: int | None,
) -> Dataset:
    """Return published texts, the validation split taken out of the training texts.

    Published texts may stand in the order of their labels. So both the training and the test
    texts are permuted, and the first ones of a split are a fair draw.

    Args:
        publication: The data set; splits ``train`` and ``test``.
        root: Folder of its files; None for the download.
        tokenizer: bytes, characters or words.
        max_vocabulary: Most token ids of characters or words; None for no limit.
        max_length: Most tokens of a text; the rest is cut off.
        min_length: Fewest tokens of a text; shorter ones are left out before the split.
        padding: As ``assemble_texts`` has it.
        padding_share: As ``assemble_texts`` has it.
        split_seed: Seed of the permutations.
        num_val: Texts of the validation split.
        num_test: Texts of the test split, the first ones; None for all.
        num_train: Texts of the training split, the first ones; None for all that are left.

    Raises:
        UserError: If a size is impossible, or a file is missing, damaged or cannot be fetched.
    """
    assert publication.num_classes is not None
    name = publication.name
    published = {
        split: drop_short(texts, tokenizer, min_length)
        for split, texts in read_splits(publication, root).items()
    }
    sizes = {split: len(published[split].texts) for split in ("train", "test")}
    check_sizes(num_available=sizes["train"], num_val=num_val, num_train=num_train, image_size=None)
    if num_test is not None and not 1 <= num_test <= sizes["test"]:
        expected = f"a whole number from 1 to {sizes['test']} is needed, or null for all"
        raise UserError("data.params.num_test", num_test, expected)
    order = {
        split: random_stream(split_seed, "text_split", name, split).permutation(size).tolist()
        for split, size in sizes.items()
    }
    return assemble_texts(
        name,
        {
            "train": published["train"].take(order["train"][num_val:]),
            "val": published["train"].take(order["train"][:num_val]),
            "test": published["test"].take(order["test"][:num_test]),
        },
        num_classes=publication.num_classes,
        tokenizer=tokenizer,
        max_vocabulary=max_vocabulary,
        max_length=max_length,
        min_length=min_length,
        padding=padding,
        padding_share=padding_share,
        num_train=num_train,
    )
