"""Random crop and horizontal flip, batched on the device that holds the images.

The draws are a function of (seed, update), one value a sample, made on the CPU; the images are
moved by indexing alone. So arms of one seed see the same augmented samples, however an update is
split into micro-batches.

Shapes: n samples, c channels, h and w pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from normexp.random import random_stream


@dataclass(frozen=True, eq=False)
class AugmentDraws:
    """What happens to each of n samples.

    Attributes:
        dy: Row of the padded image at which the crop starts, in [0, 2 * crop_padding].
        dx: Column at which it starts.
        flip: Whether the crop is mirrored left to right.
        crop_padding: Pixels of zeros on each side before the crop.
    """

    dy: Int64[Tensor, " n"]
    dx: Int64[Tensor, " n"]
    flip: Bool[Tensor, " n"]
    crop_padding: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.flip)

    def __getitem__(self, index: slice) -> AugmentDraws:
        """Return the draws of some of the samples, as for one micro-batch."""
        return AugmentDraws(self.dy[index], self.dx[index], self.flip[index], self.crop_padding)

    def to(self, device: torch.device | str) -> AugmentDraws:
        """Return the draws on ``device``."""
        return AugmentDraws(
            self.dy.to(device, non_blocking=True),
            self.dx.to(device, non_blocking=True),
            self.flip.to(device, non_blocking=True),
            self.crop_padding,
        )

    @staticmethod
    def concatenate(parts: Sequence[AugmentDraws]) -> AugmentDraws:
        """Return the draws of several updates as one, in order.

        Args:
            parts: At least one; all with the same ``crop_padding``.

        Raises:
            ValueError: If there is none, or the paddings differ.
        """
        paddings = {part.crop_padding for part in parts}
        if len(paddings) != 1:
            raise ValueError(f"one crop_padding is needed, found {sorted(paddings)}")
        return AugmentDraws(
            torch.cat([part.dy for part in parts]),
            torch.cat([part.dx for part in parts]),
            torch.cat([part.flip for part in parts]),
            paddings.pop(),
        )


def draw_augmentation(
    seed: int, update: int, num_samples: int, *, crop_padding: int, horizontal_flip: bool
) -> AugmentDraws:
    """Return the draws of one update, on the CPU.

    Sample i of an update has the same draws whatever ``num_samples`` is, and flips do not depend
    on the padding.

    Args:
        seed: The seed of the run.
        update: Number of the update, from 0.
        num_samples: Samples in the update, over all its micro-batches.
        crop_padding: Pixels of zeros on each side before the crop; 0 never moves an image.
        horizontal_flip: Whether to mirror half of the images, at random.

    Examples:
        >>> draws = draw_augmentation(0, 7, 4, crop_padding=2, horizontal_flip=True)
        >>> len(draws), draws.dy.dtype, bool((draws.dy <= 4).all())
        (4, torch.int64, True)
    """
    uniform = random_stream(seed, "augmentation", update).random((num_samples, 3))
    shifts = np.floor(uniform[:, :2] * (2 * crop_padding + 1)).astype(np.int64)
    flip = (uniform[:, 2] < 0.5) & horizontal_flip
    return AugmentDraws(
        torch.from_numpy(shifts[:, 0].copy()),
        torch.from_numpy(shifts[:, 1].copy()),
        torch.from_numpy(flip),
        crop_padding,
    )


def augment(images: Float[Tensor, "n c h w"], draws: AugmentDraws) -> Float[Tensor, "n c h w"]:
    """Return each image padded with zeros, cropped to its own size, then mirrored, as drawn.

    Zeros are the training mean once images are standardised.

    Args:
        images: Standardised images, **shape** ``[n, c, h, w]``, on any device.
        draws: One draw a sample; moved to the device of the images if need be.

    Returns:
        Images of the same shape. Values are moved, never computed. With no padding and no flip
        the result may be ``images`` itself.

    Raises:
        ValueError: If there are more or fewer draws than images.
    """
    if len(draws) != len(images):
        raise ValueError(f"{len(images)} images but {len(draws)} draws")
    draws = draws.to(images.device)
    padding = draws.crop_padding
    if padding > 0:
        height, width = images.shape[2:]
        padded = functional.pad(images, (padding, padding, padding, padding))
        # A view [n, c, 2p+1, 2p+1, h, w] of all crops; indexing copies one of them a sample.
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        samples = torch.arange(len(images), device=images.device)
        images = crops[samples, :, draws.dy, draws.dx]
    return torch.where(draws.flip[:, None, None, None], images.flip(-1), images)
