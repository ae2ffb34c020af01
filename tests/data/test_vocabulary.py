"""Texts to token ids and back; which symbols a vocabulary has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from normexp.data import PAD_ID, TextBytes
from normexp.data._vocabulary import (
    END_ID,
    NUM_SPECIAL,
    UNKNOWN_ID,
    TokenizerName,
    Vocabulary,
    build_vocabulary,
    count_tokens,
)
from normexp.errors import UserError

TOKENIZERS: tuple[TokenizerName, ...] = ("bytes", "characters", "words")
# Every code point, halves of surrogate pairs too: JSON may hold them.
TEXTS = st.text(st.characters(), max_size=60)
HALF_A_PAIR = "naïve \ud83d"


def symbols_of(vocabulary: Vocabulary, text: str) -> list[str]:
    return [vocabulary.symbols[index - NUM_SPECIAL] for index in vocabulary.encode(text)]


def words_of(text: str) -> list[str]:
    """Return words without a regular expression: runs of letters, digits and underscores."""
    words = []
    for is_word, run in itertools.groupby(text, lambda sign: sign.isalnum() or sign == "_"):
        letters = "".join(run)
        words += [letters] if is_word else [sign for sign in letters if not sign.isspace()]
    return words


@example(text=HALF_A_PAIR)
@given(text=TEXTS)
def test_bytes_are_those_of_the_text_whatever_was_trained_on(text: str) -> None:
    vocabulary = build_vocabulary([], "bytes", None)
    ids = vocabulary.encode(text)
    assert ids.dtype == np.int64
    assert len(vocabulary) == 259
    raw = bytes((ids - NUM_SPECIAL).tolist())
    assert raw.decode("utf-8", "surrogatepass") == text


@given(text=TEXTS)
def test_known_characters_come_back(text: str) -> None:
    vocabulary = build_vocabulary([text], "characters", None)
    assert "".join(symbols_of(vocabulary, text)) == text
    assert len(vocabulary) == NUM_SPECIAL + len(set(text))


@given(text=st.one_of(TEXTS, st.text("ab_1é٣ .,-\t\n\u2009", max_size=60)))
def test_known_words_come_back_without_white_space(text: str) -> None:
    vocabulary = build_vocabulary([text], "words", None)
    assert symbols_of(vocabulary, text) == words_of(text)
    assert len(vocabulary) == NUM_SPECIAL + len(set(words_of(text)))


def test_words_are_runs_of_letters_and_single_signs() -> None:
    text = "Don't  re_use x2, naïve\n(no)"
    expected = ["Don", "'", "t", "re_use", "x2", ",", "naïve", "(", "no", ")"]
    assert symbols_of(build_vocabulary([text], "words", None), text) == expected


@given(seen=TEXTS, text=TEXTS, tokenizer=st.sampled_from(["characters", "words"]))
def test_what_was_not_seen_is_unknown_and_takes_its_place(
    seen: str, text: str, tokenizer: TokenizerName
) -> None:
    vocabulary = build_vocabulary([seen], tokenizer, None)
    parts = list(text) if tokenizer == "characters" else words_of(text)
    known = set(seen if tokenizer == "characters" else words_of(seen))
    ids = vocabulary.encode(text).tolist()
    assert [index == UNKNOWN_ID for index in ids] == [part not in known for part in parts]
    # Padding and ends are set, never read from a text.
    assert not {PAD_ID, END_ID}.intersection(ids)


@example(text=HALF_A_PAIR, tokenizer="bytes")
@given(text=TEXTS, tokenizer=st.sampled_from(TOKENIZERS))
def test_tokens_are_counted_without_a_vocabulary(text: str, tokenizer: TokenizerName) -> None:
    vocabulary = build_vocabulary([], tokenizer, None)
    assert count_tokens(text, tokenizer) == len(vocabulary.encode(text))


def test_frequent_symbols_come_first_and_equal_ones_in_the_order_of_their_code_points() -> None:
    texts = ["cab", "bcd", "dé"]  # b, c, d twice; a, é once.
    assert build_vocabulary(texts, "characters", None).symbols == ("b", "c", "d", "a", "é")
    assert build_vocabulary(reversed(texts), "characters", None).symbols == tuple("bcdaé")
    words = build_vocabulary(["b a", "a ab"], "words", None)
    assert words.symbols == ("a", "ab", "b")


@given(text=st.text("abcdefgh", min_size=1, max_size=40), size=st.integers(4, 12))
def test_a_limit_counts_all_ids_and_keeps_the_most_frequent(text: str, size: int) -> None:
    vocabulary = build_vocabulary([text], "characters", size)
    assert len(vocabulary) == min(size, NUM_SPECIAL + len(set(text)))
    left_out = set(text) - set(vocabulary.symbols)
    fewest = min(text.count(symbol) for symbol in vocabulary.symbols)
    assert all(text.count(symbol) <= fewest for symbol in left_out)
    assert vocabulary.symbols == build_vocabulary([text], "characters", None).symbols[: size - 3]


@example(text=HALF_A_PAIR)
@given(text=TEXTS)
def test_ids_stand_for_all_bytes_of_a_text(text: str) -> None:
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    for tokenizer in ("bytes", "characters"):
        vocabulary = build_vocabulary([text], tokenizer, None)
        assert vocabulary.count_bytes(text) == TextBytes(num_bytes, 0.0)
    # Words as if one space stood behind each.
    vocabulary = build_vocabulary([text], "words", None)
    spaced = "".join(f"{word} " for word in words_of(text))
    num_bytes = len(spaced.encode("utf-8", "surrogatepass"))
    assert vocabulary.count_bytes(text) == TextBytes(num_bytes, 0.0)


def test_bytes_of_what_is_unknown_are_counted() -> None:
    characters = build_vocabulary(["ab"], "characters", None)
    assert characters.count_bytes("aé…a") == TextBytes(1 + 2 + 3 + 1, 2 + 3)
    words = build_vocabulary(["one two"], "words", None)
    assert words.count_bytes("one three, two") == TextBytes(4 + 6 + 2 + 4, 6 + 2)
    assert build_vocabulary([], "bytes", None).count_bytes("é") == TextBytes(2, 0)


@given(text=TEXTS)
def test_joined_tokens_have_the_same_ids(text: str) -> None:
    for tokenizer in ("characters", "words"):
        vocabulary = build_vocabulary([text], tokenizer, None)
        ids = vocabulary.encode(text)
        assert vocabulary.encode(vocabulary.join(ids)).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("tokenizer", "size", "says"),
    [
        ("characters", 3, "more than 3 are needed"),
        ("words", -1, "more than 3 are needed"),
        ("bytes", 259, "null is needed"),
    ],
)
def test_impossible_limits_are_told_in_one_line(
    tokenizer: TokenizerName, size: int, says: str
) -> None:
    with pytest.raises(UserError, match=rf"data\.params\.max_vocabulary={size}: {says}"):
        build_vocabulary(["text"], tokenizer, size)
