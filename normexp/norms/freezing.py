"""Freeze the batch norms of a model that is there already: statistics that no mode sets free."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from normexp.norms._recognize import find_holder, find_own_ways
from normexp.norms.batch_norm import BatchNormSequence
from normexp.norms.batch_renorm import BatchRenorm
from normexp.norms.factory import NormRecord
from normexp.norms.frozen_batch_norm import FrozenBatchNorm
from normexp.norms.ghost_batch_norm import GhostBatchNorm
from normexp.norms.sync_batch_norm import SyncBatchNorm

_WITH_DIMS = (BatchRenorm, GhostBatchNorm, SyncBatchNorm)
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class FrozenChannelsSecond(FrozenBatchNorm):
    """Frozen batch normalization of inputs with channels in axis 1 and any number of positions.

    It takes the place of those layers of torch that leave the number of positions open.
    """

    def forward(
        self, x: Float[Tensor, "n c *positions"], mask: Tensor | None = None
    ) -> Float[Tensor, "n c *positions"]:
        """Return the input normalized by the constants.

        Args:
            x: Channels in the second axis.
            mask: None: masks are for sequences with channels last.

        Raises:
            ValueError: If there is a mask.
        """
        if mask is not None:
            raise ValueError("a mask is for sequences [N, L, C]")
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, self.weight, self.bias, training=False, eps=self.eps)


def freeze_norms(model: nn.Module, *, train_affine: bool = True) -> list[str]:
    """Replace the batch norms of a model by frozen ones, in place, and return their paths.

    A frozen layer normalizes by the running statistics that the layer had, in training as in
    evaluation, so ``model.train()`` sets nothing free. Device, type, mode and names in the state
    stay. Statistics are the same tensors as before, and so are gain and shift while they are
    trained, so that an optimizer keeps its hold on them.

    Batch norms are torch's layers (also nn.SyncBatchNorm) and batch_norm, sync_batch_norm,
    ghost_batch_norm, batch_renorm and the frozen_batch_norm that would freeze later of this
    package. Layers that are frozen already, layers without running statistics and other norms stay
    as they are and are not in the list.

    Args:
        model: The model.
        train_affine: Whether gain and shift stay parameters; else they become constants (buffers
            of the same names, with values of their own), also in layers that were frozen with a
            trained gain and shift; no optimizer moves them.

    Returns:
        Dotted paths of the layers that are frozen now.

    Raises:
        ValueError: If a batch norm has a forward, hooks or parametrizations of its own, stands
            also where no replacement reaches it, waits for its first input, or is the model
            itself; nothing was frozen then.
    """
    found = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm)
        and not _is_frozen(module, train_affine)
        and isinstance(module.running_var, Tensor)
    }
    holder = find_holder(model, {id(module): path for path, module in found.items()})
    if holder is not None:
        raise ValueError(f"{holder[0]}: also held by {holder[1]}, which no replacement reaches")
    frozen: dict[int, FrozenBatchNorm] = {}
    for path, module in found.items():
        if not path:
            raise ValueError("the model is a batch norm itself: nothing can be put in its place")
        frozen.setdefault(id(module), _frozen(path, module, train_affine))
    for path, module in found.items():
        model.set_submodule(path, frozen[id(module)])
    return list(found)


def _is_frozen(layer: _BatchNorm, train_affine: bool) -> bool:
    """Tell whether a layer is what it is to become."""
    if not isinstance(layer, FrozenBatchNorm) or layer.freeze_after_micro_batches > 0:
        return False
    return train_affine or not layer.has_trained_affine


def _frozen(path: str, layer: _BatchNorm, train_affine: bool) -> FrozenBatchNorm:
    """Return what stands for a layer, with its very tensors."""
    assert layer.running_var is not None
    if is_lazy(layer.running_var):
        raise ValueError(f"{path}: {type(layer).__name__} before its first forward pass")
    problem = find_own_ways(layer)
    if problem is not None:
        raise ValueError(f"{path}: {problem}")
    is_trained = train_affine
    kind: type[FrozenBatchNorm] = FrozenBatchNorm
    if isinstance(layer, FrozenBatchNorm):
        kind, dims = type(layer), layer.dims
        is_trained = train_affine and layer.has_trained_affine
    elif isinstance(layer, _WITH_DIMS):
        dims = layer.dims
    elif isinstance(layer, BatchNormSequence):
        dims = 1
    elif type(layer).forward not in _FORWARDS:
        raise ValueError(f"{path}: {type(layer).__name__} has a forward of its own")
    elif isinstance(layer, nn.BatchNorm2d):
        dims = 2
    else:
        kind, dims = FrozenChannelsSecond, 0
    options = {
        "eps": layer.eps,
        "affine": layer.affine,
        "momentum": layer.momentum,
        "train_affine": is_trained,
        "freeze_after_micro_batches": 0,
    }
    new = kind(layer.num_features, dims=dims, **options)  # type: ignore[arg-type]
    for name, buffer in layer._buffers.items():
        new._buffers[name] = buffer
    for name, parameter in layer._parameters.items():
        if is_trained or parameter is None:
            new._parameters[name] = parameter
        else:
            # A copy: an optimizer may still hold the parameter, with a gradient or a decay.
            new._buffers[name] = parameter.detach().clone()
    new.training = layer.training
    record = getattr(layer, "norm_record", None)
    if isinstance(record, NormRecord):
        vars(new)["norm_record"] = NormRecord("frozen_batch_norm", record.role, options)
    return new
