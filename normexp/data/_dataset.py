"""What a data set is to the rest of the package: three disjoint splits of tensors in memory.

Shapes: N samples, C channels, H and W pixels, L positions of a text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Token id that stands behind the end of a shorter text: a position that is not valid.
PAD_ID = 0
# Target of a position at which nothing is to be predicted; torch's cross entropy knows it.
IGNORED_TARGET = -100


@dataclass(frozen=True)
class TokenTask:
    """What texts ask of a model.

    Attributes:
        vocabulary_size: Number of token ids, the special ones included; every id is below it.
        is_language_modeling: Whether the next token is to be predicted at every position, from
            those up to it alone; else one label a text.
        has_padding: Whether texts are shorter than ``L`` and end in ``PAD_ID``.
    """

    vocabulary_size: int
    is_language_modeling: bool
    has_padding: bool


@dataclass(frozen=True)
class TextBytes:
    """Bytes of UTF-8 that the predictions of a split stand for.

    Attributes:
        total: Of all tokens; the end of a document counts as one byte.
        unknown: Of those that the vocabulary does not have.
    """

    total: float
    unknown: float


@dataclass(frozen=True, eq=False)
class Split:
    """Samples of one purpose.

    Attributes:
        inputs: Images, float32 ``[N, C, H, W]``, standardised by the training split's statistics;
            or texts, token ids int64 ``[N, L]`` with ``PAD_ID`` behind the end.
        targets: Labels, int64 ``[N]``; or next tokens, int64 ``[N, L]``, with ``IGNORED_TARGET``
            where nothing is to be predicted.
        text_bytes: Where the next token is predicted: the bytes that its targets stand for.
    """

    inputs: Tensor
    targets: Tensor
    text_bytes: TextBytes | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Split:
        """Return the split with its tensors on ``device``."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    @cached_property
    def lengths(self) -> NDArray[np.int64] | None:
        """Valid positions of each text, ``[N]``, on the host; None for images."""
        if self.inputs.is_floating_point():
            return None
        return (self.inputs != PAD_ID).sum(1).cpu().numpy()

    @cached_property
    def num_targets(self) -> NDArray[np.int64] | None:
        """Predictions that each sample asks for, ``[N]``, on the host; None if it is one each."""
        if self.targets.ndim == 1:
            return None
        return (self.targets != IGNORED_TARGET).sum(1).cpu().numpy()


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set whole in memory: three disjoint splits.

    Attributes:
        name: The registered name.
        train: What is trained on; input statistics and vocabulary come from here alone.
        val: What selects.
        test: What is evaluated once, at the end.
        num_classes: Number of labels, or of token ids where the next token is the label.
        fingerprint: SHA-256 over the raw samples of the splits, in their order.
        mean: Of images: per-channel mean of the training pixels, scaled to [0, 1]; else empty.
        std: Of images: their standard deviation (divided by their number); else empty.
        tokens: Of texts: what they ask of a model; else None.
        is_trimmed: Whether a batch of texts is cut to its longest text. Else it keeps the padding
            that all texts have.
    """

    name: str
    train: Split
    val: Split
    test: Split
    num_classes: int
    fingerprint: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    tokens: TokenTask | None = None
    is_trimmed: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: channels, height and width, or the positions of a text."""
        return tuple(self.train.inputs.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        """Return the data set with all tensors on ``device``."""
        return replace(
            self,
            train=self.train.to(device),
            val=self.val.to(device),
            test=self.test.to(device),
        )
