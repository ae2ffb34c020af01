"""From a name and parameters to a data set, its declared sizes, or a check of its files."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normexp.config.paths import DATA_PATHS
from normexp.data._dataset import Dataset, TokenTask
from normexp.data._files import absolute, data_home
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._sizes import check_num_test, check_sizes
from normexp.registry import Entry


@dataclass(frozen=True)
class DatasetFacts:
    """What is known of a data set for given parameters before it is used.

    Attributes:
        input_shape: Channels, height and width of an image, or the positions of a text.
        num_classes: Number of labels, or of token ids where the next token is the label.
        num_train: Samples of the training split.
        num_val: Samples of the validation split.
        num_test: Samples of the test split.
        tokens: Of texts: what they ask of a model.
        is_trimmed: Whether a batch of texts is cut to its longest text.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    num_train: int
    num_val: int
    num_test: int
    tokens: TokenTask | None = None
    is_trimmed: bool = False


def load_dataset(name: str, params: Mapping[str, Any]) -> Dataset:
    """Return a data set, standardised, on the CPU.

    The last data set stays in memory, so several runs of one process load it once. Its tensors
    are shared: treat them as read-only.

    Args:
        name: A registered name.
        params: The builder's parameters; what is not given has its default.

    Raises:
        UserError: On an unknown name or parameter, a wrong type or size, or files that are
            missing or damaged.
    """
    entry = _checked_entry(name, params)
    resolved = _resolve(entry, params)
    params_json = json.dumps(resolved, sort_keys=True)
    return _load_cached(name, params_json, data_home(), _stamp_files(resolved))


def describe_dataset(name: str, params: Mapping[str, Any]) -> DatasetFacts:
    """Return shapes and split sizes: of images as declared, without opening a file.

    How long texts are and how many symbols they have only they can tell: they are loaded.

    Args:
        name: A registered name.
        params: The builder's parameters; what is not given has its default.

    Raises:
        UserError: On an unknown name or parameter, or a wrong type or size.
    """
    entry = _checked_entry(name, params)
    resolved = _resolve(entry, params)
    card = entry.card
    if card.is_text:
        data = load_dataset(name, params)
        return DatasetFacts(
            input_shape=data.input_shape,
            num_classes=data.num_classes,
            num_train=len(data.train),
            num_val=len(data.val),
            num_test=len(data.test),
            tokens=data.tokens,
            is_trimmed=data.is_trimmed,
        )
    assert card.image_shape is not None
    assert card.num_classes is not None
    num_test = resolved.get("num_test", card.num_test)
    num_samples = card.num_train_val + card.num_test
    if "num_test" in resolved:
        check_num_test(num_test, num_samples)
    num_val = resolved["num_val"]
    num_train = check_sizes(
        num_available=num_samples - num_test,
        num_val=num_val,
        num_train=resolved.get("num_train"),
        image_size=resolved.get("image_size"),
    )
    channels, height, width = card.image_shape
    size = resolved.get("image_size")
    return DatasetFacts(
        input_shape=(channels, size or height, size or width),
        num_classes=card.num_classes,
        num_train=num_train,
        num_val=num_val,
        num_test=num_test,
    )


def check_dataset(name: str, params: Mapping[str, Any]) -> None:
    """Raise unless the data set can be loaded; fetch its files where that is allowed.

    Meant for one call before any run starts: what it fetches, the runs find.

    Args:
        name: A registered name.
        params: The builder's parameters; what is not given has its default.

    Raises:
        UserError: On an unknown name or parameter, a wrong type or size, or files that are
            missing or damaged and cannot be fetched.
    """
    describe_dataset(name, params)
    entry = DATASETS.get(name, key="data")
    if entry.card.check_files is not None:
        entry.card.check_files(**_resolve(entry, params))


def _checked_entry(name: str, params: Mapping[str, Any]) -> Entry[DatasetCard]:
    """Return the entry after checking the parameters' names and types."""
    entry = DATASETS.get(name, key="data")
    entry.check_params(params, key="data.params")
    return entry


def _resolve(entry: Entry[DatasetCard], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with defaults filled in and paths made absolute."""
    resolved = entry.complete_params(params)
    for key in DATA_PATHS:
        if resolved.get(key) is not None:
            resolved[key] = str(absolute(resolved[key]))
    return resolved


def _stamp_files(resolved: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return size and time of what each parameter names, so that a change of a file is noticed."""
    stamps = []
    for key in DATA_PATHS:
        if resolved.get(key) is not None:
            # What is wrong with a path, the builder tells.
            with contextlib.suppress(OSError):
                stat = Path(resolved[key]).stat()
                stamps.append((stat.st_size, stat.st_mtime_ns))
    return tuple(stamps)


@functools.lru_cache(maxsize=1)
def _load_cached(
    name: str, params_json: str, home: Path, stamps: tuple[tuple[int, int], ...]
) -> Dataset:
    """Build a data set once for each set of parameters, folder of downloads and state of paths."""
    dataset: Dataset = DATASETS.get(name, key="data").build(**json.loads(params_json))
    return dataset
