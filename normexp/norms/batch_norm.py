"""Batch normalization: one mean and variance a channel, over the micro-batch and all positions."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.norms._batch import channels_second, check_input, evaluate, normalize_masked
from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y_c = (x_c - mean) / sqrt(var + eps) * weight_c + bias_c",
    source="Ioffe & Szegedy, ICML 2015, Algorithm 1 (torch.nn.BatchNorm1d, BatchNorm2d)",
    dims=(0, 1, 2),
    statistic_sets={
        0: (("batch",),),
        1: (("batch", "position"),),
        2: (("batch", "position"),),
    },
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
    takes_mask=True,
    keeps_channels_last=True,
    kernel="native (torch.nn.functional.batch_norm); composite with a mask",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class BatchNormSequence(nn.BatchNorm1d):
    """Batch normalization of sequences with channels last, over samples and positions.

    torch's BatchNorm1d wants the channels before the positions; here samples and positions are
    one axis, which takes no copy.
    """

    def forward(
        self, x: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "n l c"]:
        """Return the normalized input.

        With a mask, statistics are over the valid positions, the running variance is the unbiased
        one of these, and the output is zero elsewhere. Fewer than two valid positions in the
        whole micro-batch leave the buffers as they are.

        Args:
            x: Sequences. Half-precision types are computed in float32 and cast back at the end.
            mask: True where a position is valid; None for all.

        Raises:
            ValueError: If the shapes do not fit, or, without a mask, a channel has a single
                value in training.
        """
        check_input(x, self.num_features, 1, mask)
        if mask is not None:
            return normalize_masked(self, x, mask) if self.training else evaluate(self, x, 1, mask)
        y: Tensor = super().forward(channels_second(x, 1))
        return y.reshape(x.shape)


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

    In training mean and var (biased) are over the micro-batch and all positions: statistic sets
    of N*H*W (images), N*L (sequences) or N (features) elements. In evaluation they are the running
    statistics, ``running = (1 - momentum) * running + momentum * batch``, whose variance is
    the unbiased one. With gradient accumulation every micro-batch is normalized and counted on
    its own. In a causal model the statistics over L let the future leak.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, which take a mask of
            valid positions, 0 for features ``[N, C]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.
        momentum: Weight of the new batch in the running statistics (torch's sense; decay is one
            minus it). None averages all batches with equal weight; torch then reads the number
            of batches back in each forward pass, so that it runs neither under torch.vmap nor
            in one graph.

    Returns:
        A module that keeps the input's shape; torch's own for images and features.

    Raises:
        UserError: If ``dims`` is none of these.

    Source:
        Ioffe & Szegedy, "Batch Normalization", ICML 2015, Algorithms 1 and 2.
    """
    check_dims("batch_norm", dims, supported=CARD.dims, instead="dims 0, 1 or 2")
    layer = {0: nn.BatchNorm1d, 1: BatchNormSequence, 2: nn.BatchNorm2d}[dims]
    return layer(num_features, eps=eps, momentum=momentum, affine=affine)
