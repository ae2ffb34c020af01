import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pytest
import torch
from fake_hub_files import (
    WIKI_LINES,
    write_hub_imdb,
    write_hub_news,
    write_hub_wikitext,
    write_original_imdb,
    write_original_news,
    write_original_wikitext,
    write_parquet,
    write_shards,
)
from hypothesis import given
from hypothesis import strategies as st

from normexp.data import (
    IGNORED_TARGET,
    Split,
    ag_news,
    check_dataset,
    imdb,
    load_dataset,
    wikitext2,
)
from normexp.data import _huggingface as hub
from normexp.data._dataset import PAD_ID
from normexp.data._vocabulary import END_ID, NUM_SPECIAL, UNKNOWN_ID
from normexp.data.wikitext2 import join_articles
from normexp.errors import UserError

SIZES = {"train": 40, "test": 12}
NO_TEXT, NO_LABEL = pa.array([], pa.string()), pa.array([], pa.int64())


@pytest.fixture(autouse=True)
def _no_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the extra: what reads a folder must not need the package."""
    monkeypatch.setitem(sys.modules, "datasets", None)


@pytest.fixture(scope="session")
def package() -> ModuleType:
    return pytest.importorskip("datasets")


@pytest.fixture
def offline(package: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package is there, the network is not; its cache is the test's own."""
    from huggingface_hub import constants

    monkeypatch.setitem(sys.modules, "datasets", package)
    # Both read the environment on import, and others import them too.
    monkeypatch.setattr(package.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def texts_of(split: Split) -> list[str]:
    """The texts of a split whose tokens are bytes."""
    rows = [[i - NUM_SPECIAL for i in row if i != PAD_ID] for row in split.inputs.tolist()]
    return [bytes(row).decode("utf-8") for row in rows]


PUBLICATIONS = {
    module.PUBLICATION.name: module.PUBLICATION for module in (ag_news, imdb, wikitext2)
}
NEWS = {"tokenizer": "bytes", "max_vocabulary": None, "num_val": 10, "max_length": 100}
REVIEWS = {"tokenizer": "bytes", "max_vocabulary": None, "num_val": 4, "max_length": 100}


def test_an_article_goes_from_its_title_to_the_next_one() -> None:
    assert join_articles(WIKI_LINES["train"]) == [
        " = Alpha = \n\n First of = Alpha = . \n = Not alone = \n\n = = Section = = \n\n"
        " Second of naïve\u2028Alpha . \n\n\n",
        " = Beta = \n\n Only of Beta . \n\n",
    ]
    # Text before the first title is not lost, nor is a title at the end; ends are added.
    assert join_articles([" No title . ", "", " = A = "]) == [" No title . \n\n", " = A = \n"]
    assert join_articles([]) == join_articles(["", ""]) == []
    # A line that another touches is no title, nor are signs alone or in unequal number.
    assert len(join_articles([" One ", "", " = A = ", " touches ", "", " = B = ", "", " x "])) == 2
    for line in (" = ", " = = ", " = = = ", " = = A = ", " = A = = "):
        assert len(join_articles([" = A = ", "", line, ""])) == 1


@given(
    st.lists(st.sampled_from(["", " \n", " = A = \n", " = = B = = \n", " text . \n", " = x \n"]))
)
def test_no_line_is_lost_and_order_stays(lines: list[str]) -> None:
    joined = "".join(join_articles(lines))
    plain = "".join(line if line.strip() else "\n" for line in lines)
    # Only empty lines before the first text are left out.
    assert plain.endswith(joined)
    assert not plain.removesuffix(joined).strip()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_wikitext_is_the_same_from_the_hub_and_from_its_authors(
    num_shards: int, tmp_path: Path
) -> None:
    write_hub_wikitext(tmp_path / "hub", num_shards)
    write_original_wikitext(tmp_path / "original" / "wikitext-2-raw")
    params = {"context_length": 10}
    fingerprints = {
        load_dataset("wikitext2", {"root": str(root), **params}).fingerprint
        for root in (
            tmp_path / "hub",
            tmp_path / "hub" / "wikitext-2-raw-v1",
            tmp_path / "original",
            tmp_path / "original" / "wikitext-2-raw",
        )
    }
    assert len(fingerprints) == 1


def test_wikitext_keeps_its_official_splits(tmp_path: Path) -> None:
    write_hub_wikitext(tmp_path)
    data = load_dataset("wikitext2", {"root": str(tmp_path), "context_length": 10})
    assert data.tokens is not None
    assert data.tokens.is_language_modeling
    for split, name in ((data.train, "train"), (data.val, "validation"), (data.test, "test")):
        # Each token but the first end is predicted once: read the split back from its targets.
        ids = split.targets[split.targets != IGNORED_TARGET].tolist()
        articles = join_articles(WIKI_LINES[name])
        assert ids.count(END_ID) == len(articles)
        text = bytes(i - NUM_SPECIAL for i in ids if i != END_ID).decode("utf-8")
        assert text == "".join(articles)
    first = load_dataset(
        "wikitext2", {"root": str(tmp_path), "context_length": 10, "num_val_articles": 1}
    )
    assert (first.val.targets == END_ID).sum() == 1
    assert torch.equal(first.train.inputs, data.train.inputs)


def test_vocabulary_is_of_the_training_texts_alone(tmp_path: Path) -> None:
    write_hub_wikitext(tmp_path / "wiki")
    params = {"tokenizer": "words", "context_length": 3}
    data = load_dataset("wikitext2", {"root": str(tmp_path / "wiki"), **params})
    assert UNKNOWN_ID not in data.train.inputs
    assert UNKNOWN_ID in data.val.inputs  # Gamma
    assert UNKNOWN_ID in data.test.inputs  # Epsilon
    write_hub_news(tmp_path / "news", SIZES)
    data = load_dataset(
        "ag_news", {"root": str(tmp_path / "news"), "num_val": 10, "max_vocabulary": None}
    )
    assert UNKNOWN_ID not in data.train.inputs
    # Two words of each text have its number in them; the test split's have its name too.
    assert ((data.val.inputs == UNKNOWN_ID).sum(1) == 2).all()
    assert ((data.test.inputs == UNKNOWN_ID).sum(1) >= 2).all()


@pytest.mark.parametrize("num_shards", [1, 4])
def test_news_are_the_same_from_the_hub_and_from_their_authors(
    num_shards: int, tmp_path: Path
) -> None:
    write_hub_news(tmp_path / "hub", SIZES, num_shards)
    write_original_news(tmp_path / "original", SIZES)
    made = [
        load_dataset("ag_news", {"root": str(tmp_path / root), **NEWS})
        for root in ("hub", "hub/data", "original")
    ]
    assert len({data.fingerprint for data in made}) == 1
    assert made[0].num_classes == 4
    assert (len(made[0].train), len(made[0].val), len(made[0].test)) == (30, 10, 12)
    for split in (made[0].train, made[0].val, made[0].test):
        for text, label in zip(texts_of(split), split.targets.tolist(), strict=True):
            assert f" topic{label} \\ " in text


def test_reviews_are_the_same_from_the_hub_and_from_their_authors(tmp_path: Path) -> None:
    write_hub_imdb(tmp_path / "hub")
    write_original_imdb(tmp_path / "original" / "aclImdb")
    made = [
        load_dataset("imdb", {"root": str(tmp_path / root), **REVIEWS})
        for root in ("hub", "hub/plain_text", "original", "original/aclImdb")
    ]
    assert len({data.fingerprint for data in made}) == 1
    assert made[0].num_classes == 2
    for split in (made[0].train, made[0].val, made[0].test):
        for text, label in zip(texts_of(split), split.targets.tolist(), strict=True):
            assert text.startswith(("negword<br />", "posword<br />")[label])


def test_first_texts_are_a_fair_draw_of_files_in_the_order_of_labels(tmp_path: Path) -> None:
    write_hub_imdb(tmp_path, num_each=200)
    params = {**REVIEWS, "num_val": 100, "num_test": 100, "num_train": 100}
    data = load_dataset("imdb", {"root": str(tmp_path), **params})
    for split in (data.train, data.val, data.test):
        # 100 of 200 + 200 without replacement: mean 50, standard deviation below 4.4.
        assert 50 - 5 * 4.4 < int(split.targets.sum()) < 50 + 5 * 4.4


@pytest.mark.parametrize("split_seed", [0, 1])
def test_validation_is_taken_out_of_training(split_seed: int, tmp_path: Path) -> None:
    write_hub_news(tmp_path, SIZES)
    params = {"root": str(tmp_path), **NEWS, "split_seed": split_seed}
    data = load_dataset("ag_news", params)
    train, val, test = map(texts_of, (data.train, data.val, data.test))
    assert len({*train, *val, *test}) == sum(SIZES.values())
    assert all("train" in text for text in train + val)
    assert all("test" in text for text in test)
    # A smaller split is a prefix, and leaves the others as they were.
    less = load_dataset("ag_news", {**params, "num_train": 7, "num_test": 5})
    assert texts_of(less.train) == train[:7]
    assert texts_of(less.val) == val
    assert texts_of(less.test) == test[:5]


def test_split_seed_tells_which_texts_validate(tmp_path: Path) -> None:
    write_hub_news(tmp_path, SIZES)
    chosen = [
        set(texts_of(load_dataset("ag_news", {**NEWS, "root": str(tmp_path), "split_seed": s}).val))
        for s in (0, 1)
    ]
    assert chosen[0] != chosen[1]


def test_short_texts_are_left_out_before_the_split(tmp_path: Path) -> None:
    texts = ["", "one", "one two", "one two three"] * 5
    for split in ("train", "test"):
        write_shards(tmp_path, split, 1, text=texts, label=[0, 1] * 10)
    params = {"root": str(tmp_path), "num_val": 3, "min_length": 2}
    data = load_dataset("imdb", params)
    assert (len(data.train), len(data.val), len(data.test)) == (7, 3, 10)
    empty = load_dataset("imdb", {**params, "min_length": 0}).test
    assert empty.lengths is not None
    assert sorted(empty.lengths.tolist()) == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5


def _damage(root: Path) -> None:
    path = root / "plain_text" / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-20])


def _lose_split(root: Path) -> None:
    (root / "plain_text" / "test-00000-of-00001.parquet").unlink()


def _lose_shard(root: Path) -> None:
    path = root / "plain_text" / "train-00000-of-00001.parquet"
    path.rename(path.with_name("train-00000-of-00002.parquet"))


def _write_twice(root: Path) -> None:
    path = root / "plain_text" / "train-00000-of-00001.parquet"
    path.with_name("train-00000-of-00001-a1b2.parquet").write_bytes(path.read_bytes())


def _exchange(**columns: object) -> Callable[[Path], None]:
    def exchange(root: Path) -> None:
        write_parquet(root / "plain_text" / "train-00000-of-00001.parquet", **columns)

    return exchange


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_damage, r"damaged file: .*train-00000-of-00001\.parquet"),
        (_lose_split, r"not there: the test split; the folder must hold train-\*\.parquet"),
        (_lose_shard, r"train split are not one whole set: train-00000-of-00002\.parquet$"),
        (_write_twice, r"train split are not one whole set: .*-a1b2\.parquet"),
        (_exchange(review=["a"], label=[0]), r"found: review \(string\), label \(int64\)"),
        (_exchange(text=["a"], sentiment=[0]), r"found: text \(string\), sentiment \(int64\)"),
        (_exchange(text=[b"a"], label=[0]), r"found: text \(binary\), label"),
        (_exchange(text=["a"], label=["pos"]), r"found: text \(string\), label \(string\)"),
        (_exchange(text=["a", None], label=[0, 1]), r"needed without gaps: text"),
        (_exchange(text=["a", "b"], label=[0, None]), r"needed without gaps: text"),
        (_exchange(text=["a", "b"], label=[0, -1]), r"label -1 in row 1; labels from 0 to 1"),
        (_exchange(text=["a", "b"], label=[2, 0]), r"label 2 in row 0; labels from 0 to 1"),
        (_exchange(text=NO_TEXT, label=NO_LABEL), r"\(no row in the train split\)"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_in_one_line(
    change: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    write_hub_imdb(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=problem) as caught:
        check_dataset("imdb", {"root": str(tmp_path), **REVIEWS})
    assert caught.value.key == "data.params.root"
    assert "\n" not in str(caught.value)


def test_a_split_of_empty_lines_is_told(tmp_path: Path) -> None:
    write_hub_wikitext(tmp_path)
    path = tmp_path / "wikitext-2-raw-v1" / "validation-00000-of-00001.parquet"
    write_parquet(path, text=["", ""])
    with pytest.raises(UserError, match="the val split of wikitext2 has 1 tokens"):
        check_dataset("wikitext2", {"root": str(tmp_path), "context_length": 10})


def test_what_is_wrong_with_the_authors_files_is_told(tmp_path: Path) -> None:
    write_original_news(tmp_path / "news", SIZES)
    for row, problem in (
        ('"1","title"', "row 0 is not topic, title, description"),
        ('"World","title","text"', "row 0 is not topic, title, description"),
        ('"3","title","text"\n"1","title","cut off', "row 1 is not topic, title, description"),
        ('"5","title","text"', "label 4 in row 0; labels from 0 to 3"),
    ):
        (tmp_path / "news" / "train.csv").write_text(row)
        with pytest.raises(UserError, match=problem):
            check_dataset("ag_news", {"root": str(tmp_path / "news"), **NEWS})
    (tmp_path / "news" / "train.csv").write_bytes(b'"1","a\xff","b"\n')
    with pytest.raises(UserError, match=r"train\.csv \(no UTF-8 at byte 6\)"):
        check_dataset("ag_news", {"root": str(tmp_path / "news"), **NEWS})
    write_original_imdb(tmp_path / "imdb")
    for path in (tmp_path / "imdb" / "test" / "pos").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"not there: pos/\*\.txt; the folder must hold neg/"):
        check_dataset("imdb", {"root": str(tmp_path / "imdb"), **REVIEWS})


@pytest.mark.parametrize("name", ["ag_news", "imdb", "wikitext2"])
def test_an_empty_folder_and_none_at_all_are_told(name: str, tmp_path: Path) -> None:
    for root, problem in ((tmp_path, "not there: the files"), (tmp_path / "x", "no such folder")):
        with pytest.raises(UserError, match=problem) as caught:
            check_dataset(name, {"root": str(root)})
        assert caught.value.key == "data.params.root"


@pytest.mark.parametrize(
    ("name", "params", "problem"),
    [
        ("ag_news", {"num_val": 40}, r"num_val=40: a whole number from 1 to 39"),
        ("ag_news", {"num_val": 0}, r"num_val=0: a whole number from 1 to 39"),
        ("ag_news", {"num_train": 31}, r"num_train=31: a whole number from 1 to 30"),
        ("ag_news", {"num_test": 13}, r"num_test=13: a whole number from 1 to 12"),
        ("ag_news", {"num_test": 0}, r"num_test=0: a whole number from 1 to 12"),
        ("wikitext2", {"num_val_articles": 3}, r"num_val_articles=3: a whole number from 1 to 2"),
        ("wikitext2", {"num_test_articles": 0}, r"num_test_articles=0: a whole number from 1 to 2"),
    ],
)
def test_impossible_sizes_are_told(
    name: str, params: dict[str, int], problem: str, tmp_path: Path
) -> None:
    write_hub_news(tmp_path, SIZES)
    write_hub_wikitext(tmp_path)
    base = NEWS if name == "ag_news" else {"context_length": 10}
    with pytest.raises(UserError, match=problem):
        check_dataset(name, {"root": str(tmp_path), **base, **params})


@pytest.mark.parametrize("name", ["ag_news", "imdb", "wikitext2"])
def test_a_download_needs_the_package(name: str, data_home: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_dataset(name, {})
    assert str(caught.value) == (
        f'data={name}: needs the package datasets: pip install "normexp[text]"'
    )


def _publish(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder, which the package reads as it reads the Hub, the place of imdb."""
    write_hub_imdb(root)
    local = dataclasses.replace(
        imdb.PUBLICATION, hub_id=str(root), num_rows={"train": 20, "test": 20}
    )
    monkeypatch.setattr(imdb, "PUBLICATION", local)


@pytest.mark.usefixtures("offline")
def test_a_download_is_kept_and_read_without_the_package(
    tmp_path: Path, data_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(tmp_path / "hub", monkeypatch)
    check_dataset("imdb", REVIEWS)
    folder = data_home / "imdb" / imdb.PUBLICATION.revision
    kept = sorted(path.name for path in folder.glob("[!.]*"))
    assert kept == ["test.parquet", "train.parquet"]
    assert not list(folder.glob("*.part"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    fetched = imdb.build_imdb(**REVIEWS)
    named = imdb.build_imdb(root=str(tmp_path / "hub"), **REVIEWS)
    assert fetched.fingerprint == named.fingerprint


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["ag_news", "imdb", "wikitext2"])
def test_without_a_network_one_line_says_so(name: str, data_home: Path) -> None:
    with pytest.raises(UserError, match=r"data\.params\.root=null: .* cannot be fetched") as caught:
        check_dataset(name, {})
    assert "set data.params.root to a folder that holds train-*.parquet" in str(caught.value)
    assert not list(data_home.rglob("*.parquet"))


@pytest.mark.usefixtures("offline")
def test_another_number_of_rows_is_refused(
    tmp_path: Path, data_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(tmp_path / "hub", monkeypatch)
    wrong = dataclasses.replace(imdb.PUBLICATION, num_rows={"train": 20, "test": 21})
    monkeypatch.setattr(imdb, "PUBLICATION", wrong)
    with pytest.raises(UserError, match=r"'test': 20} rows, .*'test': 21} are right"):
        check_dataset("imdb", REVIEWS)
    assert not list(data_home.rglob("*.parquet"))


class FakeHub:
    """Stands for the package: counts the calls, and writes what it is told to."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.calls: list[tuple[object, ...]] = []
        self.error: Exception | None = None

    def load_dataset(self, *args: object, **kwargs: object) -> dict[str, "FakeHub"]:
        self.calls.append((*args, kwargs))
        time.sleep(0.05)
        return {"train": self, "test": self, "unsupervised": self}

    def __len__(self) -> int:
        return 20

    def to_parquet(self, path: Path) -> None:
        path.write_bytes(self.content)
        if self.error is not None:
            raise self.error


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    _publish(tmp_path / "hub", monkeypatch)
    path = tmp_path / "hub" / "plain_text" / "train-00000-of-00001.parquet"
    fake = FakeHub(path.read_bytes())
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def test_one_of_many_downloads_at_a_fixed_commit(fake_hub: FakeHub, data_home: Path) -> None:
    found: list[dict[str, list[Path]]] = []
    threads = [
        threading.Thread(target=lambda: found.append(hub.find_files(imdb.PUBLICATION, None)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    revision = "e6281661ce1c48d982bc483cf8a173c1bbeb5d31"
    assert fake_hub.calls == [(imdb.PUBLICATION.hub_id, "plain_text", {"revision": revision})]
    # What is whole is read without a lock, so from a read-only folder too.
    lock = data_home / "imdb" / revision / ".lock"
    lock.unlink(missing_ok=True)
    hub.find_files(imdb.PUBLICATION, None)
    assert not lock.exists()


def test_a_write_that_fails_leaves_nothing(fake_hub: FakeHub, data_home: Path) -> None:
    fake_hub.error = OSError("No space left on device")
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        hub.find_files(imdb.PUBLICATION, None)
    assert not [path for path in data_home.rglob("*") if "parquet" in path.name]
    fake_hub.error = None
    assert hub.read_splits(imdb.PUBLICATION, None).keys() == {"train", "test"}


@pytest.mark.parametrize("publication", PUBLICATIONS.values(), ids=PUBLICATIONS)
def test_a_publication_is_one_commit(publication: hub.Publication) -> None:
    assert len(publication.revision) == 40
    assert set(publication.num_rows) == set(publication.original.paths)


@pytest.mark.network
@pytest.mark.parametrize("name", ["ag_news", "imdb", "wikitext2"])
def test_the_hub_publishes_what_we_read(
    name: str, package: ModuleType, data_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", package)
    publication = PUBLICATIONS[name]
    splits = hub.read_splits(publication, None)
    assert {split: len(rows.texts) for split, rows in splits.items()} == publication.num_rows
    if name == "wikitext2":
        # The paper tells 600, 60 and 60; a title is not always told from a line like one.
        numbers = [len(join_articles(rows.texts)) for rows in splits.values()]
        assert numbers == [pytest.approx(600, rel=0.1), *[pytest.approx(60, rel=0.1)] * 2]
    else:
        for rows in splits.values():
            counts = torch.bincount(torch.tensor(rows.labels)).tolist()
            assert counts == [len(rows.texts) // len(counts)] * len(counts)
