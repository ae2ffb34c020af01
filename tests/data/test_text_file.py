"""Any UTF-8 file as a language model's data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from command_line import normexp
from hypothesis import given
from hypothesis import strategies as st

from normexp.data import IGNORED_TARGET, Split, check_dataset, describe_dataset, load_dataset
from normexp.data import text_file as module
from normexp.data._vocabulary import END_ID, NUM_SPECIAL
from normexp.errors import UserError

# A hundred characters that are all different: where a part ends is seen.
TEXT = "".join(map(chr, range(0x100, 0x164)))


def write(file: Path, text: str = TEXT) -> str:
    file.write_bytes(text.encode())
    return str(file)


def text_of(split: Split) -> str:
    """Return the text of a split of bytes, read back from what is to be predicted."""
    stream = split.targets[split.targets != IGNORED_TARGET].tolist()
    assert stream.pop() == END_ID
    return bytes(token - NUM_SPECIAL for token in stream).decode()


def load_parts(path: str, **params: Any) -> list[str]:
    settings = {"path": path, "tokenizer": "bytes", "context_length": 4, **params}
    data = load_dataset("text_file", settings)
    return [text_of(split) for split in (data.train, data.val, data.test)]


def test_validation_and_test_are_the_end_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    assert load_parts(path) == [TEXT[:80], TEXT[80:90], TEXT[90:]]
    parts = load_parts(path, val_share=0.25, test_share=0.15)
    assert parts == [TEXT[:60], TEXT[60:85], TEXT[85:]]


@given(
    text=st.text("aé\n☃", min_size=60, max_size=80),
    val=st.integers(10, 40),
    test=st.integers(10, 40),
)
def test_parts_are_the_whole_file_in_the_shares_asked_for(text: str, val: int, test: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_text", lambda path: text)
        data = module.build_text_file(
            path="-",
            tokenizer="bytes",
            context_length=2,
            val_share=val / 100,
            test_share=test / 100,
        )
    parts = [text_of(split) for split in (data.train, data.val, data.test)]
    assert "".join(parts) == text
    # Rounded: half a character off at most.
    assert abs(len(parts[1]) - len(text) * val / 100) <= 0.5 + 1e-9
    assert abs(len(parts[2]) - len(text) * test / 100) <= 0.5 + 1e-9


def test_line_ends_stay_and_a_byte_order_mark_goes(tmp_path: Path) -> None:
    text = "one\r\ntwo\nthree\r" * 8
    assert "".join(load_parts(write(tmp_path / "a.txt", "\ufeff" + text))) == text


def test_what_the_data_tell(tmp_path: Path) -> None:
    params = {"path": write(tmp_path / "a.txt"), "context_length": 8, "num_train": 3}
    data, facts = load_dataset("text_file", params), describe_dataset("text_file", params)
    # 24 signs are trained on; the others are unknown.
    assert data.num_classes == facts.num_classes == NUM_SPECIAL + 24
    assert facts.tokens == data.tokens
    assert facts.input_shape == (8,)
    assert (facts.num_train, facts.num_val, facts.num_test) == (3, 2, 2)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    before = load_dataset("text_file", {"path": path, "context_length": 8})
    assert load_dataset("text_file", {"path": path, "context_length": 8}) is before
    write(tmp_path / "a.txt", TEXT[::-1] + "!")
    after = load_dataset("text_file", {"path": path, "context_length": 8})
    assert after.fingerprint != before.fingerprint


def test_a_relative_path_is_taken_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("one", TEXT), ("two", TEXT[::-1])):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.txt", text)
        # Of one size and time: nothing but the folder tells them apart.
        os.utime(tmp_path / name / "a.txt", (1e9, 1e9))
        monkeypatch.chdir(tmp_path / name)
        assert "".join(load_parts("a.txt")) == text
    monkeypatch.setenv("HOME", str(tmp_path / "one"))
    assert "".join(load_parts("~/a.txt")) == TEXT


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.txt", "there is no such file"),
        ("folder", "this is a folder; a text file is needed"),
        ("latin.txt", "no UTF-8: byte 3 cannot be read; convert the file first"),
        ("x" * 300, "cannot be read (File name too long)"),
        ("latin.txt/a.txt", "cannot be read (Not a directory)"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    monkeypatch.chdir(tmp_path)
    for act in (load_dataset, describe_dataset, check_dataset):
        with pytest.raises(UserError) as caught:
            act("text_file", {"path": name})
        assert str(caught.value) == f"data.params.path={tmp_path / name}: {says}"
    # A user of the command line sees the same line, and nothing is trained or written.
    words = ["data=text_file", "model=transformer", "norm=layer_norm", "placement=pre"]
    outcome = normexp("train", *words, f"data.params.path={name}")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1] == f"normexp: data.params.path={tmp_path / name}: {says}"
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({}, "context_length=128: the train split of text_file has 82 tokens, and a block needs"),
        ({"context_length": 50}, "context_length=50: the val split of text_file has 12 tokens"),
        ({"val_share": 0.0}, "val_share=0.0: a share above 0 and below 1 is needed"),
        ({"test_share": 1.0}, "test_share=1.0: a share above 0 and below 1 is needed"),
        (
            {"val_share": 0.5, "test_share": 0.5},
            "val_share=0.5: with test_share=0.5 nothing of the file is left to train on",
        ),
        ({"path": 7}, "path=7: a value of type str is needed"),
    ],
)
def test_impossible_choices_are_told_in_one_line(
    params: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        load_dataset("text_file", {"path": write(tmp_path / "a.txt"), **params})
    assert str(caught.value).startswith(f"data.params.{line}")


def test_a_path_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"data\.params\.path=: data text_file needs this"):
        load_dataset("text_file", {})
    monkeypatch.chdir(tmp_path)
    outcome = normexp("train", "data=text_file", "model=transformer", "norm=layer_norm")
    line = "normexp: data.params.path=???: a value is needed\n"
    assert (outcome.code, outcome.err) == (2, line)


def test_an_empty_file_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the train split of text_file has 2 tokens"):
        load_dataset("text_file", {"path": write(tmp_path / "empty.txt", "")})
