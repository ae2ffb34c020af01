"""Docstrings of Python's library, labelled by the family of packages."""

from __future__ import annotations

import asyncio
import concurrent.futures
import email.message
import http.client
import importlib.abc
import inspect
import logging.handlers
import multiprocessing.pool
import sysconfig
import unittest.mock
import urllib.request
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
import torch

from normexp.data import Dataset, describe_dataset, load_dataset
from normexp.data._vocabulary import NUM_SPECIAL, count_tokens
from normexp.data.docstrings import FAMILIES, build_docstrings, read_docstrings
from normexp.errors import UserError

STDLIB = Path(sysconfig.get_path("stdlib"))
# Long enough that no text is cut, so that equal rows are equal texts.
WHOLE = {"tokenizer": "bytes", "max_vocabulary": None, "max_length": 20_000}
SPLITS = ("train", "val", "test")

# What Python itself says the docstrings of some objects are.
KNOWN = {
    "asyncio": (asyncio.Queue, asyncio.gather, asyncio.streams.StreamReader.readline),
    "email": (email.message, email.message.Message, email.message.Message.get_payload),
    "http": (http.client, urllib.request, urllib.request.Request.get_method),
    "importlib": (importlib.import_module, importlib.abc.Loader),
    "logging": (logging.getLogger, logging.handlers, logging.Handler.emit),
    "multiprocessing": (multiprocessing.pool.Pool.imap, concurrent.futures.Executor),
    "unittest": (unittest.mock.Mock, unittest.TestCase.assertAlmostEqual),
    "xml": (xml.dom.minidom, xml.dom.minidom.parse),
}


def texts_of(dataset: Dataset, split: str) -> list[str]:
    """Return the texts of a split, read back from its bytes."""
    rows = getattr(dataset, split).inputs.tolist()
    return [bytes(i - NUM_SPECIAL for i in row if i >= NUM_SPECIAL).decode() for row in rows]


@pytest.fixture(scope="module")
def whole() -> Dataset:
    return load_dataset("docstrings", WHOLE)


def test_splits_together_are_the_texts_each_once_with_its_label(whole: Dataset) -> None:
    read = read_docstrings(STDLIB)
    expected = dict(zip(read.texts, read.labels, strict=True))
    found = {}
    for split in SPLITS:
        labels = getattr(whole, split).targets.tolist()
        for text, label in zip(texts_of(whole, split), labels, strict=True):
            assert text not in found
            found[text] = label
    assert found == expected
    # White space makes no two texts of one: they would be one text to the tokenizer of words.
    assert len({" ".join(text.split()) for text in found}) == len(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_the_families_whose_docstrings_python_tells(family: str) -> None:
    read = read_docstrings(STDLIB)
    label_of = dict(zip(read.texts, read.labels, strict=True))
    for known in KNOWN[family]:
        text = inspect.getdoc(known)
        assert text is not None
        assert label_of[text] == list(FAMILIES).index(family), known
    # Enough to learn from, in every version of Python.
    assert list(label_of.values()).count(list(FAMILIES).index(family)) > 100


def test_shapes_sizes_and_what_the_data_tell() -> None:
    data = load_dataset("docstrings", {})
    assert data.num_classes == len(FAMILIES) == 8
    assert (len(data.val), len(data.test)) == (300, 300)
    for split in SPLITS:
        part = getattr(data, split)
        assert part.inputs.shape == (len(part), 128)
        assert part.inputs.dtype == part.targets.dtype == torch.int64
        assert set(part.targets.tolist()) == set(range(8))
    assert data.tokens is not None
    assert data.tokens.vocabulary_size == 2000
    assert data.tokens.has_padding
    assert data.is_trimmed
    assert data.val.text_bytes is None
    facts = describe_dataset("docstrings", {})
    assert (facts.input_shape, facts.num_classes, facts.tokens) == ((128,), 8, data.tokens)
    assert (facts.num_train, facts.num_val, facts.num_test) == (len(data.train), 300, 300)


def test_the_split_is_of_its_seed_and_the_same_for_all_tokenizers(whole: Dataset) -> None:
    words, other = load_dataset("docstrings", {}), load_dataset("docstrings", {"split_seed": 1})
    for split in SPLITS:
        labels = getattr(words, split).targets
        assert torch.equal(labels, getattr(whole, split).targets)
        assert not torch.equal(labels, getattr(other, split).targets)
    fewer = load_dataset("docstrings", {**WHOLE, "num_val": 50, "num_train": 100})
    assert texts_of(fewer, "test") == texts_of(whole, "test")
    assert texts_of(fewer, "val") == texts_of(whole, "val")[:50]
    # The training texts come behind those of validation in one order.
    assert texts_of(fewer, "train") == texts_of(whole, "val")[50:150]


def test_short_texts_are_left_out_before_the_split() -> None:
    data = load_dataset("docstrings", {**WHOLE, "min_length": 40})
    found = [text for split in SPLITS for text in texts_of(data, split)]
    read = read_docstrings(STDLIB)
    assert sorted(found) == sorted(t for t in read.texts if count_tokens(t, "bytes") >= 40)
    assert (len(data.val), len(data.test)) == (300, 300)
    assert len(found) < len(read.texts)


def write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Return a folder with a package for each family; whoever imports one stops the process."""
    for packages in FAMILIES.values():
        for package in packages:
            content = f"'''Of {package}.'''\nraise SystemExit('imported')\n"
            write(tmp_path / package / "__init__.py", content.encode())
    return tmp_path


def test_modules_classes_and_functions_of_any_depth_are_read_in_order(library: Path) -> None:
    write(
        library / "asyncio" / "tasks.py",
        b'''
class Outer:
    """Outer
      class."""
    def first(self):
        """First."""
        async def inner():
            "Inner."
    if True:
        def second(self): "Second."
    def nothing(self): return "no docstring"
    def blank(self): " "
def last():
    """Last."""
''',
    )
    write(library / "asyncio" / "a" / "deep.py", b"# coding: latin-1\n'Na\xefve.'\n")
    write(library / "asyncio" / "tests" / "test_it.py", b"'Of a test.'\n")
    write(library / "asyncio" / "notes.txt", b"'No source.'\n")
    read = read_docstrings(library)
    found = [text for text, label in zip(read.texts, read.labels, strict=True) if label == 0]
    expected = ["Of asyncio.", "Naïve.", "Outer\nclass.", "First.", "Inner.", "Second.", "Last."]
    assert found == expected
    # Each of the other packages has its own.
    assert len(read.texts) == len(expected) + sum(map(len, FAMILIES.values())) - 1


def test_a_text_of_two_families_belongs_to_neither(library: Path) -> None:
    write(library / "asyncio" / "a.py", b"'''Once\nonly.'''\ndef f(): 'Shared text.'\n")
    write(library / "asyncio" / "b.py", b"'Once  only.'\n")
    write(library / "xml" / "a.py", b"'''Shared\n\n    text.'''\n")
    write(library / "urllib" / "a.py", b"'Of http.'\n")  # Two packages of one family.
    read = read_docstrings(library)
    assert read.texts.count("Once\nonly.") == 1
    assert "Once  only." not in read.texts
    assert not any(text.startswith("Shared") for text in read.texts)
    assert read.texts.count("Of http.") == 1


def test_a_library_without_sources_is_told_in_one_line(library: Path) -> None:
    (library / "email" / "__init__.py").unlink()
    with pytest.raises(UserError) as caught:
        read_docstrings(library)
    assert str(caught.value) == (
        f"data=docstrings: needs the source files of Python's library; {library} has none of email"
    )


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"num_val": 0}, "num_val=0: a whole number from 1 to "),
        ({"num_val": 5000}, "num_val=5000: a whole number from 1 to "),
        ({"num_test": 5000}, "num_test=5000: a whole number from 1 to "),
        ({"num_train": 5000}, "num_train=5000: a whole number from 1 to "),
        (
            {"min_length": 129, "num_val": 9, "num_test": 9},
            "min_length=129: max_length=128 or less is needed",
        ),
        ({"min_length": -1}, "min_length=-1: 0 or more is needed"),
        ({"tokenizer": "bytes"}, "max_vocabulary=2000: null is needed"),
        ({"padding": "none"}, "padding=none: a value of type batch | longest is needed"),
        ({"padding_share": 0.5}, "padding_share=0.5: padding=longest is needed"),
        ({"num_test": 2.5}, "num_test=2.5: a value of type int is needed"),
    ],
)
def test_impossible_choices_are_told_in_one_line(params: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_dataset("docstrings", params)
    assert str(caught.value).startswith(f"data.params.{line}")


def test_split_sizes_use_up_what_there_is() -> None:
    num_texts = len(read_docstrings(STDLIB).texts)
    data = build_docstrings(num_test=num_texts - 2, num_val=1)
    assert (len(data.train), len(data.val)) == (1, 1)
    with pytest.raises(UserError, match=r"num_val=2: a whole number from 1 to 1 is needed"):
        build_docstrings(num_test=num_texts - 2, num_val=2)
