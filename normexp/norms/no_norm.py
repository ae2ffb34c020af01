"""No normalization: the baseline arm that keeps the network's layout and names."""

from __future__ import annotations

from torch import nn

from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y = x",
    source="identity (torch.nn.Identity)",
    dims=(0, 1, 2),
    statistic_sets={0: (), 1: (), 2: ()},
    is_centring=False,
    divisor=None,
    eps_place=None,
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    is_shift_invariant=False,
    is_scale_invariant=False,
    state=(),
    parameters={},
    single_value=None,
    takes_mask=False,
    keeps_channels_last=True,
    kernel="none: returns its input",
    kernel_cpu="none",
    kernel_cuda="none",
)


@NORMS.register("no_norm", CARD)
def build_no_norm(num_features: int, *, dims: int) -> nn.Module:
    """Build the identity: ``y = x``.

    Args:
        num_features: Channels C; without effect.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, 0 for features
            ``[N, C]``.

    Returns:
        A module without parameters.

    Raises:
        UserError: If ``dims`` is none of these.
    """
    check_dims("no_norm", dims, supported=CARD.dims, instead="dims 0, 1 or 2")
    return nn.Identity()
