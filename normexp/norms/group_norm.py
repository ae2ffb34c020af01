"""Group normalization: one mean and variance a sample and group of channels.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.norms._grouping import (
    compute_masked_group_mean_var,
    describe_groups,
    resolve_num_groups,
)
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import upcast, zero_invalid

CARD = NormCard(
    formula="y_c = (x_c - mean_g) / sqrt(var_g + eps) * weight_c + bias_c, g the group of c",
    source="Wu & He, ECCV 2018, section 3.1 (torch.nn.GroupNorm)",
    dims=(0, 1, 2),
    statistic_sets={
        0: (("group",),),
        1: (("group", "position"),),
        2: (("group", "position"),),
    },
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
    takes_mask=True,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.group_norm; sequences are transposed for it, and a "
    "composite with a mask)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class GroupNorm(nn.GroupNorm):
    """torch's layer, which also tells both numbers that its grouping comes down to."""

    @property
    def resolved_params(self) -> dict[str, int]:
        """Groups and channels a group as they are in this layer."""
        return describe_groups(self.num_groups, self.num_channels)


class SequenceGroupNorm(GroupNorm):
    """The same over the positions of sequences, channels last; takes a mask."""

    def forward(
        self, x: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "n l c"]:
        """Return the normalized sequences.

        Args:
            x: Sequences. With a mask, everything is computed in float32 for half-precision types
                and cast to their type at the end; without one, torch's kernel does it.
            mask: True where a position is valid; all are without one.

        Returns:
            Sequences of the same shape, zero at invalid positions.
        """
        if mask is None:
            return super().forward(x.transpose(1, 2)).transpose(1, 2)
        valid = zero_invalid(upcast(x), mask)
        mean, var = compute_masked_group_mean_var(valid, mask, self.num_groups)
        y = (valid - mean) * torch.rsqrt(var + self.eps)
        if self.affine:
            y = y * self.weight + self.bias
        return zero_invalid(y, mask).to(x.dtype)


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

    mean and var (biased) are over the channels of group g and all positions of one sample:
    statistic sets of C/num_groups*H*W (images), C/num_groups*L (sequences; with a mask, its valid
    positions) or C/num_groups (features) elements. In sequences an output depends on later
    positions: not for causal models.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, 0 for features
            ``[N, C]``.
        num_groups: Number of groups, the same in every layer; 8 when neither is given.
        channels_per_group: Channels in a group, the same in every layer, instead of num_groups.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.

    Returns:
        A module that keeps the input's shape, with ``resolved_params``. For sequences its forward
        takes a mask of valid positions.

    Raises:
        UserError: If ``dims`` is none of these, both or bad group numbers are given, or the
            channels cannot be divided so.

    Source:
        Wu & He, "Group Normalization", ECCV 2018, equations 1 to 7.
    """
    check_dims("group_norm", dims, supported=CARD.dims, instead="images, sequences or features")
    groups = resolve_num_groups(num_features, num_groups, channels_per_group)
    layer = SequenceGroupNorm if dims == 1 else GroupNorm
    return layer(groups, num_features, eps=eps, affine=affine)
