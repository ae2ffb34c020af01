"""The rules on split and image sizes, known before any file is opened."""

from __future__ import annotations

from normexp.errors import UserError


def check_sizes(
    *, num_available: int, num_val: int, num_train: int | None, image_size: int | None
) -> int:
    """Check the sizes that a user may choose and return the size of the training split.

    Args:
        num_available: Samples that training and validation share.
        num_val: Size of the validation split.
        num_train: Size of the training split; None takes all that is left.
        image_size: New height and width in pixels, or None.

    Raises:
        UserError: If a size is below 1 or more than there is.
    """
    if not 1 <= num_val < num_available:
        raise UserError(
            "data.params.num_val",
            num_val,
            f"a whole number from 1 to {num_available - 1} is needed: validation is taken out of "
            f"{num_available} samples and training needs at least one",
        )
    num_left = num_available - num_val
    if num_train is not None and not 1 <= num_train <= num_left:
        raise UserError(
            "data.params.num_train",
            num_train,
            f"a whole number from 1 to {num_left} is needed ({num_available} samples less "
            f"num_val={num_val}), or null for all",
        )
    if image_size is not None and image_size < 1:
        raise UserError(
            "data.params.image_size", image_size, "at least 1 pixel is needed, or null to keep"
        )
    return num_left if num_train is None else num_train


def check_num_test(num_test: int, num_samples: int) -> None:
    """Check the size of a test split that is taken out of ``num_samples`` samples.

    Raises:
        UserError: Unless at least one sample each is left for training and validation.
    """
    if not 1 <= num_test <= num_samples - 2:
        raise UserError(
            "data.params.num_test",
            num_test,
            f"a whole number from 1 to {num_samples - 2} is needed, of {num_samples} samples",
        )
