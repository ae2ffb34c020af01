"""No normalization: the baseline arm that keeps the network's layout and names."""

from __future__ import annotations

from torch import nn

from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y = x",
    source="identity (torch.nn.Identity)",
    dims=(1, 2),
    statistic_axes={1: (), 2: ()},
    is_centring=False,
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    state=(),
    kernel="none: returns its input",
)


@NORMS.register("no_norm", CARD)
def build_no_norm(num_features: int, *, dims: int) -> nn.Module:
    """Build the identity: ``y = x``.

    Args:
        num_features: Channels C; without effect.
        dims: 2 for images ``[N, C, H, W]``, 1 for features ``[N, C]``.

    Returns:
        A module without parameters.

    Raises:
        UserError: If ``dims`` is neither 1 nor 2.
    """
    check_dims("no_norm", dims, supported=CARD.dims, instead="images or features")
    return nn.Identity()
