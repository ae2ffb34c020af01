"""Count the bytes that training holds: by part, saved for backward, and at the peak.

All counts are bytes of tensor storage as requested from the allocator; a storage that several
tensors share counts once, and a small view counts as the whole storage that it keeps alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from normexp.measure._native_stderr import filtered_native_stderr

# What the profiler and the allocator print by themselves, on every use.
_PROFILER_NOISE = ("ActivityProfiler", "gpuGetDeviceCount", "Memory block of unknown size")


@dataclass(frozen=True)
class PeakMemory:
    """Most bytes held at any moment of a step.

    Attributes:
        allocated: Peak of the bytes in live tensors, the baseline included.
        reserved: Peak of the bytes that the allocator held from the device; None where the
            device does not count them (CPU).
        baseline: Bytes in live tensors just before the step: the peak is never below them.
    """

    allocated: int
    reserved: int | None
    baseline: int


class _Saved:
    """What the graph holds in place of a saved tensor; dies with the graph's node."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_for_backward_bytes(forward: Callable[[], Tensor], *, exclude: Iterable[Tensor]) -> int:
    """Return the bytes that a forward pass keeps for its backward pass.

    Counted are the storages that autograd's graph still holds when ``forward`` has returned;
    parts of the graph that were dropped on the way are not. Not seen are tensors that a custom
    ``autograd.Function`` hides in attributes of its context, and what activation checkpointing
    keeps as arguments. The count belongs to the kernels: the same layer may save a workspace on
    one device and not on another.

    Args:
        forward: Runs the forward pass and returns its result, from which backward would start.
        exclude: Tensors that live anyway: parameters, buffers, inputs, targets. What shares
            their storage is not counted.

    Returns:
        Bytes, each storage once.
    """
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        # Detached: to hold the tensor itself would make a cycle when it is its node's output.
        holder = _Saved(tensor.detach())
        saved.append(weakref.ref(holder))
        return holder

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda holder: holder.tensor):
        result = forward()
    excluded = {key for key, _ in _storages(exclude)}
    alive = [holder.tensor for ref in saved if (holder := ref()) is not None]
    counted = {key: size for key, size in _storages(alive) if key not in excluded}
    del result
    return sum(counted.values())


def memory_by_part(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the bytes that live between two steps, by part.

    Args:
        model: The model; a tied parameter counts once.
        optimizer: Its optimizer; the state exists only after the first update. None for no
            optimizer.

    Returns:
        ``parameter_bytes``, ``gradient_bytes``, ``buffer_bytes`` and ``optimizer_bytes``.
    """
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    state = optimizer.state if optimizer is not None else {}
    return {
        "parameter_bytes": storage_bytes(model.parameters()),
        "gradient_bytes": storage_bytes(gradients),
        "buffer_bytes": storage_bytes(model.buffers()),
        "optimizer_bytes": storage_bytes(_tensors_in(dict(state))),
    }


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind the tensors, each storage once.

    Args:
        tensors: Tensors of any shape, on any device.

    Examples:
        >>> x = torch.zeros(10)
        >>> storage_bytes([x, x[:3], torch.zeros(2, dtype=torch.float64)])
        56
    """
    return sum(dict(_storages(tensors)).values())


def peak_allocated_bytes(
    step: Callable[[], None],
    device: torch.device | str,
    *,
    resident_bytes: Callable[[], int] = lambda: 0,
) -> PeakMemory:
    """Return the peak memory of a step that has been done once before.

    The step is called twice and the second call is measured, so that gradients, optimizer state
    and kernel choices are there. On CUDA the device's own counters are read. The CPU has none:
    there the allocations and releases that the profiler sees are summed in order of time, on
    top of ``resident_bytes``. That is exact, to the byte requested, for tensors that the calling
    thread allocates and releases and that were not there before the first of the two calls;
    scratch memory of a kernel's own threads is not seen, so measure with one thread.

    Args:
        step: One whole update: forward, backward, optimizer step.
        device: Where the step runs.
        resident_bytes: Bytes in the tensors that live just before a step, such as
            ``storage_bytes`` of parameters, gradients, optimizer state, buffers and batch.
            Called between the two calls of ``step``; used on the CPU only.

    Returns:
        Peak and baseline, in bytes.

    Raises:
        ValueError: If memory cannot be counted on this kind of device.
    """
    target = torch.device(device)
    if target.type == "cuda":
        return _cuda_peak(step, target)
    if target.type != "cpu":
        raise ValueError(f"device {target}: peak memory is counted on cpu and cuda only")
    # Within the profiler both times: it can tell the size of a release only of a block whose
    # allocation it saw, and the gradients that the second call releases come from the first.
    _profiled_changes(step)
    baseline = resident_bytes()
    allocated = highest = baseline
    for change in _profiled_changes(step):
        allocated += change
        highest = max(highest, allocated)
    return PeakMemory(allocated=highest, reserved=None, baseline=baseline)


def _cuda_peak(step: Callable[[], None], device: torch.device) -> PeakMemory:
    """Return the peak as CUDA's caching allocator counts it."""
    step()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # otherwise "reserved" is the peak of whatever ran before
    torch.cuda.reset_peak_memory_stats(device)  # sets the peak to what lives now, not to zero
    baseline = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return PeakMemory(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
        baseline=baseline,
    )


def _profiled_changes(step: Callable[[], None]) -> list[int]:
    """Return the bytes of every CPU allocation (+) and release (-) of a step, in order of time."""
    with (
        filtered_native_stderr(_PROFILER_NOISE),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step()
    # The public event list hides order and sign within an operation; the raw one has both.
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    on_cpu = [event for event in events if event.device_type() == torch.profiler.DeviceType.CPU]
    return [event.nbytes() for event in sorted(on_cpu, key=lambda event: event.start_ns())]


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield identity and bytes of each tensor's storage."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Not data_ptr(): it is 0 for every tensor on the meta device.
        yield storage._cdata, storage.nbytes()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
