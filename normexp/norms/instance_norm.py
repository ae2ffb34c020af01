"""Instance normalization: one mean and variance a sample and channel, over the positions.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import masked_mean_var, upcast, zero_invalid

CARD = NormCard(
    formula="y_nc = (x_nc - mean_nc) / sqrt(var_nc + eps) * weight_c + bias_c",
    source="Ulyanov, Vedaldi & Lempitsky, arXiv:1607.08022, equation 2 (torch.nn.InstanceNorm2d, "
    "InstanceNorm1d)",
    dims=(1, 2),
    statistic_sets={1: (("position",),), 2: (("position",),)},
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
    single_value="raises",
    takes_mask=True,
    keeps_channels_last=False,
    kernel="native (torch.nn.functional.instance_norm, batch_norm of the N*C planes; sequences are "
    "transposed for it, and a composite with a mask)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class SequenceInstanceNorm(nn.InstanceNorm1d):
    """torch's layer for sequences with channels last; takes a mask."""

    def forward(
        self, x: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "n l c"]:
        """Return the normalized sequences.

        Args:
            x: Sequences. With a mask, everything is computed in float32 for half-precision types
                and cast to their type at the end; without one, torch's kernel does it.
            mask: True where a position is valid; all are without one. A single valid position is
                no error, unlike a sequence of length 1: it becomes the shift.

        Returns:
            Sequences of the same shape, zero at invalid positions.
        """
        if mask is None:
            return super().forward(x.transpose(1, 2)).transpose(1, 2)
        valid = zero_invalid(upcast(x), mask)
        mean, var = self._choose_statistics(valid, mask)
        y = (valid - mean) * torch.rsqrt(var + self.eps)
        if self.affine:
            y = y * self.weight + self.bias
        return zero_invalid(y, mask).to(x.dtype)

    def _choose_statistics(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance to normalize with; note them where they are tracked."""
        running_mean, running_var = self.running_mean, self.running_var
        if running_mean is None or running_var is None:
            return masked_mean_var(x, mask, (1,))[:2]
        if not self.training:
            return running_mean, running_var
        mean, var, count = masked_mean_var(x, mask, (1,))
        with torch.no_grad():
            # The unbiased variance is that of 2 positions or more; other samples are left out,
            # and a batch of such samples alone leaves the buffers as they are.
            is_usable = (count >= 2).to(x.dtype)
            num_usable = is_usable.sum(0)
            usable = is_usable / num_usable.clamp(min=1.0)
            unbiased = var * count / (count - 1.0).clamp(min=1.0)
            rate = (self.momentum or 0.0) * num_usable.clamp(max=1.0)[0]
            for running, new in ((running_mean, mean), (running_var, unbiased)):
                running.mul_(1.0 - rate).add_(rate * (usable * new).sum((0, 1)))
        return mean, var


@NORMS.register("instance_norm", CARD)
def build_instance_norm(
    num_features: int,
    *,
    dims: int,
    eps: float = 1e-5,
    affine: bool = True,
    track_running_stats: bool = False,
    momentum: float | None = 0.1,
) -> nn.Module:
    """Build ``y_nc = (x_nc - mean_nc) / sqrt(var_nc + eps) * weight_c + bias_c``.

    mean and var (biased) are over the positions of one channel of one sample: statistic sets of
    H*W (images) or L (sequences; with a mask, its valid positions) elements, in training and in
    evaluation. On 1x1 maps and sequences of length 1 the output would be the shift whatever the
    input: torch raises there, and so does the check before training. In sequences an output
    depends on later positions: not for causal models.

    With track_running_stats training is the same, but evaluation takes running statistics, equal
    for all samples: a layer that the card does not describe (it has a state, does not mix
    positions in evaluation, and is not the same function there). The buffers hold the average
    over samples of mean_nc and of the unbiased variance; torch leaves num_batches_tracked at 0.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.
            True, like the other norms here; torch's layer has it off by default.
        track_running_stats: Whether to keep running statistics and evaluate with them.
        momentum: Weight of the new batch in them (torch's sense; decay is one minus it);
            without an effect unless they are tracked.

    Returns:
        A module that keeps the input's shape. For sequences its forward takes a mask of valid
        positions.

    Raises:
        UserError: If ``dims`` is neither 1 nor 2, or tracking has no momentum.

    Source:
        Ulyanov, Vedaldi & Lempitsky, "Instance Normalization", arXiv:1607.08022, 2016, eq. 2.
    """
    check_dims(
        "instance_norm",
        dims,
        supported=CARD.dims,
        instead="layer_norm (features have no positions)",
    )
    if track_running_stats and momentum is None:
        # torch takes None for 0 in this layer: the buffers would stay as they start.
        expected = "a number is needed to track; averaging all batches is not defined here"
        raise UserError("norm.params.momentum", "null", expected)
    layer = SequenceInstanceNorm if dims == 1 else nn.InstanceNorm2d
    return layer(
        num_features,
        eps=eps,
        # torch's annotation leaves None out, which its base class takes.
        momentum=0.0 if momentum is None else momentum,
        affine=affine,
        track_running_stats=track_running_stats,
    )
