"""Docstrings of Python's own library: which family of packages does a text come from?

Source: the Python Software Foundation's standard library, read from the source files of the
running interpreter; its words change a little with Python's version, and so does the fingerprint.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from normexp.data._dataset import Dataset
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._texts import LabelledTexts, PaddingName, assemble_texts, drop_short
from normexp.data._vocabulary import TokenizerName, split_text
from normexp.errors import UserError
from normexp.random import random_stream

# Labels, in their order, and the packages that each stands for. All are in every installation of
# CPython 3.11 and newer; distributions put idlelib, tkinter, lib2to3 and ensurepip elsewhere.
FAMILIES = {
    "asyncio": ("asyncio",),
    "email": ("email",),
    "http": ("http", "urllib"),
    "importlib": ("importlib",),
    "logging": ("logging",),
    "multiprocessing": ("concurrent", "multiprocessing"),
    "unittest": ("unittest",),
    "xml": ("xml",),
}
# Folders of a package that distributions leave out or put elsewhere.
_LEFT_OUT = {"test", "tests"}
_HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@DATASETS.register(
    "docstrings",
    DatasetCard(
        description="docstrings of Python's library: tell the package; comes with Python",
        source="source files of the running Python's standard library",
        num_classes=len(FAMILIES),
        is_text=True,
    ),
)
def build_docstrings(
    *,
    tokenizer: TokenizerName = "words",
    max_vocabulary: int | None = 2000,
    max_length: int = 128,
    min_length: int = 0,
    padding: PaddingName = "batch",
    padding_share: float = 0.0,
    split_seed: int = 0,
    num_val: int = 300,
    num_test: int = 300,
    num_train: int | None = None,
) -> Dataset:
    """Return docstrings of modules, classes and functions, labelled by the family of packages.

    A text that stands in several places of one family is one sample; one that stands in two
    families belongs to neither. White space does not make two texts of one. Training is left
    without the texts that equal a held-out one in their first ``max_length`` tokens; texts that
    differ in words that the vocabulary lacks alone stay. The split is random,
    not stratified: each split has the families in about the shares of the whole.

    Args:
        tokenizer: bytes, characters or words.
        max_vocabulary: Most token ids of characters or words; None for no limit.
        max_length: Most tokens of a text; the rest is cut off.
        min_length: Fewest tokens of a text; shorter ones are left out before the split.
        padding: ``batch``: a batch is as long as its longest text. ``longest``: all batches are
            as long as the longest text.
        padding_share: Share of positions that even the longest text leaves to padding; needs
            ``longest``.
        split_seed: Seed of the split; the test texts depend on it, ``num_test`` and what
            ``min_length`` leaves.
        num_val: Texts of the validation split.
        num_test: Texts of the test split.
        num_train: Texts of the training split, the first ones; None for all that are left.

    Raises:
        UserError: If a size is impossible, or the sources of Python's library are not there.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    samples = drop_short(read_docstrings(folder), tokenizer, min_length)
    if not samples.texts:
        expected = "no docstring has that many tokens"
        raise UserError("data.params.min_length", min_length, expected)
    num_samples = len(samples.texts)
    for key, size, num_left in (
        ("num_test", num_test, num_samples - 2),
        ("num_val", num_val, num_samples - num_test - 1),
    ):
        if not 1 <= size <= num_left:
            expected = f"a whole number from 1 to {num_left} is needed, of {num_samples} texts"
            raise UserError(f"data.params.{key}", size, expected)
    order = random_stream(split_seed, "text_split", "docstrings").permutation(num_samples).tolist()
    num_held = num_test + num_val
    chosen = {
        "train": order[num_held:],
        "val": order[num_test:num_held],
        "test": order[:num_test],
    }
    splits = {split: samples.take(indices) for split, indices in chosen.items()}
    held_out = [*splits["val"].texts, *splits["test"].texts]
    splits["train"] = _drop_repeats(splits["train"], held_out, tokenizer, max_length)
    return assemble_texts(
        "docstrings",
        splits,
        num_classes=len(FAMILIES),
        tokenizer=tokenizer,
        max_vocabulary=max_vocabulary,
        max_length=max_length,
        min_length=min_length,
        padding=padding,
        padding_share=padding_share,
        num_train=num_train,
    )


def _drop_repeats(
    train: LabelledTexts, held_out: Iterable[str], tokenizer: TokenizerName, max_length: int
) -> LabelledTexts:
    """Return the training texts that no held-out one equals as far as it is read."""

    def read(text: str) -> tuple[str | int, ...]:
        return tuple(split_text(text, tokenizer)[: max(0, max_length)])

    held = {read(text) for text in held_out}
    return train.take(i for i, text in enumerate(train.texts) if read(text) not in held)


@functools.lru_cache(maxsize=1)
def read_docstrings(folder: Path) -> LabelledTexts:
    """Return the distinct docstrings of all families, in the order of files and lines.

    Nothing is imported: the files are parsed.

    Args:
        folder: Folder of Python's standard library.

    Raises:
        UserError: If a family has no source file there.
    """
    families: dict[str, set[int]] = {}
    first: dict[str, str] = {}
    for label, (family, packages) in enumerate(FAMILIES.items()):
        files = [file for package in packages for file in _list_sources(folder / package)]
        if not files:
            expected = f"needs the source files of Python's library; {folder} has none of {family}"
            raise UserError("data", "docstrings", expected)
        for file in files:
            for text in _find_docstrings(ast.parse(file.read_bytes())):
                key = " ".join(text.split())
                first.setdefault(key, text)
                families.setdefault(key, set()).add(label)
    kept = [(first[key], min(labels)) for key, labels in families.items() if len(labels) == 1]
    return LabelledTexts([text for text, _ in kept], [label for _, label in kept])


def _list_sources(package: Path) -> list[Path]:
    """Return the Python files of a package, tests left out, in one order on every system."""
    files = [file.relative_to(package) for file in package.rglob("*.py")]
    kept = [file for file in files if not _LEFT_OUT.intersection(file.parts)]
    return [package / file for file in sorted(kept, key=lambda file: file.as_posix())]


def _find_docstrings(module: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module and of all classes and functions in it, by line."""
    holders = [node for node in ast.walk(module) if isinstance(node, _HOLDERS)]
    for node in sorted(holders, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text is not None and text.strip():
            yield text
