"""A trained model that normalizes by the statistics of the batch in hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normexp.measure._tracked import elements_of, eval_mode, find_tracked_layers
from normexp.norms._statistics import upcast

Elements = Float[Tensor, "features elements"]
# Told, before each call of a layer: path and the elements that its statistics are over.
Observer = Callable[[str, Tensor], None]


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[list[str]]:
    """Let the layers with running statistics use those of each batch instead.

    The model is in eval mode meanwhile, so that nothing else changes: no dropout, no update of
    running statistics. A layer's mean and biased variance over the batch stand in for its
    buffers during its own forward pass and are gone after it; the buffers themselves are never
    written. Outputs thus depend on the whole batch. No gradient flows through the statistics.

    In scope are batch_norm in all its forms (torch's layers and subclasses, sync_batch_norm),
    batch_renorm (no correction: pure statistics of the batch), ghost_batch_norm (the batch is
    one chunk), switchable_norm (its batch part) and evo_norm_b0. Frozen layers keep their
    constants. With several processes each takes its own batch.

    Args:
        model: The model; left as it was, modes included.

    Yields:
        The paths of the layers that it acts on; empty for a model without any.

    Raises:
        ValueError: If a layer keeps running statistics of another kind (power_norm,
            instance_norm with tracking, unknown layers), or, on a call, if a batch holds a
            single value a channel.
    """
    with own_statistics(model) as paths:
        yield paths


@contextmanager
def own_statistics(model: nn.Module, observe: Observer | None = None) -> Iterator[list[str]]:
    """Do what ``batch_statistics`` says, and show each layer's input to an observer."""
    layers = find_tracked_layers(model)
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        for path, module in layers.items():
            swap = _Swap(path, observe)
            stack.callback(swap.put_back, module)
            handle = module.register_forward_pre_hook(swap.put_in, with_kwargs=True)
            stack.callback(handle.remove)
            after = module.register_forward_hook(swap.put_back, always_call=True)
            stack.callback(after.remove)
        yield list(layers)


class _Swap:
    """Puts the batch's statistics in the place of one layer's buffers for one forward pass."""

    def __init__(self, path: str, observe: Observer | None) -> None:
        self.path = path
        self.observe = observe
        self.kept: dict[str, Tensor] = {}

    def put_in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run before the layer."""
        if module.training:
            raise ValueError(f"{self.path}: in train mode; batch statistics are for eval mode")
        elements = elements_of(self.path, module, args, kwargs)
        if elements.shape[1] < 2:
            raise ValueError(
                f"{self.path}: a batch with {elements.shape[1]} value(s) a channel has no "
                "variance; 2 or more are needed, so use larger batches"
            )
        if self.observe is not None:
            self.observe(self.path, elements)
        var, mean = torch.var_mean(upcast(elements), dim=1, correction=0)
        for name, statistic in (("running_mean", mean), ("running_var", var)):
            buffer = module._buffers.get(name)
            if buffer is not None:
                self.kept[name] = buffer
                module._buffers[name] = statistic.to(buffer.dtype)

    def put_back(self, module: nn.Module, *_: Any) -> None:
        """Run after the layer, also when it raised."""
        module._buffers.update(self.kept)
        self.kept = {}
