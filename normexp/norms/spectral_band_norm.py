"""Spectral band normalization: instance normalization, one band of frequencies at a time.

Legend: N samples, L positions of a sequence, C channels, H, W height and width, P positions in all,
B bands.
"""

from __future__ import annotations

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._registry import NORMS, NormCard, check_dims
from normexp.norms._statistics import by_channel, upcast

CARD = NormCard(
    formula="y_nc = sum_b weight_cb * IDFT(F_ncb / sqrt(power_ncb + eps)) + bias_c, F = DFT(x) "
    "without the mean, cut into bands b, power_ncb = mean_b(|F|^2) * (P - 1) / P^2",
    source="ours, experimental: with one band it is instance norm (Ulyanov et al., "
    "arXiv:1607.08022) by Parseval's identity",
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
    parameters={"weight": ("C", "num_bands"), "bias": ("C",)},
    single_value="raises",
    takes_mask=False,
    keeps_channels_last=False,
    kernel="composite (real FFT, a sum and a product a band, inverse FFT)",
    kernel_cpu="composite",
    kernel_cuda="composite",
    is_experimental=True,
)


class SpectralBandNorm(nn.Module):
    """Scales each band of frequencies; see ``build_spectral_band_norm``."""

    def __init__(
        self, num_features: int, *, dims: int, eps: float, affine: bool, num_bands: int
    ) -> None:
        super().__init__()
        self.dims = dims
        self.eps = eps
        self.num_bands = num_bands
        self.weight = nn.Parameter(torch.ones(num_features, num_bands)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def find_problem(self, shape: tuple[int, ...]) -> str | None:
        """Return why an input of that shape cannot be cut into the bands; None if it can."""
        sizes = shape[2:] if self.dims == 2 else shape[1:2]
        if max(sizes) // 2 >= self.num_bands:  # as many along that axis alone
            return None
        num_radii = _count_radii(sizes)
        if num_radii >= self.num_bands:
            return None
        return (
            f"{' x '.join(map(str, sizes))} positions have {num_radii} distinct frequencies beside "
            f"the mean, too few for num_bands={self.num_bands}; use fewer bands or larger inputs"
        )

    def forward(self, x: Float[Tensor, n * rest]) -> Float[Tensor, n * rest]:
        """Return the normalized input, in the input's type.

        Raises:
            ValueError: If the positions have fewer distinct frequencies than there are bands.
        """
        problem = self.find_problem(tuple(x.shape))
        if problem is not None:
            raise ValueError(problem)
        v = upcast(x)
        v = v if self.dims == 2 else v.transpose(1, 2)
        sizes = v.shape[2:]
        axes = tuple(range(-len(sizes), 0))
        spectrum = torch.fft.rfftn(v, dim=axes)
        scaled = spectrum * self._compute_gain(spectrum, sizes)
        y: Tensor = torch.fft.irfftn(scaled, s=sizes, dim=axes)
        y = y if self.dims == 2 else y.transpose(1, 2)
        if self.bias is not None:
            y = y + by_channel(self.bias, self.dims)
        return y.to(x.dtype)

    def _compute_gain(self, spectrum: Tensor, sizes: torch.Size) -> Tensor:
        """Return what to multiply each frequency by, ``[n, c, *half]``; zero for the mean."""
        power = spectrum.real.square() + spectrum.imag.square()
        bands = _compute_bands(sizes, self.num_bands, device=power.device)
        count = _count_conjugates(sizes, device=power.device).to(power.dtype)
        num_positions, axes = math.prod(sizes), tuple(range(2, power.ndim))
        gain = torch.zeros_like(power)
        for band in range(self.num_bands):
            members = count * (bands == band)
            total = (power * members).sum(axes, keepdim=True)
            share = (num_positions - 1) / num_positions**2 / members.sum()
            scale = (total * share + self.eps).rsqrt()
            if self.weight is not None:
                weight = self.weight[:, band]
                scale = scale * (weight[:, None, None] if self.dims == 2 else weight[:, None])
            gain = gain + scale * (bands == band)
        return gain

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return f"num_bands={self.num_bands}, eps={self.eps}, affine={self.weight is not None}"


def _compute_bands(sizes: tuple[int, ...], num_bands: int, *, device: torch.device) -> Tensor:
    """Return the band of each frequency of a real transform; negative for the mean."""
    radius = _square_radius(sizes, device=device)
    ordered, order = radius.flatten().sort()
    # The rank of a radius among the distinct ones. No torch.unique: its shape depends on data.
    steps = (ordered[1:] != ordered[:-1]).to(torch.int64).cumsum(0)
    steps = torch.cat([torch.zeros_like(ordered[:1]), steps])
    rank = torch.zeros_like(ordered).scatter(0, order, steps).reshape(radius.shape)
    return torch.div((rank - 1) * num_bands, steps[-1], rounding_mode="floor")


def _square_radius(sizes: tuple[int, ...], *, device: torch.device) -> Tensor:
    """Return ``(P f)^2``, f in cycles a position: whole numbers, so that ties are exact."""
    num_positions, total = math.prod(sizes), torch.zeros((), dtype=torch.int64, device=device)
    for axis, size in enumerate(sizes):
        is_last = axis == len(sizes) - 1  # of which a real transform holds one half
        index = torch.arange(size // 2 + 1 if is_last else size, device=device)
        cycles = torch.minimum(index, size - index) * (num_positions // size)
        total = total[..., None] + cycles.square()
    return total


def _count_radii(sizes: tuple[int, ...]) -> int:
    """Return the number of distinct radii beside 0."""
    num_positions = math.prod(sizes)
    cycles = [[k * num_positions // size for k in range(size // 2 + 1)] for size in sizes]
    return len({sum(c * c for c in point) for point in itertools.product(*cycles)}) - 1


def _count_conjugates(sizes: tuple[int, ...], *, device: torch.device) -> Tensor:
    """Return how many frequencies of the whole transform each column of the half stands for."""
    index = torch.arange(sizes[-1] // 2 + 1, device=device)
    return 2 - ((index == 0) | (2 * index == sizes[-1])).to(torch.int64)


@NORMS.register("spectral_band_norm", CARD)
def build_spectral_band_norm(
    num_features: int,
    *,
    dims: int,
    eps: float = 1e-5,
    affine: bool = True,
    num_bands: int = 2,
) -> nn.Module:
    """Build instance norm by bands of frequencies.

    F is the Fourier transform of one channel of one sample over its P positions (2-D for
    images). Its mean is removed, each band b is divided by the root of

        power_b = mean over the band of |F|^2 * (P - 1) / P^2, plus eps,

    and the result is transformed back: ``y = sum_b weight_cb * IDFT(F_b / sqrt(power_b + eps)) +
    bias_c``. Phases are kept. The factor makes power_b the variance that a signal would have whose
    every frequency had the band's mean power: one band is instance norm exactly, and any number
    gives variance 1 (but for eps, and with weights of 1), spread evenly over the frequencies.

    Bands are rings of equal radius |f|, f in cycles a position along each axis. The distinct radii
    above 0 are sorted and shared out in num_bands runs of as equal a number of radii as possible,
    so no band is empty; a map with fewer distinct radii than bands is refused. For sequences that
    is a cut into bands of equal width. A band has far fewer than P elements: at small sizes some
    consist of one frequency and its conjugate, whose magnitude comes out the same whatever it was.

    All positions mix, and there is no place for a mask in a Fourier transform: not for causal
    models, nor for sequences with padding. Half-precision inputs are computed in float32 and cast
    back once, at the end.

    Args:
        num_features: Channels C.
        dims: 1 for sequences ``[N, L, C]``, 2 for images ``[N, C, H, W]``.
        eps: Added to power_b, inside the square root.
        affine: Whether to learn a gain a channel and band (``[C, num_bands]``, starts at 1) and a
            shift a channel (starts at 0).
        num_bands: Bands of frequencies; 1 is instance norm, 2 the most that 2x2 maps allow.

    Returns:
        A module that keeps the input's shape, with ``find_problem``.

    Raises:
        UserError: If ``dims`` is neither 1 nor 2, or ``num_bands`` is below 1.

    Source:
        Ours, untested in the literature; the identity with instance norm is Parseval's.
    """
    check_dims(
        "spectral_band_norm",
        dims,
        supported=CARD.dims,
        instead="layer_norm (features have no positions)",
    )
    if num_bands < 1:
        raise UserError("norm.params.num_bands", num_bands, "a whole number of 1 or more is needed")
    return SpectralBandNorm(num_features, dims=dims, eps=eps, affine=affine, num_bands=num_bands)
