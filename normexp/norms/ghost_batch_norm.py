"""Ghost batch normalization: batch normalization of small chunks of the micro-batch."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms._batch import (
    channels_second,
    check_input,
    evaluate,
    normalize_chunks,
    normalize_masked,
)
from normexp.norms._batch_running import RunningNorm, move_running
from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y_c = (x_c - mean_k) / sqrt(var_k + eps) * weight_c + bias_c, k the chunk of x",
    source="Hoffer, Hubara & Soudry, NeurIPS 2017, Algorithm 1",
    dims=(0, 1, 2),
    statistic_sets={
        0: (("ghost",),),
        1: (("ghost", "position"),),
        2: (("ghost", "position"),),
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
    kernel="native (torch.nn.functional.batch_norm, the chunks as channels); composite with a mask",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


class GhostBatchNorm(RunningNorm):
    """Batch normalization of chunks of consecutive samples.

    Args:
        num_features: Channels C.
        ghost_size: Samples in a chunk.
        dims: Number of position axes: 0, 1 or 2.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain and a shift a channel.
        momentum: Weight of a new chunk in the running statistics; None averages all chunks.
    """

    def __init__(
        self,
        num_features: int,
        ghost_size: int,
        *,
        dims: int,
        eps: float,
        affine: bool,
        momentum: float | None,
    ) -> None:
        super().__init__(num_features, dims=dims, eps=eps, affine=affine, momentum=momentum)
        self.ghost_size = ghost_size

    def find_problem(self, shape: tuple[int, ...]) -> str | None:
        """Tell why an input of that shape cannot be cut into whole chunks; None if it can."""
        num_samples = shape[0]
        if num_samples <= self.ghost_size or num_samples % self.ghost_size == 0:
            return None
        return (
            f"ghost_size={self.ghost_size} does not divide the {num_samples} samples of a "
            "micro-batch; choose sizes of which one divides the other, or a smaller micro-batch"
        )

    def forward(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "n l"] | None = None
    ) -> Float[Tensor, "*shape"]:
        """Return the normalized input.

        Args:
            x: Features, sequences or images, as ``dims`` says. Half-precision types are computed
                in float32 and cast back at the end.
            mask: For sequences, True where a position is valid; None for all. Statistics are over
                the valid positions of a chunk, and the output is zero elsewhere. A chunk with
                fewer than two valid positions leaves the buffers as they are.

        Raises:
            ValueError: If the shapes do not fit, in training the chunks do not come out whole, or
                a chunk has, without a mask, a single value a channel.
        """
        check_input(x, self.num_features, self.dims, mask)
        if not self.training:
            return evaluate(self, x, self.dims, mask)
        problem = self.find_problem(tuple(x.shape))
        if problem is not None:
            raise ValueError(problem)
        num_chunks = max(1, x.shape[0] // self.ghost_size)
        if mask is not None:
            return normalize_masked(self, x, mask, num_chunks)
        assert self.running_mean is not None
        y, mean, var = normalize_chunks(
            channels_second(x, self.dims),
            self.running_mean,
            self.weight,
            self.bias,
            num_chunks=num_chunks,
            eps=self.eps,
        )
        move_running(self, mean, var)
        return y.reshape(x.shape)

    def extra_repr(self) -> str:
        """Return the options as torch's layers print them."""
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}"


@NORMS.register("ghost_batch_norm", CARD)
def build_ghost_batch_norm(
    num_features: int,
    *,
    dims: int,
    ghost_size: int = 16,
    eps: float = 1e-5,
    affine: bool = True,
    momentum: float | None = 0.1,
) -> nn.Module:
    """Build ``y_c = (x_c - mean_k) / sqrt(var_k + eps) * weight_c + bias_c``.

    In training the micro-batch is cut into chunks k of ``ghost_size`` consecutive samples; mean
    and var (biased) are over one chunk and all positions: statistic sets of ghost_size*H*W
    (images), ghost_size*L (sequences) or ghost_size (features) elements. A micro-batch smaller
    than that is one chunk. In evaluation they are the running statistics, as in batch_norm.

    The running statistics move chunk by chunk, as if the chunks were micro-batches one after the
    other, and ``num_batches_tracked`` counts chunks. So a forward pass over k chunks has the
    outputs, gradients and buffers of batch_norm with k accumulated micro-batches of ghost_size.

    Args:
        num_features: Channels C.
        dims: 2 for images ``[N, C, H, W]``, 1 for sequences ``[N, L, C]``, which take a mask of
            valid positions, 0 for features ``[N, C]``.
        ghost_size: Samples in a chunk. A larger micro-batch must be a multiple of it.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.
        momentum: Weight of a new chunk in the running statistics. None averages all chunks with
            equal weight.

    Returns:
        A module that keeps the input's shape, with ``find_problem``.

    Raises:
        UserError: If ``dims`` is none of these or ``ghost_size`` is below 1.

    Source:
        Hoffer, Hubara & Soudry, "Train longer, generalize better", NeurIPS 2017, Algorithm 1.
    """
    check_dims("ghost_batch_norm", dims, supported=CARD.dims, instead="dims 0, 1 or 2")
    if ghost_size < 1:
        raise UserError("norm.params.ghost_size", ghost_size, "a whole number of 1 or more")
    return GhostBatchNorm(
        num_features, ghost_size, dims=dims, eps=eps, affine=affine, momentum=momentum
    )
