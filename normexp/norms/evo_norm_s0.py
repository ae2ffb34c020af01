"""EvoNorm-S0: a gated input over the deviation of its group; norm and activation in one.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.norms._grouping import (
    compute_group_var,
    compute_masked_group_mean_var,
    describe_groups,
    resolve_num_groups,
)
from normexp.norms._registry import NORMS, NormCard, StatisticSet, check_dims
from normexp.norms._statistics import by_channel, upcast, zero_invalid

CARD = NormCard(
    formula="y_c = x_c * sigmoid(v_c * x_c) / sqrt(var_g + eps) * weight_c + bias_c, g the group "
    "of c",
    source="Liu et al., NeurIPS 2020, arXiv:2004.02967, EvoNorm-S0",
    dims=(0, 1, 2),
    statistic_sets={
        0: (("group",),),
        1: (("group", "position"),),
        2: (("group", "position"),),
    },
    is_centring=False,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=True,
    is_same_in_eval=True,
    is_shift_invariant=False,
    is_scale_invariant=False,
    state=(),
    parameters={"weight": ("C",), "bias": ("C",), "v": ("C",)},
    single_value="amplified",
    takes_mask=True,
    keeps_channels_last=True,
    kernel="composite",
    kernel_cpu="composite",
    kernel_cuda="composite",
    includes_activation=True,
    plain_at={"v": 0.0},
)


class EvoNormS0(nn.Module):
    """``x * sigmoid(v * x)`` over the deviation of the group, then gain and shift.

    Args:
        num_features: Channels C.
        dims: Number of position axes of the input.
        num_groups: Number of groups.
        eps: Added to the variance, inside the square root.
        is_activated: Whether an activation belongs here; else gain and shift are all there is.
    """

    def __init__(
        self, num_features: int, *, dims: int, num_groups: int, eps: float, is_activated: bool
    ) -> None:
        super().__init__()
        self.dims = dims
        self.num_groups = num_groups
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.v = nn.Parameter(torch.ones(num_features)) if is_activated else None
        if not is_activated:
            self.statistic_sets: tuple[StatisticSet, ...] = ()

    @property
    def resolved_params(self) -> dict[str, int]:
        """Groups and channels a group as they are in this layer."""
        return describe_groups(self.num_groups, len(self.weight))

    def forward(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized and activated input.

        Args:
            x: Features ``[N, C]``, sequences ``[N, L, C]`` or images ``[N, C, H, W]``. Everything
                is computed in float32 for half-precision types and cast to their type at the end.
            mask: True where a position is valid; for sequences, where all are without one.

        Returns:
            The same shape, zero at invalid positions.

        Raises:
            ValueError: If a mask comes with anything but sequences.
        """
        if mask is not None and self.dims != 1:
            raise ValueError("only sequences take a mask")
        y = upcast(x) if mask is None else zero_invalid(upcast(x), mask)
        if self.v is not None:
            if mask is None:
                var = compute_group_var(y, self.num_groups, self.dims)
            else:
                _, var = compute_masked_group_mean_var(y, mask, self.num_groups)
            y = y * torch.sigmoid(by_channel(self.v, self.dims) * y)
            # One product for each sample and channel first: one pass fewer over the whole input.
            scale = torch.rsqrt(var + self.eps) * by_channel(self.weight, self.dims)
        else:
            scale = by_channel(self.weight, self.dims)
        y = y * scale + by_channel(self.bias, self.dims)
        if mask is not None:
            y = zero_invalid(y, mask)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        groups = f"{len(self.weight)}, num_groups={self.num_groups}"
        return f"{groups}, eps={self.eps}, is_activated={self.v is not None}"


@NORMS.register("evo_norm_s0", CARD)
def build_evo_norm_s0(
    num_features: int,
    *,
    dims: int,
    num_groups: int | None = None,
    channels_per_group: int | None = None,
    eps: float = 1e-5,
    is_activated: bool = True,
) -> nn.Module:
    """Build ``y_c = x_c * sigmoid(v_c * x_c) / sqrt(var_g + eps) * weight_c + bias_c``.

    var (biased) is over the channels of group g and all positions of one sample: statistic sets
    of C/num_groups*H*W (images), C/num_groups*L (sequences; with a mask, its valid positions) or
    C/num_groups (features) elements. The mean goes into var alone and is not taken out of x. v,
    one number a channel, starts at 1. Where no activation belongs, only gain and shift are left,
    as in the authors' code: no statistics and no v. In sequences an output depends on later
    positions: not for causal models.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, 0 for features
            ``[N, C]``.
        num_groups: Number of groups, the same in every layer; 8 when neither is given (the
            authors' 32 is for wider networks).
        channels_per_group: Channels in a group, the same in every layer, instead of num_groups.
        eps: Added to the variance, inside the square root.
        is_activated: Whether an activation belongs here; normexp says so.

    Returns:
        A module that keeps the input's shape, with ``resolved_params``. For sequences its forward
        takes a mask of valid positions.

    Raises:
        UserError: If ``dims`` is none of these, both or bad group numbers are given, or the
            channels cannot be divided so.

    Source:
        Liu et al., "Evolving Normalization-Activation Layers", NeurIPS 2020,
        arXiv:2004.02967.
    """
    check_dims("evo_norm_s0", dims, supported=CARD.dims, instead="images, sequences or features")
    groups = resolve_num_groups(num_features, num_groups, channels_per_group)
    return EvoNormS0(num_features, dims=dims, num_groups=groups, eps=eps, is_activated=is_activated)
