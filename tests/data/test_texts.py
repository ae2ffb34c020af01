"""Documents to blocks and padded texts: the same way for every data set of texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normexp.data import IGNORED_TARGET, PAD_ID, Dataset, Split, TextBytes
from normexp.data._texts import (
    SPLITS,
    LabelledTexts,
    assemble_language_model,
    assemble_texts,
    drop_short,
)
from normexp.data._vocabulary import END_ID, NUM_SPECIAL, UNKNOWN_ID, build_vocabulary
from normexp.errors import UserError

DOCUMENTS = {"train": ["abcab", "", "cd"], "val": ["abz"], "test": ["dcba", "a"]}
TEXTS = {
    "train": LabelledTexts(["one two three", "two", "", "three two one two"], [0, 1, 1, 2]),
    "val": LabelledTexts(["two four"], [0]),
    "test": LabelledTexts(["one", "one two"], [2, 0]),
}


def assemble_blocks(documents: dict[str, list[str]] = DOCUMENTS, **changes: Any) -> Dataset:
    settings = {"tokenizer": "characters", "max_vocabulary": None, "context_length": 3}
    return assemble_language_model("fake", documents, **{**settings, **changes})


def assemble(splits: dict[str, LabelledTexts] = TEXTS, **changes: Any) -> Dataset:
    settings = {
        "num_classes": 3,
        "tokenizer": "words",
        "max_vocabulary": None,
        "max_length": 10,
        "padding": "longest",
        "padding_share": 0.0,
    }
    return assemble_texts("fake", splits, **{**settings, **changes})


def stream_of(documents: Sequence[str]) -> list[int]:
    """Return the token ids of documents in bytes, an end before the first and behind each."""
    stream = [END_ID]
    for document in documents:
        stream += [byte + NUM_SPECIAL for byte in document.encode()] + [END_ID]
    return stream


@given(
    documents=st.lists(st.text(max_size=20), min_size=1, max_size=4),
    length=st.integers(2, 12),
)
def test_every_token_is_predicted_once_from_those_before_it(
    documents: list[str], length: int
) -> None:
    documents.append("long enough for any block")
    stream = stream_of(documents)
    split = assemble_blocks(
        dict.fromkeys(SPLITS, documents), tokenizer="bytes", context_length=length
    ).val
    inputs, targets = split.inputs, split.targets
    assert inputs.shape == targets.shape == (math.ceil((len(stream) - 1) / length), length)
    is_asked = targets != IGNORED_TARGET
    assert targets[is_asked].tolist() == stream[1:]
    assert (inputs != PAD_ID).all()
    # Each is asked for right behind the token before it, and no block sees further.
    assert inputs[is_asked].tolist() == stream[:-1]
    assert torch.equal(inputs[:, 1:][is_asked[:, :-1]], targets[:, :-1][is_asked[:, :-1]])
    # Only the last block shares tokens with the one before, at its start.
    num_again = inputs.numel() - (len(stream) - 1)
    assert is_asked[:-1].all()
    assert is_asked[-1].tolist() == [False] * num_again + [True] * (length - num_again)
    assert inputs[-1].tolist() == stream[-length - 1 : -1]
    # What the rest of the package counts with.
    assert split.num_targets is not None
    assert split.lengths is not None
    assert split.num_targets.tolist() == is_asked.sum(1).tolist()
    assert split.lengths.tolist() == [length] * len(split)


def test_blocks_written_out() -> None:
    data = assemble_blocks()
    a, b, c, d = range(3, 7)  # a, b and c twice each, d once.
    end, nothing = END_ID, IGNORED_TARGET
    assert data.train.inputs.tolist() == [[end, a, b], [c, a, b], [end, end, c], [end, c, d]]
    assert data.train.targets.tolist() == [
        [a, b, c],
        [a, b, end],
        [end, c, d],
        [nothing, nothing, end],
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_needs_a_token_more_than_a_block_has(split: str) -> None:
    documents = {key: ["a" * 20] for key in SPLITS}
    documents[split] = ["abc"]  # Five tokens with both ends.
    assert len(getattr(assemble_blocks(documents, context_length=4), split)) == 1
    with pytest.raises(UserError) as caught:
        assemble_blocks(documents, context_length=5)
    assert str(caught.value) == (
        f"data.params.context_length=5: the {split} split of fake has 5 tokens, and a block needs "
        "one more than its length"
    )


def test_a_language_model_knows_its_task() -> None:
    data = assemble_blocks()
    assert data.tokens is not None
    assert data.tokens.is_language_modeling
    assert not data.tokens.has_padding
    assert not data.is_trimmed
    assert data.num_classes == data.tokens.vocabulary_size == NUM_SPECIAL + 4
    assert data.val.text_bytes is not None
    assert data.val.text_bytes.total == data.val.num_targets.sum()  # all are of one byte
    assert data.input_shape == (3,)
    assert data.train.inputs.dtype == data.train.targets.dtype == torch.int64


def test_a_symbol_that_only_validation_or_test_has_is_unknown() -> None:
    data = assemble_blocks({"train": ["abab"], "val": ["azb"], "test": ["bay"]})
    assert data.val.inputs.tolist() == [[END_ID, 3, UNKNOWN_ID], [3, UNKNOWN_ID, 4]]
    assert UNKNOWN_ID in data.test.targets
    labelled = assemble()
    assert labelled.val.inputs.tolist() == [[3, UNKNOWN_ID, 0, 0]]  # "two" is the most frequent.


@given(val=st.text(min_size=3, max_size=20), test=st.text(min_size=3, max_size=20))
def test_what_is_held_out_does_not_touch_the_training_split(val: str, test: str) -> None:
    before = assemble_blocks()
    after = assemble_blocks({**DOCUMENTS, "val": [val], "test": [test]})
    assert torch.equal(after.train.inputs, before.train.inputs)
    assert torch.equal(after.train.targets, before.train.targets)
    assert after.num_classes == before.num_classes
    words = assemble({**TEXTS, "val": LabelledTexts([val], [0])}, max_length=4)
    assert torch.equal(words.train.inputs, assemble(max_length=4).train.inputs)
    assert words.tokens is not None
    assert words.tokens.vocabulary_size == NUM_SPECIAL + 3


def test_padded_texts_written_out() -> None:
    data = assemble()
    two, one, three = 3, 4, 5  # Four times; twice each, by the order of code points.
    assert data.train.inputs.tolist() == [
        [one, two, three, 0],
        [two, 0, 0, 0],
        [0, 0, 0, 0],
        [three, two, one, two],
    ]
    assert data.train.targets.tolist() == [0, 1, 1, 2]
    assert data.test.targets.tolist() == [2, 0]
    assert data.train.lengths is not None
    assert data.train.lengths.tolist() == [3, 1, 0, 4]
    assert data.train.num_targets is None
    assert data.num_classes == 3
    assert data.tokens is not None
    assert data.tokens.has_padding
    assert not data.tokens.is_language_modeling
    assert data.val.text_bytes is None


def test_texts_are_cut_after_the_most_tokens() -> None:
    data = assemble(max_length=2)
    assert data.train.inputs.tolist() == [[4, 3], [3, 0], [0, 0], [5, 3]]
    # The vocabulary is that of whole texts: "three" stands third in the first.
    assert data.num_classes == 3
    assert data.tokens is not None
    assert data.tokens.vocabulary_size == NUM_SPECIAL + 3
    full = LabelledTexts(["one two", "two one"], [0, 1])
    uncut = assemble(dict.fromkeys(SPLITS, full), max_length=2)
    assert uncut.tokens is not None
    assert not uncut.tokens.has_padding


def test_batches_are_trimmed_unless_all_texts_have_one_length() -> None:
    longest, batch = assemble(padding="longest"), assemble(padding="batch")
    assert batch.is_trimmed
    assert not longest.is_trimmed
    # The longest text of any split counts, and what is stored is the same.
    splits = {**TEXTS, "test": LabelledTexts(["one two three one two"], [0])}
    for padding in ("longest", "batch"):
        data = assemble(splits, padding=padding)
        assert {getattr(data, split).inputs.shape[1] for split in SPLITS} == {5}
    assert longest.fingerprint == batch.fingerprint


@given(longest=st.integers(1, 40), percent=st.integers(0, 95))
def test_a_share_of_padding_is_the_least_width_that_leaves_it(longest: int, percent: int) -> None:
    texts = LabelledTexts(["a " * longest, "a"], [0, 1])
    data = assemble(dict.fromkeys(SPLITS, texts), max_length=longest, padding_share=percent / 100)
    (width,) = data.input_shape
    assert Fraction(width - longest, width) >= Fraction(percent, 100)
    if width > longest:
        assert Fraction(width - 1 - longest, width - 1) < Fraction(percent, 100)
    assert data.train.lengths is not None
    assert data.train.lengths.tolist() == [longest, 1]


def test_empty_texts_alone_have_one_position_that_is_not_valid() -> None:
    data = assemble(dict.fromkeys(SPLITS, LabelledTexts(["", " \n"], [0, 1])))
    assert data.train.inputs.tolist() == [[0], [0]]
    assert data.train.lengths is not None
    assert data.train.lengths.tolist() == [0, 0]


def test_short_texts_are_left_out_before_the_vocabulary() -> None:
    splits = {
        "train": LabelledTexts(["one two", "rare", "", "two one"], [0, 1, 1, 2]),
        "val": LabelledTexts(["", "two one", "two"], [1, 2, 0]),
        "test": LabelledTexts(["one one"], [1]),
    }
    data = assemble(splits, min_length=2)
    assert data.train.targets.tolist() == [0, 2]
    assert data.val.targets.tolist() == [2]
    assert data.tokens is not None
    assert data.tokens.vocabulary_size == NUM_SPECIAL + 2  # "rare" is gone.
    assert len(assemble(splits, min_length=0).train) == 4
    assert len(assemble(splits, min_length=1).train) == 3


@given(texts=st.lists(st.text("ab é", max_size=8), max_size=8), size=st.integers(0, 6))
def test_what_is_not_short_stays_in_order(texts: list[str], size: int) -> None:
    kept = drop_short(LabelledTexts(texts, range(len(texts))), "bytes", size)
    expected = [(text, i) for i, text in enumerate(texts) if len(text.encode()) >= size]
    assert list(zip(kept.texts, kept.labels, strict=True)) == expected


def test_the_first_samples_of_the_training_split() -> None:
    whole, fewer = assemble_blocks(), assemble_blocks(num_train=2)
    assert torch.equal(fewer.train.inputs, whole.train.inputs[:2])
    assert torch.equal(fewer.train.targets, whole.train.targets[:2])
    assert len(fewer.val) == len(whole.val)
    assert assemble().input_shape == (4,)
    fewer = assemble(num_train=2)
    assert fewer.input_shape == (3,)
    one, three, two = 4, 5, 3
    assert fewer.train.inputs.tolist() == [[one, two, three], [two, 0, 0]]
    assert fewer.train.targets.tolist() == [0, 1]
    assert len(fewer.test) == len(assemble().test)


def test_the_vocabulary_is_that_of_the_samples_trained_on() -> None:
    fewer = assemble_blocks(num_train=2)  # "abcab" and an end; d comes later
    assert fewer.num_classes == NUM_SPECIAL + 3
    assert fewer.test.inputs.tolist()[0] == [END_ID, UNKNOWN_ID, 5]
    assert fewer.test.text_bytes == TextBytes(4 + 1 + 2, 1)
    assert assemble_blocks(num_train=2, tokenizer="bytes").num_classes == NUM_SPECIAL + 256
    fewer = assemble(num_train=1, max_vocabulary=5)
    assert fewer.tokens is not None
    assert fewer.tokens.vocabulary_size == 5
    assert fewer.train.inputs.tolist() == [[3, UNKNOWN_ID, 4]]  # one, two, three: the last is cut


def test_fingerprint_changes_with_any_content() -> None:
    fingerprints = [assemble_blocks().fingerprint]
    for split in SPLITS:
        documents = {**DOCUMENTS, split: ["b" + DOCUMENTS[split][0][1:], *DOCUMENTS[split][1:]]}
        fingerprints.append(assemble_blocks(documents).fingerprint)
    fingerprints += [
        # The same ids, which stand for other signs.
        assemble_blocks(
            {split: [t.replace("d", "e") for t in texts] for split, texts in DOCUMENTS.items()}
        ).fingerprint,
        assemble_blocks({**DOCUMENTS, "train": DOCUMENTS["train"][::-1]}).fingerprint,
        assemble_blocks({**DOCUMENTS, "val": DOCUMENTS["test"], "test": ["abz"]}).fingerprint,
        assemble_blocks(context_length=2).fingerprint,
        assemble_blocks(num_train=2).fingerprint,
        assemble_blocks(tokenizer="bytes").fingerprint,
        assemble_blocks(max_vocabulary=5).fingerprint,
        assemble().fingerprint,
        assemble(padding_share=0.5).fingerprint,
        assemble(max_length=3).fingerprint,
        assemble({**TEXTS, "val": dataclasses.replace(TEXTS["val"], labels=[1])}).fingerprint,
        assemble({**TEXTS, "val": dataclasses.replace(TEXTS["val"], texts=["one"])}).fingerprint,
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert assemble_blocks().fingerprint == fingerprints[0]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"max_length": 0}, "max_length=0: 1 or more is needed"),
        ({"padding_share": 1.0}, "padding_share=1.0: a share in [0, 0.99] is needed"),
        ({"padding_share": -0.1}, "padding_share=-0.1: a share in [0, 0.99] is needed"),
        ({"padding": "batch", "padding_share": 0.2}, "padding_share=0.2: padding=longest is"),
        ({"min_length": -1}, "min_length=-1: 0 or more is needed"),
        ({"min_length": 11}, "min_length=11: max_length=10 or less is needed"),
        ({"min_length": 3}, "min_length=3: no val text of fake has that many tokens"),
        ({"num_train": 0}, "num_train=0: a whole number from 1 to 4 is needed"),
        ({"num_train": 5}, "num_train=5: a whole number from 1 to 4 is needed"),
        ({"max_vocabulary": 3}, "max_vocabulary=3: more than 3 are needed"),
    ],
)
def test_impossible_sizes_of_texts_are_told_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        assemble(**changes)
    assert str(caught.value).startswith(f"data.params.{line}")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"context_length": 1}, "context_length=1: 2 or more is needed"),
        ({"num_train": 5}, "num_train=5: a whole number from 1 to 4 is needed"),
    ],
)
def test_impossible_sizes_of_blocks_are_told_in_one_line(
    changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError) as caught:
        assemble_blocks(**changes)
    assert str(caught.value).startswith(f"data.params.{line}")


def test_images_have_no_lengths_and_one_target_each() -> None:
    split = Split(torch.zeros(2, 1, 4, 4), torch.tensor([1, 0]))
    assert split.lengths is None
    assert split.num_targets is None


def test_the_order_of_a_vocabulary_is_that_of_its_ids() -> None:
    vocabulary = build_vocabulary(["b a a"], "words", None)
    np.testing.assert_array_equal(vocabulary.encode("a b c"), [3, 4, UNKNOWN_ID])
