"""Which configurations are the same cell, and what a cell and a run are called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from normexp.config.paths import DATA_PATHS
from normexp.records.schema import NUMERICS_VERSION

# Keys that cannot change a run's numbers: where results go, who is told, how the work is cut.
EXCLUDED_KEYS: Final = frozenset(
    {"name", "output_root", "experiment", "seeds", "logger", "plugins"}
)
EXCLUDED_TRAINER_KEYS: Final = frozenset({"checkpoint_interval_s"})
# Where files lie does not change what is in them: the data fingerprint stands for that.
EXCLUDED_DATA_PARAMS: Final = frozenset(DATA_PATHS)


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved cell configuration that can change its results.

    Args:
        config: The resolved configuration of a cell, as plain containers.
    """
    kept = {key: value for key, value in config.items() if key not in EXCLUDED_KEYS}
    if "trainer" in kept:
        trainer = kept["trainer"].items()
        kept["trainer"] = {k: v for k, v in trainer if k not in EXCLUDED_TRAINER_KEYS}
    if "data" in kept:
        data = dict(kept["data"])
        params = data.get("params", {}).items()
        data["params"] = {k: v for k, v in params if k not in EXCLUDED_DATA_PARAMS}
        kept["data"] = data
    return kept


def hash_of(value: object) -> str:
    """Return the hexadecimal SHA-256 of a plain value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def shorten_hashes(text: str) -> str:
    """Return a text with every SHA-256 in it cut to 8 digits, for people.

    Examples:
        >>> shorten_hashes("['" + "0123456789abcdef" * 4 + "']")
        "['01234567']"
    """
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1", text)


def cell_name(config: Mapping[str, Any], data_fingerprint: str) -> str:
    """Return ``<slug>-<hash8>``: the folder of a cell.

    Args:
        config: The resolved configuration of the cell.
        data_fingerprint: Hash over the data set's tensors.

    Returns:
        A short name that is safe on every file system. The slug is for people; the hash covers
        all that can change the cell's numbers.
    """
    digest = hash_of([identity_of(config), data_fingerprint, NUMERICS_VERSION])
    placement = config.get("placement") or {}
    parts = [
        config["data"]["name"],
        config["model"]["name"],
        config["norm"]["name"],
        placement.get("name"),
        f"mb{config['micro_batch_size']}x{config['accumulation_steps']}",
    ]
    slug = "-".join(re.sub(r"[^a-zA-Z0-9_.]+", "_", str(part)) for part in parts if part)
    return f"{slug[:80]}-{digest[:8]}"


def run_id(seed: int, config: Mapping[str, Any], data_fingerprint: str) -> str:
    """Return the 16 hexadecimal digits that name a run wherever it is mentioned.

    Args:
        seed: Seed of the run.
        config: The resolved configuration of the cell.
        data_fingerprint: Hash over the data set's tensors.
    """
    return hash_of([identity_of(config), data_fingerprint, NUMERICS_VERSION, seed])[:16]
