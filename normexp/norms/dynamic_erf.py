"""Dynamic erf (Derf): the error function with a learnable slope in the place of a norm.

Legend: N samples, L positions, C channels, H, W height and width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import scale_shift, upcast

CARD = NormCard(
    formula="y_c = erf(alpha * x_c + shift) * weight_c + bias_c, one alpha and shift a layer",
    source="Chen et al., arXiv:2512.10938, 2025",
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
    parameters={"alpha": (), "shift": (), "weight": ("C",), "bias": ("C",)},
    single_value=None,
    takes_mask=False,
    keeps_channels_last=True,
    kernel="composite (erf, products and sums, elementwise)",
    kernel_cpu="composite",
    kernel_cuda="composite",
)


class DynamicErf(nn.Module):
    """``erf(alpha x + shift) weight + bias``, elementwise."""

    def __init__(self, num_features: int, *, dims: int, affine: bool, initial_alpha: float) -> None:
        super().__init__()
        self.dims = dims
        self.alpha = nn.Parameter(torch.tensor(float(initial_alpha)))
        self.shift = nn.Parameter(torch.tensor(0.0))
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def forward(self, x: Float[Tensor, n * rest]) -> Float[Tensor, n * rest]:
        """Return the squashed input, in the input's type."""
        y = torch.erf(self.alpha * upcast(x) + self.shift)
        y = scale_shift(y, self.weight, self.bias, self.dims)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return f"affine={self.weight is not None}"


@NORMS.register("dynamic_erf", CARD)
def build_dynamic_erf(
    num_features: int, *, dims: int, affine: bool = True, initial_alpha: float = 0.5
) -> nn.Module:
    """Build ``y_c = erf(alpha * x_c + shift) * weight_c + bias_c``.

    No statistic is computed: an element's output depends on that element alone, in training and
    in evaluation, so there is nothing for padding to disturb and no mask. Half-precision inputs
    are computed in float32 and cast back once, at the end.

    Args:
        num_features: Channels C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``, 2 for images
            ``[N, C, H, W]``.
        affine: Whether to learn a gain (starts at 1) and a bias (starts at 0) a channel. The
            slope alpha and the shift (starts at 0) inside the error function, one number each a
            layer, are learned in either case.
        initial_alpha: Where alpha starts.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is none of 0, 1, 2.

    Source:
        Chen et al., "Stronger Normalization-Free Transformers", arXiv:2512.10938, 2025.
    """
    check_dims("dynamic_erf", dims, supported=CARD.dims, instead="features, sequences or images")
    return DynamicErf(num_features, dims=dims, affine=affine, initial_alpha=initial_alpha)
