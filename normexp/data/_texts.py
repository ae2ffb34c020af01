"""From documents to token ids in disjoint splits: the same way for every data set of texts.

Shapes: N samples, L positions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from normexp.data._dataset import IGNORED_TARGET, PAD_ID, Dataset, Split, TextBytes, TokenTask
from normexp.data._vocabulary import (
    END_ID,
    TokenizerName,
    Vocabulary,
    build_vocabulary,
    count_tokens,
)
from normexp.errors import UserError

PaddingName = Literal["batch", "longest"]
SPLITS = ("train", "val", "test")
# A hundred positions for each token: beyond, a slip would ask for all memory.
MAX_PADDING_SHARE = 0.99


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with one label each, from 0."""

    texts: Sequence[str]
    labels: Sequence[int]

    def take(self, indices: Iterable[int]) -> LabelledTexts:
        """Return the texts of the given indices, in that order."""
        chosen = list(indices)
        return LabelledTexts([self.texts[i] for i in chosen], [self.labels[i] for i in chosen])


def assemble_language_model(
    name: str,
    documents: Mapping[str, Sequence[str]],
    *,
    tokenizer: TokenizerName,
    max_vocabulary: int | None,
    context_length: int,
    num_train: int | None = None,
) -> Dataset:
    """Cut documents into blocks of tokens; at each one the next token is to be predicted.

    The documents of a split stand one behind the other, an end behind each. Blocks do not
    overlap, but for the last: it starts early enough to be full, and what it shares with the one
    before is not predicted twice. So every token of a split counts once and none is padding.

    Args:
        name: The registered name.
        documents: Texts of train, val and test, in their order.
        tokenizer: How a text is cut.
        max_vocabulary: Most token ids; None for no limit.
        context_length: Positions L of a block.
        num_train: Blocks of the training split, the first ones; None for all. The vocabulary is
            that of these.

    Raises:
        UserError: If a size is impossible, or a split has fewer tokens than a block.
    """
    if context_length < 2:
        raise UserError("data.params.context_length", context_length, "2 or more is needed")
    vocabulary = build_vocabulary(documents["train"], tokenizer, max_vocabulary)
    if num_train is not None and tokenizer != "bytes":
        used = _first_tokens(documents["train"], tokenizer, num_train * context_length + 1)
        vocabulary = build_vocabulary([used], tokenizer, max_vocabulary)
    splits = {}
    for split in SPLITS:
        stream = _join(vocabulary, documents[split])
        if len(stream) <= context_length:
            has = f"the {split} split of {name} has {len(stream)} tokens"
            expected = f"{has}, and a block needs one more than its length"
            raise UserError("data.params.context_length", context_length, expected)
        blocks = _cut_blocks(stream, context_length)
        splits[split] = replace(blocks, text_bytes=_count_bytes(vocabulary, documents[split]))
    if num_train is not None:
        _check_num_train(num_train, len(splits["train"]))
        blocks = splits["train"]
        splits["train"] = Split(blocks.inputs[:num_train], blocks.targets[:num_train])
    return Dataset(
        name=name,
        num_classes=len(vocabulary),
        fingerprint=_compute_fingerprint(splits, vocabulary),
        tokens=TokenTask(len(vocabulary), is_language_modeling=True, has_padding=False),
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
    )


def assemble_texts(
    name: str,
    splits: Mapping[str, LabelledTexts],
    *,
    num_classes: int,
    tokenizer: TokenizerName,
    max_vocabulary: int | None,
    max_length: int,
    padding: PaddingName,
    padding_share: float,
    min_length: int = 0,
    num_train: int | None = None,
) -> Dataset:
    """Turn labelled texts into padded token ids.

    A text is cut after ``max_length`` tokens; an empty one has no valid position.

    Args:
        name: The registered name.
        splits: Texts of train, val and test, in their order.
        num_classes: Number of labels.
        tokenizer: How a text is cut.
        max_vocabulary: Most token ids; None for no limit.
        max_length: Most tokens of a text.
        padding: ``batch``: a batch is as long as its longest text. ``longest``: every batch is
            as long as the longest text of all.
        padding_share: Share of positions that even the longest text leaves to padding; needs
            ``longest``.
        min_length: Fewest tokens of a text; shorter ones are left out.
        num_train: Texts of the training split, the first ones; None for all. The vocabulary is
            that of these.

    Raises:
        UserError: If a size is impossible, or leaves a split without a text.
    """
    if max_length < 1:
        raise UserError("data.params.max_length", max_length, "1 or more is needed")
    if min_length > max_length:
        expected = (
            f"max_length={max_length} or less is needed: that is what longer texts are cut to"
        )
        raise UserError("data.params.min_length", min_length, expected)
    if not 0.0 <= padding_share <= MAX_PADDING_SHARE:
        expected = f"a share in [0, {MAX_PADDING_SHARE}] is needed"
        raise UserError("data.params.padding_share", padding_share, expected)
    if padding_share and padding != "longest":
        expected = "padding=longest is needed: the share is of a length that all batches have"
        raise UserError("data.params.padding_share", padding_share, expected)
    splits = {split: drop_short(splits[split], tokenizer, min_length) for split in SPLITS}
    for split in SPLITS:
        if not splits[split].texts:
            expected = f"no {split} text of {name} has that many tokens"
            raise UserError("data.params.min_length", min_length, expected)
    if num_train is not None:
        _check_num_train(num_train, len(splits["train"].texts))
        splits["train"] = splits["train"].take(range(num_train))
    vocabulary = build_vocabulary(splits["train"].texts, tokenizer, max_vocabulary)
    ids = {
        split: [vocabulary.encode(text)[:max_length] for text in splits[split].texts]
        for split in SPLITS
    }
    longest = max((len(row) for rows in ids.values() for row in rows), default=0)
    # One position at least, so that a data set of empty texts has a shape.
    # Rounded first: a share such as 0.9 is no binary number, and 1 / (1 - 0.9) comes out above 10.
    width = math.ceil(round(max(longest, 1) / (1.0 - padding_share), 6))
    made = {
        split: Split(_pad(ids[split], width), _labels(splits[split].labels)) for split in SPLITS
    }
    has_padding = any(len(row) < width for rows in ids.values() for row in rows)
    return Dataset(
        name=name,
        num_classes=num_classes,
        fingerprint=_compute_fingerprint(made, vocabulary),
        tokens=TokenTask(len(vocabulary), is_language_modeling=False, has_padding=has_padding),
        is_trimmed=padding == "batch",
        train=made["train"],
        val=made["val"],
        test=made["test"],
    )


def drop_short(texts: LabelledTexts, tokenizer: TokenizerName, min_length: int) -> LabelledTexts:
    """Return the texts that have ``min_length`` tokens or more, in their order.

    Args:
        texts: The texts.
        tokenizer: What makes their tokens.
        min_length: Fewest tokens.

    Raises:
        UserError: If ``min_length`` is negative.
    """
    if min_length < 0:
        raise UserError("data.params.min_length", min_length, "0 or more is needed")
    if min_length == 0:
        return texts
    sizes = (count_tokens(text, tokenizer) for text in texts.texts)
    return texts.take(index for index, size in enumerate(sizes) if size >= min_length)


def _join(vocabulary: Vocabulary, documents: Sequence[str]) -> NDArray[np.int64]:
    """Return the tokens of documents as one stream: an end before the first and behind each."""
    end = np.array([END_ID], dtype=np.int64)
    parts = [end]
    for document in documents:
        parts += [vocabulary.encode(document), end]
    return np.concatenate(parts)


def _cut_blocks(stream: NDArray[np.int64], length: int) -> Split:
    """Return blocks of a stream with the token that follows each of their tokens."""
    num_predicted = len(stream) - 1
    starts = np.arange(0, num_predicted, length)
    num_again = max(0, int(starts[-1]) + length - num_predicted)
    starts[-1] -= num_again
    index = starts[:, None] + np.arange(length)
    targets = stream[index + 1]
    targets[-1, :num_again] = IGNORED_TARGET
    return Split(torch.from_numpy(stream[index]), torch.from_numpy(targets))


def _pad(rows: Sequence[NDArray[np.int64]], width: int) -> torch.Tensor:
    """Return rows of ids as one array, ``PAD_ID`` behind the shorter ones."""
    out = np.full((len(rows), width), PAD_ID, dtype=np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out)


def _labels(labels: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(labels, dtype=np.int64))


def _check_num_train(num_train: int, num_samples: int) -> None:
    """Raise unless the training split has so many samples."""
    if not 1 <= num_train <= num_samples:
        expected = f"a whole number from 1 to {num_samples} is needed, or null for all"
        raise UserError("data.params.num_train", num_train, expected)


def _first_tokens(documents: Sequence[str], tokenizer: TokenizerName, num_tokens: int) -> str:
    """Return a text of the first tokens of documents, their ends counted as tokens."""
    whole = build_vocabulary(documents, tokenizer, None)
    return whole.join(_join(whole, documents)[: max(0, num_tokens)])


def _count_bytes(vocabulary: Vocabulary, documents: Sequence[str]) -> TextBytes:
    """Return the bytes of documents, one for the end of each included."""
    counts = [vocabulary.count_bytes(document) for document in documents]
    total = sum(count.total for count in counts) + len(documents)
    return TextBytes(total, sum(count.unknown for count in counts))


def _compute_fingerprint(splits: Mapping[str, Split], vocabulary: Vocabulary) -> str:
    """Return a hash over token ids, targets, their order, and what the ids stand for."""
    digest = hashlib.sha256(vocabulary.tokenizer.encode())
    digest.update("\0".join(vocabulary.symbols).encode("utf-8", "surrogatepass"))
    for split in SPLITS:
        inputs, targets = splits[split].inputs.numpy(), splits[split].targets.numpy()
        digest.update(f";{split}:{inputs.shape}".encode())
        digest.update(np.ascontiguousarray(inputs.astype("<i8")).data)
        digest.update(np.ascontiguousarray(targets.astype("<i8")).data)
    return digest.hexdigest()
