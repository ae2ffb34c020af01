"""Instance normalization: one mean and variance a sample and channel, over the positions."""

from __future__ import annotations

from torch import nn

from normexp.norms._registry import NORMS, NormCard, check_dims

CARD = NormCard(
    formula="y_nc = (x_nc - mean_nc) / sqrt(var_nc + eps) * weight_c + bias_c",
    source="Ulyanov, Vedaldi & Lempitsky, arXiv:1607.08022, equation 2 (torch.nn.InstanceNorm2d)",
    dims=(2,),
    statistic_sets={2: (("position",),)},
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
    takes_mask=False,
    keeps_channels_last=False,
    kernel="native (torch.nn.functional.instance_norm, batch_norm of the N*C planes)",
    kernel_cpu="fused",
    kernel_cuda="fused",
)


@NORMS.register("instance_norm", CARD)
def build_instance_norm(
    num_features: int, *, dims: int, eps: float = 1e-5, affine: bool = True
) -> nn.Module:
    """Build ``y_nc = (x_nc - mean_nc) / sqrt(var_nc + eps) * weight_c + bias_c``.

    mean and var (biased) are over the H*W positions of one channel of one sample, in training
    and in evaluation; there are no running statistics. On 1x1 maps the output would be the
    shift whatever the input: torch raises there, and so does the check before training.

    Args:
        num_features: Channels C.
        dims: 2, images ``[N, C, H, W]``.
        eps: Added to the variance, inside the square root.
        affine: Whether to learn a gain (starts at 1) and a shift (starts at 0) a channel.
            True, like the other norms here; torch's layer has it off by default.

    Returns:
        A module that keeps the input's shape.

    Raises:
        UserError: If ``dims`` is not 2.

    Source:
        Ulyanov, Vedaldi & Lempitsky, "Instance Normalization", arXiv:1607.08022, 2016, eq. 2.
    """
    check_dims(
        "instance_norm",
        dims,
        supported=CARD.dims,
        instead="layer_norm (features have no positions)",
    )
    return nn.InstanceNorm2d(num_features, eps=eps, affine=affine)
