"""Measure time, memory and running statistics of plain modules, tensors and callables."""

from normexp.measure.load import ForeignLoad
from normexp.measure.memory import (
    PeakMemory,
    memory_by_part,
    peak_allocated_bytes,
    saved_for_backward_bytes,
    storage_bytes,
)
from normexp.measure.running_statistics import (
    RunningStatisticError,
    check_finite_buffers,
    running_statistic_error,
    summarize,
)
from normexp.measure.timing import (
    Timing,
    device_synchronizer,
    ms_per_micro_batch,
    ms_per_sample,
    s_per_epoch,
    samples_per_s,
    time_interleaved,
)

__all__ = [
    "ForeignLoad",
    "PeakMemory",
    "RunningStatisticError",
    "Timing",
    "check_finite_buffers",
    "device_synchronizer",
    "memory_by_part",
    "ms_per_micro_batch",
    "ms_per_sample",
    "peak_allocated_bytes",
    "running_statistic_error",
    "s_per_epoch",
    "samples_per_s",
    "saved_for_backward_bytes",
    "storage_bytes",
    "summarize",
    "time_interleaved",
]
