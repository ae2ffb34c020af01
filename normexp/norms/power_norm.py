"""Power normalization (PN): a running quadratic mean a channel, and an approximate gradient.

Legend: N samples, L positions, C channels, G groups, R replicas stacked by torch.vmap.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._batch import check_input
from normexp.norms._registry import NORMS, NormCard, StatisticSet, check_dims
from normexp.norms._statistics import scale_shift, upcast, zero_invalid

CARD = NormCard(
    formula="y_c = u_c / sqrt(mean(u_c^2) + eps) * weight_c + bias_c, "
    "u = x / sqrt(mean(x^2)_g + eps) over the channels of a group; after the warm-up the running "
    "mean stands for mean(u_c^2)",
    source="Shen, Yao, Gholami, Mahoney & Keutzer, ICML 2020, arXiv:2003.07845, Algorithm 2",
    dims=(0, 1),
    statistic_sets={0: (("group",), ("batch",)), 1: (("group",), ("batch", "position"))},
    is_centring=False,
    divisor="M",
    eps_place="inside_sqrt",
    mixes_samples=True,
    mixes_positions=True,
    is_same_in_eval=False,
    is_shift_invariant=False,
    is_scale_invariant=True,
    state=("running_phi", "ema_gz", "num_batches_tracked"),
    parameters={"weight": ("C",), "bias": ("C",)},
    single_value="sign",
    takes_mask=True,
    keeps_channels_last=False,
    kernel="composite (mean squares, quotients, product and sum)",
    kernel_cpu="composite",
    kernel_cuda="composite",
    has_exact_gradient=False,
    is_chained=True,
)


class PowerNorm(nn.Module):
    """Scales each token, then each channel; see ``build_power_norm``."""

    running_phi: Tensor
    ema_gz: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        dims: int,
        num_groups: int,
        eps: float,
        affine: bool,
        momentum: float,
        backward_momentum: float,
        warmup_micro_batches: int,
        has_token_scaling: bool,
    ) -> None:
        super().__init__()
        self.dims = dims
        self.num_groups = num_groups
        self.eps = eps
        self.momentum = momentum
        self.backward_momentum = backward_momentum
        self.warmup_micro_batches = warmup_micro_batches
        self.has_token_scaling = has_token_scaling
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_phi", torch.ones(num_features))
        self.register_buffer("ema_gz", torch.zeros(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    @property
    def statistic_sets(self) -> tuple[StatisticSet, ...]:
        """The axes of each statistic, without the tokens' where they are not scaled."""
        sets = CARD.statistic_sets[self.dims]
        return sets if self.has_token_scaling else sets[1:]

    def forward(
        self, x: Float[Tensor, "n *l c"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "n *l c"]:
        """Return the normalized features or sequences, in the input's type; zero where invalid."""
        check_input(x, len(self.running_phi), self.dims, mask)
        u = upcast(x) if x.ndim == 3 else upcast(x)[:, None]  # a feature vector is one position
        if mask is not None:
            u = zero_invalid(u, mask)
        if self.has_token_scaling:
            groups = u.reshape(*u.shape[:-1], self.num_groups, -1)
            mean_square = groups.square().mean(-1, keepdim=True)
            u = (groups / (mean_square + self.eps).sqrt()).flatten(-2)
        y = self._train(u, mask) if self.training else u / (self.running_phi + self.eps).sqrt()
        y = scale_shift(y, self.weight, self.bias, 1)
        if mask is not None:
            y = zero_invalid(y, mask)
        return y.reshape(x.shape).to(x.dtype)

    def _train(
        self, u: Float[Tensor, "n l c"], mask: Bool[Tensor, "n l"] | None
    ) -> Float[Tensor, "n l c"]:
        """Return the scaled channels, and update the running quadratic mean."""
        if mask is None:
            count = torch.full((), u.shape[0] * u.shape[1], dtype=u.dtype, device=u.device)
        else:
            count = mask.sum().to(u.dtype)
        # A micro-batch without a valid token counts for nothing.
        passes = self.num_batches_tracked + (count > 0)
        is_warm_up = passes <= self.warmup_micro_batches
        with torch.no_grad():
            batch_phi = _mean_over_tokens(u.square(), count)
            phi = torch.where(is_warm_up, batch_phi, self.running_phi)
        z: Tensor = _Scale.apply(
            u, phi, count, is_warm_up, self.ema_gz, self.eps, self.backward_momentum
        )
        with torch.no_grad():
            share = torch.where(is_warm_up, 1.0 / passes.clamp(min=1).to(u.dtype), 0.0)
            rate = torch.where(count > 0, self.momentum + (1.0 - self.momentum) * share, 0.0)
            self.running_phi.add_(rate * (batch_phi - self.running_phi))
            self.num_batches_tracked.copy_(passes)
        return z

    def extra_repr(self) -> str:
        """Return the options as ``print(model)`` shows them."""
        return (
            f"{len(self.running_phi)}, num_groups={self.num_groups}, eps={self.eps}, "
            f"affine={self.weight is not None}, momentum={self.momentum}, "
            f"backward_momentum={self.backward_momentum}, "
            f"warmup_micro_batches={self.warmup_micro_batches}, "
            f"has_token_scaling={self.has_token_scaling}"
        )


class _Scale(torch.autograd.Function):
    """``z = u / sqrt(phi + eps)`` with the paper's gradient.

    All tensors may have one more axis in front, of replicas: torch.vmap just stacks them.
    """

    @staticmethod
    def forward(
        u: Tensor,
        phi: Tensor,
        count: Tensor,
        is_warm_up: Tensor,
        ema_gz: Tensor,
        eps: float,
        momentum: float,
    ) -> Tensor:
        """Return z."""
        return u / _by_token((phi + eps).sqrt())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the backward pass needs."""
        u, phi, count, is_warm_up, ema_gz, ctx.eps, ctx.momentum = inputs
        ctx.save_for_backward(u, phi, count, is_warm_up)
        # Not a saved tensor: those must not change between the passes, and this one does where a
        # layer is used twice before the backward pass, or goes backward twice.
        ctx.ema_gz = ema_gz

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return ``(g - coefficient z) / sqrt(phi + eps)``; update the running mean of g z."""
        u, phi, count, is_warm_up = ctx.saved_tensors
        g, ema_gz = grads[0], ctx.ema_gz
        if torch.is_grad_enabled():
            # A derivative of this one is wanted: in the warm-up phi depends on u.
            phi = torch.where(is_warm_up[..., None], _mean_over_tokens(u.square(), count), phi)
        scale = _by_token((phi + ctx.eps).sqrt())
        z = u / scale
        mean_gz = _mean_over_tokens(g * z, count)
        coefficient = torch.where(is_warm_up[..., None], mean_gz, ema_gz)
        gu = (g - _by_token(coefficient) * z) / scale
        with torch.no_grad():
            mean_zz = _mean_over_tokens(z.square(), count)
            ema_gz.add_(ctx.momentum * (mean_gz - mean_zz * ema_gz))
        return gu, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Return the outputs of stacked inputs and buffers."""
        if in_dims[4] is None:
            raise ValueError("power_norm changes its buffers: stack them for torch.vmap")
        stacked = [
            v if not isinstance(v, Tensor) else v[None] if axis is None else v.movedim(axis, 0)
            for v, axis in zip(inputs, in_dims, strict=True)
        ]
        z: Tensor = _Scale.apply(*stacked)
        return z, 0


def _mean_over_tokens(v: Tensor, count: Tensor) -> Tensor:
    """Return the mean over samples and positions: ``[*r, n, l, c]`` to ``[*r, c]``."""
    return v.sum((-3, -2)) / count.clamp(min=1.0)[..., None]


def _by_token(v: Tensor) -> Tensor:
    """Return one number a channel in a shape that broadcasts: ``[*r, c]`` to ``[*r, 1, 1, c]``."""
    return v[..., None, None, :]


@NORMS.register("power_norm", CARD)
def build_power_norm(
    num_features: int,
    *,
    dims: int,
    num_groups: int = 1,
    eps: float = 1e-5,
    affine: bool = True,
    momentum: float = 0.1,
    backward_momentum: float = 0.1,
    warmup_micro_batches: int = 10000,
    has_token_scaling: bool = True,
) -> nn.Module:
    """Build ``y_c = u_c / psi_c * weight_c + bias_c`` of token-scaled u.

    First each token is divided by its root mean square over the channels of a group,
    ``u = x / sqrt(mean(x^2)_g + eps)``: statistic sets of C/num_groups elements. Then each
    channel is divided by ``psi_c = sqrt(phi_c + eps)``; no mean is subtracted. With ``phi_B`` the
    mean of u_c^2 over all valid tokens of the micro-batch (statistic sets of N*L elements, N for
    features), z = u / psi and g the gradient of z:

    - In the first ``warmup_micro_batches`` training passes (the paper's PN-V) phi is phi_B and
      the gradient is exact: ``(g - mean(g z) z) / psi``. has_exact_gradient=False on the card
      is about the next phase.
    - Afterwards (PN) phi is ``running_phi`` as it was before this pass, and the gradient is the
      paper's approximation, ``(g - ema_gz z) / psi``, with ``ema_gz`` as before this pass.
    - In evaluation phi is ``running_phi``, and no buffer changes.

    ``running_phi`` moves towards phi_B by the weight ``momentum`` after the warm-up and by
    ``momentum + (1 - momentum) / t`` in the t-th pass of it: the authors' code averages all passes
    of the warm-up and then moves on by the momentum, in each pass. ``ema_gz``, from the first pass
    on, becomes ``ema_gz + backward_momentum * (mean(g z) - mean(z^2) ema_gz)`` in every backward
    pass that reaches the input. Each micro-batch counts on its own under gradient accumulation; a
    micro-batch without a valid token does not count.

    The authors' code differs in three places: it approximates the gradient in the warm-up too,
    divides it by the batch's psi where the forward pass divided by the running one, and holds
    ema_gz divided by backward_momentum.

    ``ema_gz`` has the scale of the loss: a loss scaled by a changing factor, as for float16
    gradients, would spoil it.

    Half-precision inputs are computed in float32 and cast back once, at the end.

    Args:
        num_features: Channels C.
        dims: 0 for features ``[N, C]``, 1 for sequences ``[N, L, C]``; with sequences the layer
            takes a mask ``[N, L]``, True where a position is valid, and is zero elsewhere.
        num_groups: Groups of channels in the scaling of tokens.
        eps: Added to both mean squares, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.
        momentum: Weight of the new micro-batch in running_phi, 1 - alpha_fwd of the paper.
        backward_momentum: The same in ema_gz, 1 - alpha_bkw.
        warmup_micro_batches: Training passes before the running quadratic mean is used.
        has_token_scaling: Whether tokens are scaled first, as in the authors' code.

    Returns:
        A module that keeps the input's shape, with ``statistic_sets``.

    Raises:
        UserError: If ``dims`` is neither 0 nor 1, ``num_groups`` does not divide the channels,
            ``backward_momentum`` is outside [0, 1], or ``warmup_micro_batches`` is negative.

    Source:
        Shen, Yao, Gholami, Mahoney & Keutzer, "PowerNorm: Rethinking Batch Normalization in
        Transformers", ICML 2020, arXiv:2003.07845, Algorithm 2; scaling of tokens, warm-up and
        defaults from the authors' code (github.com/sIncerass/powernorm).
    """
    check_dims(
        "power_norm", dims, supported=CARD.dims, instead="batch_norm (the paper has no image form)"
    )
    if num_groups < 1 or num_features % num_groups:
        expected = f"a divisor of the {num_features} channels of a layer is needed"
        raise UserError("norm.params.num_groups", num_groups, expected)
    if not 0 <= backward_momentum <= 1:
        expected = "the weight of the new batch is needed, in [0, 1]"
        raise UserError("norm.params.backward_momentum", backward_momentum, expected)
    if warmup_micro_batches < 0:
        expected = "a whole number of 0 or more is needed"
        raise UserError("norm.params.warmup_micro_batches", warmup_micro_batches, expected)
    return PowerNorm(
        num_features,
        dims=dims,
        num_groups=num_groups,
        eps=eps,
        affine=affine,
        momentum=momentum,
        backward_momentum=backward_momentum,
        warmup_micro_batches=warmup_micro_batches,
        has_token_scaling=has_token_scaling,
    )
