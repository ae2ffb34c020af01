"""Python's help topics as a language model's data: split by topic."""

from __future__ import annotations

import itertools
from pydoc_data.topics import topics
from typing import Any

import pytest

from normexp.data import IGNORED_TARGET, Split, describe_dataset, load_dataset
from normexp.data._vocabulary import END_ID, NUM_SPECIAL, UNKNOWN_ID
from normexp.data.python_docs import find_sharing
from normexp.errors import UserError

BYTES = {"tokenizer": "bytes"}
ALONE = len(topics) - len(find_sharing(topics))  # What may be held out.


def topics_of(split: Split) -> list[str]:
    """Return the documents of a split of bytes, read back from what is to be predicted."""
    stream = split.targets[split.targets != IGNORED_TARGET].tolist()
    assert stream.pop() == END_ID
    texts, part = [], bytearray()
    for token in [*stream, END_ID]:
        if token == END_ID:
            texts.append(part.decode())
            part = bytearray()
        else:
            part.append(token - NUM_SPECIAL)
    return texts


def squeeze(text: str) -> str:
    """Return a text in one line: topics that hold others break and indent their lines anew."""
    return " ".join(text.split())


@pytest.mark.parametrize("split_seed", [0, 1])
def test_each_topic_is_whole_in_one_split(split_seed: int) -> None:
    data = load_dataset("python_docs", {**BYTES, "split_seed": split_seed})
    train, val, test = (topics_of(split) for split in (data.train, data.val, data.test))
    assert (len(val), len(test)) == (8, 8)
    assert sorted(train + val + test) == sorted(topics.values())


@pytest.mark.parametrize("split_seed", [0, 1, 2])
def test_no_split_has_a_part_of_anothers_text(split_seed: int) -> None:
    # The topic on compound statements holds those on if, for and while, to name some.
    data = load_dataset("python_docs", {**BYTES, "split_seed": split_seed})
    texts = {split: topics_of(getattr(data, split)) for split in ("train", "val", "test")}
    squeezed = {split: squeeze("\n".join(found)) for split, found in texts.items()}
    for split, other in itertools.permutations(texts, 2):
        for paragraph in "\n\n".join(texts[split]).split("\n\n"):
            if len(squeeze(paragraph)) >= 40:
                assert squeeze(paragraph) not in squeezed[other]


def test_what_shares_a_passage() -> None:
    passage = "of forty characters, one with another or"
    assert len(passage) == 40
    documents = {
        "one": f"Its own.\n\n{passage}\n\nThe end of a document that has a passage.",
        "broken": "   of forty characters,\n   one with another or\n\nof its own",
        "longer": f"{passage} not",
        "short": passage[1:],
        "other": f"{passage[1:]}\n\nIts own.",
        "twice": "What stands twice in one document is not shared.\n\n" * 2,
    }
    assert find_sharing(documents) == {"one", "broken"}


def test_sizes_are_topics_and_the_test_split_depends_on_its_own_alone() -> None:
    whole = load_dataset("python_docs", BYTES)
    other = load_dataset("python_docs", {**BYTES, "num_val_topics": 3, "num_test_topics": 8})
    assert topics_of(other.test) == topics_of(whole.test)
    assert len(topics_of(other.val)) == 3
    fewer = load_dataset("python_docs", {**BYTES, "num_test_topics": 2})
    assert topics_of(fewer.test) == topics_of(whole.test)[:2]
    shuffled = load_dataset("python_docs", {**BYTES, "split_seed": 1})
    assert set(topics_of(shuffled.test)) != set(topics_of(whole.test))


def test_characters_are_those_of_the_training_topics() -> None:
    texts = topics_of(load_dataset("python_docs", BYTES).train)
    data = load_dataset("python_docs", {"context_length": 64})
    assert data.num_classes == NUM_SPECIAL + len(set("".join(texts)))
    num_tokens = sum(len(text) + 1 for text in texts)
    assert int((data.train.targets != IGNORED_TARGET).sum()) == num_tokens
    assert data.input_shape == (64,)
    facts = describe_dataset("python_docs", {"context_length": 64})
    assert facts.tokens == data.tokens
    assert (facts.input_shape, facts.num_classes) == (data.input_shape, data.num_classes)
    assert (facts.num_train, facts.num_val, facts.num_test) == (
        len(data.train),
        len(data.val),
        len(data.test),
    )


def test_all_that_may_be_held_out_can_be() -> None:
    data = load_dataset("python_docs", {**BYTES, "num_val_topics": ALONE - 8})
    assert len(topics_of(data.train)) == len(find_sharing(topics))
    assert len(topics_of(data.val)) == ALONE - 8


def test_num_train_keeps_the_first_blocks() -> None:
    whole, fewer = load_dataset("python_docs", {}), load_dataset("python_docs", {"num_train": 10})
    first = whole.train.inputs[:10].flatten().tolist()
    pairs = set(zip(first, fewer.train.inputs.flatten().tolist(), strict=True))
    # The same texts in ids of their own: those of symbols that training has.
    assert len(pairs) == len(set(first)) == len({own for _, own in pairs})
    seen = {*fewer.train.inputs.flatten().tolist(), *fewer.train.targets.flatten().tolist()}
    assert seen | {0, UNKNOWN_ID} == set(range(fewer.num_classes))
    assert len(fewer.val) == len(whole.val)
    assert (fewer.val.targets == UNKNOWN_ID).any()


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"num_val_topics": 0}, f"num_val_topics=0: a whole number from 1 to {ALONE - 1} "),
        ({"num_test_topics": ALONE}, f"num_test_topics={ALONE}: a whole number from 1 to "),
        (
            {"num_val_topics": ALONE - 7},
            f"num_val_topics={ALONE - 7}: with num_test_topics=8 {ALONE - 8} or fewer are needed",
        ),
        ({"context_length": 10**6}, "context_length=1000000: the train split of python_docs has "),
        ({"tokenizer": "letters"}, "tokenizer=letters: a value of type bytes | characters | words"),
        ({"num_train": 10**6}, "num_train=1000000: a whole number from 1 to "),
    ],
)
def test_impossible_choices_are_told_in_one_line(params: dict[str, Any], line: str) -> None:
    for act in (load_dataset, describe_dataset):
        with pytest.raises(UserError) as caught:
            act("python_docs", params)
        assert str(caught.value).startswith(f"data.params.{line}")
