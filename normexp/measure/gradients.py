"""How large the gradient of each parameter is at given weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normexp.measure._tracked import in_float64, kept_random_state
from normexp.models import parameter_roles

# Where torch keeps the raw weight of a layer whose weight is a function of it.
_PARAMETRIZED = ".parametrizations.weight."


@dataclass(frozen=True)
class GradientNorm:
    """Size of one parameter's gradient.

    Attributes:
        name: Dotted name of the parameter; a raw weight's where a norm acts on weights.
        role: weight, bias, norm or skip.
        block: Number of the model's block that it belongs to, from 0 in the order of the forward
            pass; None outside of the blocks, or if the model does not name its ``block_paths``.
        num_elements: Numbers in it.
        gradient_norm: L2 norm of the gradient; 0 where the loss does not depend on it.
        weight_norm: L2 norm of the parameter.
    """

    name: str
    role: str
    block: int | None
    num_elements: int
    gradient_norm: float
    weight_norm: float


def gradient_norms(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    sum_losses: Callable[[Tensor, Tensor], Tensor],
    *,
    num_targets: int,
) -> tuple[float, list[GradientNorm]]:
    """Return a mean loss and the size of its gradient by parameter, in the model's order.

    The loss is ``sum over batches of sum_losses(model(inputs), targets) / max(1, num_targets)``,
    in training mode, so that a norm over the batch has the statistics of each batch. Parameters
    that are not trained are left out.

    The model is left as it was: weights, gradients, buffers, modes and torch's random state.

    Args:
        model: The model.
        batches: Inputs and targets of each forward pass, on the model's device.
        sum_losses: Sum of the losses of a batch, from logits and targets.
        num_targets: What the sums are divided by.

    Returns:
        (the loss, one entry a parameter that is trained).
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # The forward passes write into copies of the buffers, each going on from the one before.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    totals: dict[str, Tensor] = {}
    loss = 0.0
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(kept_random_state(next(model.parameters()).device))
        stack.enter_context(_training_mode(model))
        for inputs, targets in batches:
            part = sum_losses(functional_call(model, buffers, (inputs,)), targets)
            part = part * (1.0 / max(1, num_targets))
            grads = torch.autograd.grad(part, list(trained.values()), allow_unused=True)
            loss += float(part.detach())
            for name, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    totals[name] = totals[name] + grad if name in totals else grad
    roles = parameter_roles(model)
    paths = getattr(model, "block_paths", ())
    return loss, [
        GradientNorm(
            name=name,
            role=roles[name],
            block=_block_of(name, paths),
            num_elements=parameter.numel(),
            gradient_norm=_norm(totals[name]) if name in totals else 0.0,
            weight_norm=_norm(parameter.detach()),
        )
        for name, parameter in trained.items()
    ]


def summarize_gradients(
    norms: Sequence[GradientNorm], last_branch_weight: str | None
) -> dict[str, float]:
    """Return the gradient norm of all parameters together, and of one weight.

    Args:
        norms: One entry a parameter.
        last_branch_weight: Name of the weight that the model's last branch ends with; of its raw
            weight's gradient where a norm acts on the weight.

    Returns:
        ``initial_gradient/total``, and ``initial_gradient/last_branch`` if the model has such a
        weight and trains it.
    """
    found = {"initial_gradient/total": math.hypot(*(norm.gradient_norm for norm in norms))}
    if last_branch_weight is not None:
        raw = last_branch_weight.removesuffix(".weight") + _PARAMETRIZED
        for norm in norms:
            is_raw = norm.name.startswith(raw) and norm.role == "weight"
            if norm.name == last_branch_weight or is_raw:
                found["initial_gradient/last_branch"] = norm.gradient_norm
    return found


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in training mode as a run does, then each back in its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _norm(values: Tensor) -> float:
    """Return the L2 norm, in float64."""
    return float(in_float64(values).norm())


def _block_of(name: str, paths: Sequence[str]) -> int | None:
    """Return the number of the block that holds a parameter."""
    return next((i for i, path in enumerate(paths) if name.startswith(f"{path}.")), None)
