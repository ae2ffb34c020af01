"""Texts that the Hugging Face Hub publishes, fetched once and read from files.

The package ``datasets`` fetches them, of one fixed commit, into its own cache. What it gives is
kept as one Parquet file a split in normexp's folder of downloads. So runs need neither the network
nor the package, and a folder that the user names is read by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from normexp.data._files import (
    KEY,
    damaged_error,
    data_home,
    missing_files_error,
    reading,
    resolve_root,
)
from normexp.data._texts import LabelledTexts
from normexp.errors import UserError

_SHARD = re.compile(r"-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class Original:
    """The form in which the authors published a data set.

    Attributes:
        folder: Name of the unpacked folder.
        paths: Split to what holds it there: a file or a folder.
        read: From that to its rows; raises UserError if it is not what it should be.
    """

    folder: str
    paths: Mapping[str, str]
    read: Callable[[Path], LabelledTexts]


@dataclass(frozen=True)
class Publication:
    """A data set of the Hub.

    Attributes:
        name: The registered name.
        hub_id: Owner and name of its repository there.
        config: Which of the repository's data sets.
        revision: Commit of the repository: another one could hold other texts.
        folder: Folder of the repository with the Parquet files.
        num_rows: Split, as it is called there, to its rows; splits not named are not used.
        num_classes: Number of labels; None for texts without one.
        original: How its authors published it.
    """

    name: str
    hub_id: str
    config: str
    revision: str
    folder: str
    num_rows: Mapping[str, int]
    num_classes: int | None
    original: Original

    @property
    def holds(self) -> str:
        """What a root folder must hold, for messages."""
        hub = ", ".join(f"{split}-*.parquet" for split in self.num_rows)
        original = ", ".join(self.original.paths.values())
        return f"{hub} of {self.hub_id}, or {original} of {self.original.folder}"


def find_files(publication: Publication, root: str | None) -> dict[str, list[Path]]:
    """Return the files of each split, in their order; fetch them first if ``root`` is None.

    Args:
        publication: What must be there.
        root: Folder of the Parquet files or of the original, or a folder around it; None for the
            download.

    Raises:
        UserError: If a file is missing or cannot be fetched.
    """
    base = _fetch(publication) if root is None else resolve_root(root, holds=publication.holds)
    for folder in (base / publication.folder, base / publication.original.folder, base):
        files = {split: _find_split(publication, folder, split) for split in publication.num_rows}
        missing = [f"the {split} split" for split, paths in files.items() if not paths]
        if not missing:
            return files
        if len(missing) < len(files):
            raise missing_files_error(folder, holds=publication.holds, missing=missing)
    raise missing_files_error(base, holds=publication.holds)


def read_splits(publication: Publication, root: str | None) -> dict[str, LabelledTexts]:
    """Return the rows of each split, under its name on the Hub; no labels where there are none.

    Args:
        publication: What to read.
        root: Folder of the files; None for the download.

    Raises:
        UserError: If a file is missing, damaged, or has other columns or labels than published.
    """
    splits = {}
    for split, paths in find_files(publication, root).items():
        parts = [_read_file(publication, path) for path in paths]
        texts = [text for part in parts for text in part.texts]
        if not texts:
            raise damaged_error(paths[0], f"no row in the {split} split")
        splits[split] = LabelledTexts(texts, [label for part in parts for label in part.labels])
    return splits


def read_utf8(path: Path) -> str:
    """Return the text of a file as it stands there, line ends included.

    Args:
        path: The file.

    Raises:
        UserError: If it cannot be read or is no UTF-8.
    """
    try:
        with reading(path):
            return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged_error(path, f"no UTF-8 at byte {error.start}") from error


def _find_split(publication: Publication, folder: Path, split: str) -> list[Path]:
    """Return the files of a split in a folder; none if it has none."""
    shards = sorted(folder.glob(f"{split}-*-of-*.parquet"))
    if shards:
        _check_shards(shards, split)
        return shards
    whole = folder / f"{split}.parquet"
    original = folder / publication.original.paths[split]
    return [path for path in (whole, original) if path.exists()][:1]


def _check_shards(shards: list[Path], split: str) -> None:
    """Raise unless the numbers in the names are all those below the one that each name tells."""
    matches = [_SHARD.search(path.name) for path in shards]
    numbers = [(int(match[1]), int(match[2])) for match in matches if match]
    if numbers != [(index, len(shards)) for index in range(len(shards))]:
        found = ", ".join(path.name for path in shards)
        expected = f"the files of the {split} split are not one whole set: {found}"
        raise UserError(KEY, shards[0].parent, expected)


def _read_file(publication: Publication, path: Path) -> LabelledTexts:
    """Return the rows of one file in either form."""
    if path.suffix == ".parquet":
        rows = _read_parquet(path, has_labels=publication.num_classes is not None)
    else:
        rows = publication.original.read(path)
    num_classes = publication.num_classes or 0
    for index, label in enumerate(rows.labels):
        if not 0 <= label < num_classes:
            needed = f"labels from 0 to {num_classes - 1} are needed"
            raise damaged_error(path, f"label {label} in row {index}; {needed}")
    return rows


def _read_parquet(path: Path, *, has_labels: bool) -> LabelledTexts:
    """Return the columns ``text`` and ``label`` of a Parquet file."""
    columns = ["text", "label"] if has_labels else ["text"]
    try:
        with reading(path), pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            table = file.read(columns) if set(columns) <= set(schema.names) else None
    except pa.ArrowException as error:
        raise damaged_error(path, error) from error
    wanted = "text (string) and label (integer)" if has_labels else "text (string)"
    found = ", ".join(f"{field.name} ({field.type})" for field in schema)
    problem = f"needed without gaps: {wanted}; found: {found}"
    if table is None or any(table[name].null_count for name in columns):
        raise damaged_error(path, problem)
    is_text = pa.types.is_string(table["text"].type) or pa.types.is_large_string(table["text"].type)
    if not is_text or (has_labels and not pa.types.is_integer(table["label"].type)):
        raise damaged_error(path, problem)
    labels = table["label"].to_pylist() if has_labels else []
    return LabelledTexts(table["text"].to_pylist(), labels)


def _fetch(publication: Publication) -> Path:
    """Return the folder of the downloaded splits, fetching them first if they are not there.

    Processes that ask at once wait for one of them, under a lock; files appear whole.
    """
    folder = data_home() / publication.name / publication.revision
    paths = {split: folder / f"{split}.parquet" for split in publication.num_rows}
    if all(path.is_file() for path in paths.values()):  # No lock: the folder may be read-only.
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not all(path.is_file() for path in paths.values()):
                _load_and_keep(publication, paths)
    except OSError as error:
        raise _fetch_error(publication, f"{folder} cannot be written ({error})") from error
    return folder


def _load_and_keep(publication: Publication, paths: Mapping[str, Path]) -> None:
    """Load a data set from the Hub and write its splits; the caller holds the lock."""
    try:
        # Imported here: it takes a second, and nothing but a download needs it.
        from datasets import load_dataset
    except ImportError as error:
        expected = 'needs the package datasets: pip install "normexp[text]"'
        raise UserError("data", publication.name, expected) from error
    try:
        loaded = load_dataset(publication.hub_id, publication.config, revision=publication.revision)
        found = {split: len(loaded[split]) if split in loaded else 0 for split in paths}
    except Exception as error:  # The network, the Hub and the package fail in many ways.
        problem = f"{publication.hub_id} cannot be fetched ({type(error).__name__}: {error})"
        raise _fetch_error(publication, problem) from error
    if found != dict(publication.num_rows):
        # Without the network the package takes whatever commit is in its cache.
        problem = f"{publication.hub_id} has {found} rows, {dict(publication.num_rows)} are right"
        raise _fetch_error(publication, problem)
    for split, path in paths.items():
        part = path.with_name(f".{path.name}.part")
        try:
            loaded[split].to_parquet(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _fetch_error(publication: Publication, problem: str) -> UserError:
    """Return the error for texts that cannot be fetched, with what to do."""
    do = f"try again, or set data.params.root to a folder that holds {publication.holds}"
    return UserError(KEY, "null", f"{problem}; {do}")
