"""Signed power: the magnitude to a learnable power, the sign kept.

Some tutorials call this "Power Norm". It computes no statistic, so it is no normalization, and
not the PowerNorm of Shen et al., which is ``power_norm`` here.

Legend: N samples, L positions, C channels, H, W height and width.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import scale_shift, upcast

CARD = NormCard(
    formula="y_c = sign(x_c) * (|x_c| + eps)^alpha * weight_c + bias_c, one alpha a layer",
    source="a tutorial's definition; cf. the signed root of Perronnin, Sanchez & Mensink, ECCV "
    "2010 (unverified)",
    dims=(0, 1, 2),
    statistic_sets={0: (), 1: (), 2: ()},
    is_centring=False,
    divisor=None,
    eps_place="magnitude",
    mixes_samples=False,
    mixes_positions=False,
    is_same_in_eval=True,
    is_shift_invariant=False,
    is_scale_invariant=False,
    state=(),
    parameters={"log_alpha": (), "weight": ("C",), "bias": ("C",)},
    single_value=None,
    takes_mask=False,
    keeps_channels_last=True,
    kernel="composite (sign, magnitude, power, products and a sum, elementwise)",
    kernel_cpu="composite",
    kernel_cuda="composite",
    is_experimental=True,
)


class SignedPower(nn.Module):
    """``sign(x) (|x| + eps)^alpha weight + bias``, elementwise."""

    def __init__(
        self, num_features: int, *, dims: int, eps: float, affine: bool, initial_alpha: float
    ) -> None:
        super().__init__()
        self.dims = dims
        self.eps = eps
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial_alpha)))
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def forward(self, x: Float[Tensor, n * rest]) -> Float[Tensor, n * rest]:
        """Return the signed power of the input, in the input's type."""
        x32 = upcast(x)
        y = x32.sign() * (x32.abs() + self.eps).pow(self.log_alpha.exp())
        y = scale_shift(y, self.weight, self.bias, self.dims)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return f"eps={self.eps}, affine={self.weight is not None}"


@NORMS.register("signed_power", CARD)
def build_signed_power(
    num_features: int,
    *,
    dims: int,
    eps: float = 1e-5,
    affine: bool = True,
    initial_alpha: float = 0.5,
) -> nn.Module:
    """Build ``y_c = sign(x_c) * (|x_c| + eps)^alpha * weight_c + bias_c``.

    No statistic is computed: an element's output depends on that element alone, and a factor s
    on the input becomes a factor s^alpha on the output. alpha = exp(log_alpha) stays positive;
    log_alpha, one number a layer, is learned, and weight decay pulls it to 0, which is the
    identity. sign(0) = 0, so zero gives bias_c, and the function jumps by eps^alpha to each side
    of it; in exchange the slope is at most alpha * eps^(alpha - 1) for alpha < 1, and 0 at zero.
    Half-precision inputs are computed in float32 and cast back once, at the end.

    Args:
        num_features: Channels C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``, 2 for images
            ``[N, C, H, W]``.
        eps: Added to the magnitude, in the input's unit: bounds the slope beside zero.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel. alpha
            is learned in either case.
        initial_alpha: Where alpha starts, above 0; 0.5 is the signed square root, 1 the identity.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is none of 0, 1, 2 or ``initial_alpha`` is not above 0.

    Source:
        A tutorial's definition. Cf. the signed root of Fisher vectors in Perronnin, Sanchez &
        Mensink, "Improving the Fisher Kernel for Large-Scale Image Classification", ECCV 2010
        (unverified).
    """
    check_dims("signed_power", dims, supported=CARD.dims, instead="features, sequences or images")
    if initial_alpha <= 0:
        raise UserError("norm.params.initial_alpha", initial_alpha, "a number above 0 is needed")
    return SignedPower(num_features, dims=dims, eps=eps, affine=affine, initial_alpha=initial_alpha)
