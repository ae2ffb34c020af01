import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


@dataclass
class FakeSource:
    """A web server on this machine: contents by path, slowness, and what was asked."""

    url: str = ""
    contents: dict[str, bytes] = field(default_factory=dict)
    announced_extra: int = 0
    delay_s: float = 0.0
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def fake_source(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSource]:
    source = FakeSource()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            source.requests.append(self.path)
            content = source.contents.get(self.path.lstrip("/"))
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) + source.announced_extra))
            self.end_headers()
            half = len(content) // 2
            self.wfile.write(content[:half])
            self.wfile.flush()
            time.sleep(source.delay_s)
            self.wfile.write(content[half:])

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        source.url = f"http://127.0.0.1:{server.server_address[1]}/"
        yield source
        server.shutdown()
        thread.join()


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home of data"
    monkeypatch.setenv("NORMEXP_DATA", str(home))
    return home
