"""Batch normalization: one mean and variance a channel, over the micro-batch and all positions."""

from __future__ import annotations

from torch import nn

from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c",
    source="Ioffe & Szegedy, ICML 2015, Algorithm 1 (torch.nn.BatchNorm1d, BatchNorm2d)",
    dims=(0, 2),
    statistic_sets={0: (("batch",),), 2: (("batch", "position"),)},
    is_centring=True,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=True,
    mixes_positions=True,
    is_same_in_eval=False,
    is_shift_invariant=True,
    is_scale_invariant=True,
    state=("running_mean", "running_var", "num_batches_tracked"),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="raises",
    takes_mask=False,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.batch_norm)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


@NORMS.register("batch_norm", CARD)
def build_batch_norm(
    num_features: int,
    *,
    dims: int,
    eps: float = 1e-5,
    affine: bool = True,
    momentum: float | None = 0.1,
) -> nn.Module:
    """Build ``y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c``.

    In training mean and var (biased) are over the micro-batch and, for images, all positions:
    statistic sets of N*H*W (images) or N (features) elements. In evaluation they are the running
    statistics, ``running = (1 - momentum) * running + momentum * batch``, whose variance is
    the unbiased one. With gradient accumulation every micro-batch is normalized and counted on
    its own.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 0 for features ``[N, C]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.
        momentum: Weight of the new batch in the running statistics (torch's sense; decay is one
            minus it). None averages all batches with equal weight.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is neither 0 nor 2.

    Source:
        Ioffe & Szegedy, "Batch Normalization", ICML 2015, Algorithms 1 and 2.
    """
    check_dims("batch_norm", dims, supported=CARD.dims, instead="images or features")
    layer = nn.BatchNorm2d if dims == 2 else nn.BatchNorm1d
    return layer(num_features, eps=eps, momentum=momentum, affine=affine)
