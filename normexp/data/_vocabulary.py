"""From texts to token ids: bytes, characters or words, with a vocabulary of the training split."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from normexp.data._dataset import PAD_ID, TextBytes
from normexp.errors import UserError

TokenizerName = Literal["bytes", "characters", "words"]

# PAD_ID is 0. The end stands behind every document and is what its first token follows.
END_ID = 1
UNKNOWN_ID = 2
NUM_SPECIAL = 3
assert PAD_ID not in (END_ID, UNKNOWN_ID)

_WORD = re.compile(r"\w+|[^\w\s]")


def _split_characters(text: str) -> Sequence[str]:
    return text


def _split_words(text: str) -> Sequence[str]:
    return _WORD.findall(text)


def _encode(text: str) -> bytes:
    """Return a text in UTF-8. Half a surrogate pair, which JSON may hold, gets bytes too."""
    return text.encode("utf-8", "surrogatepass")


_SPLIT: dict[str, Callable[[str], Sequence[str]]] = {
    "characters": _split_characters,
    "words": _split_words,
}


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a tokenizer.

    Attributes:
        tokenizer: ``bytes``: those of UTF-8, all 256. ``characters``: Unicode code points.
            ``words``: runs of letters, digits and underscores, and single other signs; white
            space is not kept.
        symbols: What the ids from ``NUM_SPECIAL`` on stand for, in their order.
    """

    tokenizer: TokenizerName
    symbols: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of token ids, the special ones included."""
        return NUM_SPECIAL + len(self.symbols)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: NUM_SPECIAL + index for index, symbol in enumerate(self.symbols)}

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of a text, without an end; ``UNKNOWN_ID`` for what has none."""
        if self.tokenizer == "bytes":
            raw = np.frombuffer(_encode(text), dtype=np.uint8)
            return raw.astype(np.int64) + NUM_SPECIAL
        ids, parts = self._ids, _SPLIT[self.tokenizer](text)
        return np.fromiter((ids.get(part, UNKNOWN_ID) for part in parts), np.int64, len(parts))

    def count_bytes(self, text: str) -> TextBytes:
        """Return the bytes of a text: all, and those of what has no token id.

        A word counts one more than its own, for the space that follows.
        """
        if self.tokenizer == "bytes":
            return TextBytes(float(len(_encode(text))), 0.0)
        space = 1 if self.tokenizer == "words" else 0
        total = unknown = 0
        for symbol, count in Counter(_SPLIT[self.tokenizer](text)).items():
            size = count * (len(_encode(symbol)) + space)
            total += size
            unknown += 0 if symbol in self._ids else size
        return TextBytes(float(total), float(unknown))

    def join(self, ids: NDArray[np.int64]) -> str:
        """Return a text that has these tokens, without the special ones."""
        if self.tokenizer == "bytes":
            return bytes((ids[ids >= NUM_SPECIAL] - NUM_SPECIAL).tolist()).decode(
                "utf-8", "replace"
            )
        symbols = [self.symbols[index - NUM_SPECIAL] for index in ids if index >= NUM_SPECIAL]
        return (" " if self.tokenizer == "words" else "").join(symbols)


def split_text(text: str, tokenizer: TokenizerName) -> Sequence[str] | bytes:
    """Return the tokens of a text as they stand in it.

    Args:
        text: The text.
        tokenizer: How it is cut.
    """
    return _encode(text) if tokenizer == "bytes" else _SPLIT[tokenizer](text)


def count_tokens(text: str, tokenizer: TokenizerName) -> int:
    """Return the number of tokens of a text, known before there is a vocabulary.

    Args:
        text: The text.
        tokenizer: How it is cut.

    Examples:
        >>> [count_tokens("a naïve start", name) for name in ("words", "characters", "bytes")]
        [3, 13, 14]
    """
    return len(split_text(text, tokenizer))


def build_vocabulary(
    texts: Iterable[str], tokenizer: TokenizerName, max_vocabulary: int | None
) -> Vocabulary:
    """Return the vocabulary of texts: the most frequent symbols, the first in order if equal.

    Args:
        texts: The training split's.
        tokenizer: How a text is cut.
        max_vocabulary: Most token ids, the special ones included; None for no limit. Bytes need
            all of theirs.

    Raises:
        UserError: If the limit leaves no room, or is set for bytes.
    """
    if tokenizer == "bytes":
        if max_vocabulary is not None:
            expected = "null is needed: the tokenizer bytes has all 256"
            raise UserError("data.params.max_vocabulary", max_vocabulary, expected)
        return Vocabulary(tokenizer, tuple(map(chr, range(256))))
    if max_vocabulary is not None and max_vocabulary <= NUM_SPECIAL:
        expected = f"more than {NUM_SPECIAL} are needed, padding, end and unknown among them"
        raise UserError("data.params.max_vocabulary", max_vocabulary, expected)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_SPLIT[tokenizer](text))
    order = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
    limit = None if max_vocabulary is None else max_vocabulary - NUM_SPECIAL
    return Vocabulary(tokenizer, tuple(order[:limit]))
