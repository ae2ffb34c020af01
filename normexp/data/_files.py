"""Find a data set's files and tell in one line what is wrong with them."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from normexp.errors import UserError

KEY = "data.params.root"
READ_SIZE = 1 << 20


def data_home() -> Path:
    """Return the folder for downloads: ``$NORMEXP_DATA``, else ``~/.cache/normexp/data``."""
    home = os.environ.get("NORMEXP_DATA") or "~/.cache/normexp/data"
    return absolute(home)


def absolute(path: str) -> Path:
    """Return a path as the user means it: ``~`` opened, from the working folder if relative.

    Args:
        path: The path as written.
    """
    return Path(path).expanduser().absolute()


def resolve_root(root: str, *, holds: str) -> Path:
    """Return a folder that the user named, as an absolute path.

    Args:
        root: The folder; ``~`` is the home folder.
        holds: What must be in it, for the message.

    Raises:
        UserError: If there is no such folder.
    """
    path = absolute(root)
    if not path.is_dir():
        raise UserError(
            KEY,
            path,
            f"there is no such folder; name one that holds {holds}, or null to download into "
            f"{data_home()}",
        )
    return path


def missing_files_error(root: Path, *, holds: str, missing: Iterable[str] = ()) -> UserError:
    """Return the error for a folder that lacks files.

    Args:
        root: The folder.
        holds: What must be in it, for the message.
        missing: The names of those that are not, where the others are.
    """
    which = ", ".join(missing) or "the files"
    return UserError(
        KEY, root, f"not there: {which}; the folder must hold {holds}, or null to download"
    )


def truncated_error(path: Path) -> UserError:
    """Return the error for a file that ends before its content does.

    Args:
        path: The file.
    """
    return UserError(
        KEY,
        path.parent,
        f"truncated file: {path} ends early, after {path.stat().st_size} bytes; delete it and "
        "fetch it again",
    )


def damaged_error(path: Path, problem: object) -> UserError:
    """Return the error for a file whose content is not what it should be.

    Args:
        path: The file.
        problem: What was found, in a few words.
    """
    return UserError(KEY, path.parent, f"damaged file: {path} ({problem}); fetch it again")


def check_checksum(path: Path, expected: str, found: str, algorithm: str) -> None:
    """Raise unless the checksums agree.

    Args:
        path: The file.
        expected: The published checksum.
        found: The checksum of what lies there.
        algorithm: Name and, where it is not the file itself, what was summed.

    Raises:
        UserError: If they differ, with both.
    """
    if found != expected:
        raise UserError(
            KEY,
            path.parent,
            f"wrong checksum: {path} has {algorithm} {found}, expected {expected}; delete it and "
            "fetch it again, or set data.params.verify_checksum=false to use it as it is",
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into one line.

    Args:
        path: The file.

    Raises:
        UserError: If the file ends early, is no gzip file, or cannot be opened.
    """
    try:
        yield
    except EOFError as error:
        raise truncated_error(path) from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise damaged_error(path, error) from error
    except OSError as error:
        raise UserError(KEY, path.parent, f"{path} cannot be read ({error})") from error


def hash_file(path: Path, algorithm: str, *, unpacked: bool = False) -> str:
    """Return the checksum of a file, computed once while its size and time stay the same.

    Args:
        path: The file.
        algorithm: A name that hashlib knows.
        unpacked: Whether to sum the content of a gzip file in its place.

    Raises:
        UserError: If the file cannot be read to its end.
    """
    with reading(path):
        stat = path.stat()
        return _hash_file(path, algorithm, unpacked, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _hash_file(path: Path, algorithm: str, unpacked: bool, size: int, mtime_ns: int) -> str:
    """Compute a checksum; size and time are there to make the cache notice a change."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with gzip.open(path) if unpacked else path.open("rb") as file:
        while block := file.read(READ_SIZE):
            digest.update(block)
    return digest.hexdigest()
