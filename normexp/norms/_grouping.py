"""Groups of channels: how many there are, and one variance a sample and group.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from normexp.errors import UserError
from normexp.norms._statistics import channel_axis, masked_mean_var

DEFAULT_NUM_GROUPS = 8


def resolve_num_groups(
    num_features: int, num_groups: int | None, channels_per_group: int | None
) -> int:
    """Return the number of groups, whichever way it was given; 8 if it was not.

    Args:
        num_features: Channels C.
        num_groups: Number of groups.
        channels_per_group: Channels in a group, instead.

    Raises:
        UserError: If both are given, one is below 1, or the channels cannot be divided so.
    """
    if num_groups is not None and channels_per_group is not None:
        raise UserError(
            "norm.params.channels_per_group",
            channels_per_group,
            f"excludes num_groups={num_groups}; set one of the two and the other to null",
        )
    if channels_per_group is None:
        given = DEFAULT_NUM_GROUPS if num_groups is None else num_groups
        key = "norm.params.num_groups"
    else:
        given, key = channels_per_group, "norm.params.channels_per_group"
    if given < 1:
        raise UserError(key, given, "a whole number of 1 or more is needed")
    if num_features % given:
        divisors = [n for n in range(1, num_features + 1) if num_features % n == 0]
        raise UserError(
            key,
            given,
            f"does not divide the {num_features} channels of a layer; "
            f"its divisors are {', '.join(map(str, divisors))}",
        )
    return given if channels_per_group is None else num_features // given


def describe_groups(num_groups: int, num_features: int) -> dict[str, int]:
    """Return both numbers that a grouping comes down to, as ``resolved_params`` tells them."""
    return {"num_groups": num_groups, "channels_per_group": num_features // num_groups}


def compute_group_var(
    x: Float[Tensor, "*shape"], num_groups: int, dims: int
) -> Float[Tensor, "*reduced"]:
    """Return the biased variance over all positions and the channels of a group, by channel.

    Args:
        x: Features ``[N, C]``, sequences ``[N, L, C]`` or images ``[N, C, H, W]``.
        num_groups: Number of groups.
        dims: Number of position axes.

    Returns:
        The variance of each channel's group, with extent 1 along the positions.
    """
    axis = channel_axis(dims)
    group_size = x.shape[axis] // num_groups
    grouped = x.reshape(*x.shape[:axis], num_groups, group_size, *x.shape[axis + 1 :])
    reduced = tuple(a for a in range(1, grouped.ndim) if a != axis)
    var = grouped.var(reduced, correction=0, keepdim=True)
    sizes = [-1] * grouped.ndim
    sizes[axis + 1] = group_size
    return var.expand(sizes).flatten(axis, axis + 1)


def compute_masked_group_mean_var(
    x: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"], num_groups: int
) -> tuple[Float[Tensor, "n 1 c"], Float[Tensor, "n 1 c"]]:
    """Return mean and biased variance over the valid positions and the channels of a group.

    Args:
        x: Sequences; what stands at invalid positions has no influence.
        mask: True where a position is valid.
        num_groups: Number of groups.

    Returns:
        (mean, variance) of each channel's group; zeros for a row without a valid position.
    """
    n, length, c = x.shape
    # A group of a sample is a sequence of its own, since the mask has no axis for groups.
    rows = x.reshape(n, length, num_groups, -1).transpose(1, 2).flatten(0, 1)
    row_mask = mask[:, None].expand(n, num_groups, length).flatten(0, 1)
    mean, var, _ = masked_mean_var(rows, row_mask, (1, 2))

    def by_channel(statistic: Tensor) -> Tensor:
        return statistic.reshape(n, 1, num_groups).repeat_interleave(c // num_groups, 2)

    return by_channel(mean), by_channel(var)
