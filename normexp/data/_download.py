"""Fetch a file once, whole or not at all, however many processes ask for it."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from normexp.errors import UserError

READ_SIZE = 1 << 16
TIMEOUT_S = 30.0  # Without a byte; not for the whole file.


@dataclass(frozen=True)
class RemoteFile:
    """A file on the network: where it lies, its name here, and its published MD5."""

    url: str
    filename: str
    md5: str


def fetch_file(remote: RemoteFile, folder: Path) -> Path:
    """Return the path of a file in ``folder``, fetching it first if it is not there.

    Processes that ask at once wait for one of them, under a lock. The bytes go to a temporary
    name, are checked there, and get their own name by one atomic move; so a file of that name is
    always whole, and a process that is killed leaves nothing that another could take for it.

    Args:
        remote: What to fetch.
        folder: Where it belongs; made if need be.

    Raises:
        UserError: Without a network, when the transfer ends early, when the checksum is wrong,
            or when the folder cannot be written.
    """
    path = folder / remote.filename
    if path.is_file():  # Before the lock: a finished folder may be read-only.
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{remote.filename}.lock"):
            if not path.is_file():
                _fetch_and_move(remote, path)
    except OSError as error:
        raise _error(remote, folder, f"{folder} cannot be written ({error})") from error
    return path


def _fetch_and_move(remote: RemoteFile, path: Path) -> None:
    """Fetch to a temporary name, check, and move in place; the caller holds the lock."""
    # One fixed name: the lock is ours, so a leftover of a killed process is overwritten.
    part = path.with_name(f".{path.name}.part")
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with part.open("wb") as file:
            for block in _read_blocks(remote, path.parent):
                digest.update(block)
                file.write(block)
        found = digest.hexdigest()
        if found != remote.md5:
            raise _error(
                remote,
                path.parent,
                f"wrong checksum: {remote.url} has MD5 {found}, expected {remote.md5}",
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _read_blocks(remote: RemoteFile, folder: Path) -> Iterator[bytes]:
    """Yield the bytes of a URL; raise when fewer come than were announced."""
    num_read = 0
    expected: int | None = None
    request = urllib.request.Request(remote.url, headers={"User-Agent": "normexp"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            length = response.headers.get("Content-Length")
            expected = None if length is None else int(length)
            while block := response.read(READ_SIZE):
                num_read += len(block)
                yield block
    except http.client.IncompleteRead as error:
        num_read += len(error.partial)
    except urllib.error.HTTPError as error:
        error.close()
        problem = f"the server of {remote.url} answered {error.code} {error.reason}"
        raise _error(remote, folder, problem) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise _error(
            remote, folder, f"no network: {remote.url} cannot be reached ({reason})"
        ) from error
    if expected is not None and num_read < expected:
        raise _error(
            remote,
            folder,
            f"truncated download: {remote.url} ended after {num_read} of {expected} bytes",
        )


def _error(remote: RemoteFile, folder: Path, problem: str) -> UserError:
    """Return the error for a file that cannot be fetched, with what to do."""
    return UserError(
        "data.params.root",
        "null",
        f"{problem}; try again, put {remote.filename} into {folder} yourself, or set "
        "data.params.root to a folder that holds the files",
    )
