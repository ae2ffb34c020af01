"""Keep known lines of native libraries off the console."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def filtered_native_stderr(noise: tuple[str, ...]) -> Iterator[None]:
    """Hold back file descriptor 2, then pass on the lines that hold none of the ``noise``.

    Native code writes there directly, where neither ``warnings`` nor ``sys.stderr`` can filter.

    Args:
        noise: Texts; a line with one of them is dropped.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held:
                if not any(text.encode() in line for text in noise):
                    os.write(2, line)
