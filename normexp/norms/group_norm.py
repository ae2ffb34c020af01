"""Group normalization: one mean and variance a sample and group of channels."""

from __future__ import annotations

from torch import nn

from normexp.errors import UserError
from normexp.norms._registry import NORMS, NormCard, check_dims

DEFAULT_NUM_GROUPS = 8

CARD = NormCard(
    formula="y_c = (x_c - mean_g) / sqrt(var_g + eps) * weight_c + bias_c, g the group of c",
    source="Wu & He, ECCV 2018, section 3.1 (torch.nn.GroupNorm)",
    dims=(0, 2),
    statistic_sets={0: (("group",),), 2: (("group", "position"),)},
    is_centring=True,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=True,
    is_same_in_eval=True,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=(),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="raises at N=1, else zero",
    takes_mask=False,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.group_norm)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class GroupNorm(nn.GroupNorm):
    """torch's layer, which also tells both numbers that its grouping comes down to."""

    @property
    def resolved_params(self) -> dict[str, int]:
        """Groups and channels a group as they are in this layer."""
        return {
            "num_groups": self.num_groups,
            "channels_per_group": self.num_channels // self.num_groups,
        }


@NORMS.register("group_norm", CARD)
def build_group_norm(
    num_features: int,
    *,
    dims: int,
    num_groups: int | None = None,
    channels_per_group: int | None = None,
    eps: float = 1e-5,
    affine: bool = True,
) -> nn.Module:
    """Build ``y_c = (x_c - mean_g) / sqrt(var_g + eps) * weight_c + bias_c``.

    mean and var (biased) are over the channels of group g and, for images, all positions, for
    each sample: statistic sets of C/num_groups*H*W (images) or C/num_groups (features) elements.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 0 for features ``[N, C]``.
        num_groups: Number of groups, the same in every layer; 8 when neither is given.
        channels_per_group: Channels in a group, the same in every layer, instead of num_groups.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.

    Returns:
        A module that keeps the input's shape, with ``resolved_params``.

    Raises:
        UserError: If ``dims`` is neither 0 nor 2, both or bad group numbers are given, or the
            channels cannot be divided so.

    Source:
        Wu & He, "Group Normalization", ECCV 2018, equations 1 to 7.
    """
    check_dims("group_norm", dims, supported=CARD.dims, instead="images or features")
    groups = _resolve_num_groups(num_features, num_groups, channels_per_group)
    return GroupNorm(groups, num_features, eps=eps, affine=affine)


def _resolve_num_groups(
    num_features: int, num_groups: int | None, channels_per_group: int | None
) -> int:
    """Return the number of groups, whichever way it was given."""
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
