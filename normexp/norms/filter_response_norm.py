"""Filter response normalization with its thresholded linear unit: no mean, no batch.

Legend: N samples, L positions of a sequence, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import by_channel, position_axes, upcast, zero_invalid

CARD = NormCard(
    formula="y_nc = max(x_nc / sqrt(mean(x^2)_nc + eps) * weight_c + bias_c, threshold_c)",
    source="Singh & Krishnan, CVPR 2020, arXiv:1911.09737, FRN with TLU",
    dims=(1, 2),
    statistic_sets={1: (("position",),), 2: (("position",),)},
    is_centring=False,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=False,
    mixes_positions=True,
    is_same_in_eval=True,
    is_shift_invariant=False,
    is_scale_invariant=True,
    state=(),
    parameters={"weight": ("C",), "bias": ("C",), "threshold": ("C",)},
    single_value="sign",
    takes_mask=True,
    keeps_channels_last=True,
    kernel="composite",
    kernel_cpu="composite",
    kernel_cuda="composite",
    includes_activation=True,
    plain_at={"threshold": -1e9},
)


class FilterResponseNorm(nn.Module):
    """Division by a channel's root mean square over the positions, and a learned threshold.

    Args:
        num_features: Channels C.
        dims: Number of position axes of the input.
        eps: Added to the mean of squares, inside the square root.
        is_activated: Whether the threshold follows.
    """

    def __init__(self, num_features: int, *, dims: int, eps: float, is_activated: bool) -> None:
        super().__init__()
        self.dims = dims
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.threshold = nn.Parameter(torch.zeros(num_features)) if is_activated else None

    def forward(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized input.

        Args:
            x: Sequences ``[N, L, C]`` or images ``[N, C, H, W]``. Everything is computed in
                float32 for half-precision types and cast to their type at the end.
            mask: True where a position is valid; for sequences, where all are without one.

        Returns:
            The same shape, zero at invalid positions.

        Raises:
            ValueError: If images come with a mask.
        """
        if mask is not None and self.dims != 1:
            raise ValueError("only sequences take a mask")
        z, axes = upcast(x), position_axes(self.dims)
        if mask is None:
            mean_square = z.square().mean(axes, keepdim=True)
        else:
            z = zero_invalid(z, mask)
            count = mask.sum(1).clamp(min=1)[:, None, None]
            mean_square = z.square().sum(axes, keepdim=True) / count
        # One product for each sample and channel first: one pass fewer over the whole input.
        scale = torch.rsqrt(mean_square + self.eps) * by_channel(self.weight, self.dims)
        y = z * scale + by_channel(self.bias, self.dims)
        if self.threshold is not None:
            y = torch.maximum(y, by_channel(self.threshold, self.dims))
        if mask is not None:
            y = zero_invalid(y, mask)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        is_activated = self.threshold is not None
        return f"{len(self.weight)}, eps={self.eps}, is_activated={is_activated}"


@NORMS.register("filter_response_norm", CARD)
def build_filter_response_norm(
    num_features: int, *, dims: int, eps: float = 1e-6, is_activated: bool = True
) -> nn.Module:
    """Build ``y_nc = max(x_nc / sqrt(mean(x^2)_nc + eps) * weight_c + bias_c, threshold_c)``.

    The mean of squares is over the positions of one channel of one sample, without a mean
    taken out first: statistic sets of H*W (images) or L (sequences; with a mask, its valid
    positions) elements. The threshold takes the place of ReLU, which it equals where it starts,
    at 0. Where no activation belongs, there is none and no threshold parameter. In
    sequences an output depends on later positions: not for causal models.

    On 1x1 maps the output would be the sign of the input. The paper learns eps there; here it is
    fixed, and the check before training refuses such maps.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``.
        eps: Added to the mean of squares, inside the square root.
        is_activated: Whether an activation belongs behind it; normexp says so.

    Returns:
        A module that keeps the input's shape. For sequences its forward takes a mask of valid
        positions.

    Raises:
        UserError: If ``dims`` is neither 1 nor 2.

    Source:
        Singh & Krishnan, "Filter Response Normalization Layer: Eliminating Batch Dependence in
        the Training of Deep Neural Networks", CVPR 2020, arXiv:1911.09737.
    """
    check_dims(
        "filter_response_norm",
        dims,
        supported=CARD.dims,
        instead="rms_norm (features have no positions)",
    )
    return FilterResponseNorm(num_features, dims=dims, eps=eps, is_activated=is_activated)
