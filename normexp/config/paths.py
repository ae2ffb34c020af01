"""Which parameters of a data set name files: where they lie changes nothing but what is read."""

from __future__ import annotations

from typing import Final

# A folder, a file. Made absolute in the parent process; no part of a cell's name, for which the
# data fingerprint stands.
DATA_PATHS: Final = ("root", "path")
