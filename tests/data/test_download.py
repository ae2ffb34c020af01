import contextlib
import hashlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from normexp.data import _download
from normexp.data._download import RemoteFile, fetch_file
from normexp.errors import UserError

CONTENT = bytes(range(256)) * 2000


def remote(url: str, md5: str | None = None) -> RemoteFile:
    return RemoteFile(f"{url}file.bin", "file.bin", md5 or hashlib.md5(CONTENT).hexdigest())


def leftovers(folder: Path) -> list[str]:
    """What lies in the folder besides the lock."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def failure(file: RemoteFile, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        fetch_file(file, folder)
    assert caught.value.key == "data.params.root"
    assert "\n" not in str(caught.value)
    # What to do is in each of the messages, and nothing is left to be taken for the file.
    assert f"put file.bin into {folder} yourself" in str(caught.value)
    assert leftovers(folder) == []
    return str(caught.value)


def test_a_file_is_fetched_once(tmp_path: Path, fake_source) -> None:
    fake_source.contents["file.bin"] = CONTENT
    for _ in range(2):
        path = fetch_file(remote(fake_source.url), tmp_path / "deep" / "folder")
        assert path.read_bytes() == CONTENT
    assert fake_source.requests == ["/file.bin"]
    assert leftovers(path.parent) == ["file.bin"]


def test_two_processes_at_once_fetch_once_and_get_the_same(tmp_path: Path, fake_source) -> None:
    fake_source.contents["file.bin"] = CONTENT
    fake_source.delay_s = 1.0
    # The file itself, not its package, which would import torch and take ten times as long.
    code = (
        "import importlib.util, sys, time\n"
        "from pathlib import Path\n"
        "module, url, md5, folder = sys.argv[1:]\n"
        "spec = importlib.util.spec_from_file_location('download', module)\n"
        "download = importlib.util.module_from_spec(spec)\n"
        "sys.modules['download'] = download\n"
        "spec.loader.exec_module(download)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "start = time.perf_counter()\n"
        "remote = download.RemoteFile(url, 'file.bin', md5)\n"
        "path = download.fetch_file(remote, Path(folder))\n"
        "print(len(path.read_bytes()), time.perf_counter() - start)\n"
    )
    file = remote(fake_source.url)
    arguments = [sys.executable, "-c", code, _download.__file__, file.url, file.md5, str(tmp_path)]
    processes = [
        subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:  # Imports take longer than the transfer: start both together.
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [answer[0] for answer in answers] == [str(len(CONTENT))] * 2
    # Both were there while it was on its way: one fetched, the other waited.
    assert min(float(answer[1]) for answer in answers) > 0.1
    assert fake_source.requests == ["/file.bin"]
    assert leftovers(tmp_path) == ["file.bin"]


def test_no_file_of_that_name_is_seen_before_it_is_whole(tmp_path: Path, fake_source) -> None:
    fake_source.contents["file.bin"] = CONTENT
    fake_source.delay_s = 0.5
    thread = threading.Thread(target=fetch_file, args=(remote(fake_source.url), tmp_path))
    thread.start()
    seen: set[int] = set()
    part_sizes: set[int] = set()
    while thread.is_alive():
        for name, sizes in (("file.bin", seen), (".file.bin.part", part_sizes)):
            if (tmp_path / name).exists():
                # It may be moved between the two calls.
                with contextlib.suppress(FileNotFoundError):
                    sizes.add((tmp_path / name).stat().st_size)
        time.sleep(0.01)
    thread.join()
    assert seen <= {len(CONTENT)}
    assert min(part_sizes) < len(CONTENT)


def test_a_file_that_is_there_is_taken_without_writing(tmp_path: Path) -> None:
    # As in a folder that an administrator filled and made read-only: not even a lock.
    (tmp_path / "file.bin").write_bytes(CONTENT)
    assert fetch_file(remote("http://127.0.0.1:9/"), tmp_path) == tmp_path / "file.bin"
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_a_leftover_of_a_killed_process_is_overwritten(tmp_path: Path, fake_source) -> None:
    fake_source.contents["file.bin"] = CONTENT
    (tmp_path / ".file.bin.part").write_bytes(b"half" * 500_000)
    (tmp_path / ".file.bin.lock").touch()
    assert fetch_file(remote(fake_source.url), tmp_path).read_bytes() == CONTENT


def test_a_wrong_checksum_is_told_with_both(tmp_path: Path, fake_source) -> None:
    fake_source.contents["file.bin"] = CONTENT[:-1] + b"x"
    found = hashlib.md5(fake_source.contents["file.bin"]).hexdigest()
    message = failure(remote(fake_source.url), tmp_path)
    assert f"wrong checksum: {fake_source.url}file.bin has MD5 {found}" in message
    assert f"expected {hashlib.md5(CONTENT).hexdigest()}" in message


def test_a_transfer_that_ends_early_is_told(tmp_path: Path, fake_source) -> None:
    fake_source.contents["file.bin"] = CONTENT
    fake_source.announced_extra = 1000
    message = failure(remote(fake_source.url), tmp_path)
    assert f"truncated download: {fake_source.url}file.bin ended after 512000 of 513000" in message


def test_no_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as unused:  # Bound but not listening: connections are refused.
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        message = failure(remote(url), tmp_path)
    assert message.startswith(f"data.params.root=null: no network: {url}file.bin cannot be reached")
    assert "refused" in message


def test_a_server_without_the_file_is_told(tmp_path: Path, fake_source) -> None:
    assert f"the server of {fake_source.url}file.bin answered 404" in failure(
        remote(fake_source.url), tmp_path
    )


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        fetch_file(remote("http://127.0.0.1:9/"), tmp_path / "file" / "folder")
