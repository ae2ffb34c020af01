"""Measure time, memory and running statistics of plain modules, tensors and callables."""

from normexp.measure._tracked import find_tracked_layers
from normexp.measure.batch_statistics import batch_statistics
from normexp.measure.folding import Folding, fold_norms, max_difference
from normexp.measure.gradients import GradientNorm, gradient_norms, summarize_gradients
from normexp.measure.load import ForeignLoad
from normexp.measure.memory import (
    PeakMemory,
    memory_by_part,
    peak_allocated_bytes,
    saved_for_backward_bytes,
    storage_bytes,
)
from normexp.measure.reestimate import (
    ESTIMATORS,
    Estimator,
    reestimate_running_statistics,
    reestimated_statistics,
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
    "ESTIMATORS",
    "Estimator",
    "Folding",
    "ForeignLoad",
    "GradientNorm",
    "PeakMemory",
    "RunningStatisticError",
    "Timing",
    "batch_statistics",
    "check_finite_buffers",
    "device_synchronizer",
    "find_tracked_layers",
    "fold_norms",
    "gradient_norms",
    "max_difference",
    "memory_by_part",
    "ms_per_micro_batch",
    "ms_per_sample",
    "peak_allocated_bytes",
    "reestimate_running_statistics",
    "reestimated_statistics",
    "running_statistic_error",
    "s_per_epoch",
    "samples_per_s",
    "saved_for_backward_bytes",
    "storage_bytes",
    "summarize",
    "summarize_gradients",
    "time_interleaved",
]
