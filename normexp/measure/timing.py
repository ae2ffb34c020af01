"""Time several actions in turn, in windows, with the device waited for at both ends only.

Every action gets one window in each round, so that whatever drifts (clock rate, temperature,
a neighbour on the machine) drifts for all of them alike. A window holds many calls: waiting for
the device after each call would add a constant that a small kernel does not have.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

# A window never needs more; the limit ends the calibration on a clock that stands still.
_MAX_CALLS_PER_WINDOW = 1 << 30


@dataclass(frozen=True)
class Timing:
    """Time of one call of one action.

    Attributes:
        samples_ms: Mean time of a call in each round's window, in round order.
        median_ms: Median of the samples.
        q25_ms: First quartile of the samples, linearly interpolated.
        q75_ms: Third quartile of the samples, linearly interpolated.
        calls_per_window: Calls that each sample is the mean of.
        warmup: Calls made before the calibration; their time is in no sample.
        first_call_ms: Time of the very first call (allocation, compilation, first kernel
            choice); None when there was no warm-up.
    """

    samples_ms: tuple[float, ...]
    median_ms: float
    q25_ms: float
    q75_ms: float
    calls_per_window: int
    warmup: int
    first_call_ms: float | None = None


def time_interleaved(
    actions: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    min_window_s: float,
    warmup: int,
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Return the time of a call of each action, measured in turn.

    First every action is warmed up and calibrated: the number of calls in a window grows until
    one window lasts ``min_window_s``. Then, round by round, each action gets one window, in
    the given order in even rounds and in reverse in odd ones. Garbage is collected before the
    rounds and not within a window. An action that does nothing gives the floor of the method.

    Args:
        actions: What to time, by name.
        rounds: Windows for each action, at least 1.
        min_window_s: Least length of a window, in seconds.
        warmup: Calls of each action before the calibration.
        synchronize: Waits for the device; called at both ends of a window, nowhere else.
        clock: Current time in seconds.

    Returns:
        One timing for each action, in the order of ``actions``.

    Raises:
        ValueError: If ``rounds`` is below 1, or ``warmup`` or ``min_window_s`` is negative.
    """
    if rounds < 1 or warmup < 0 or min_window_s < 0:
        raise ValueError(
            f"rounds={rounds}, warmup={warmup}, min_window_s={min_window_s}: "
            "rounds must be at least 1, the others at least 0"
        )

    def run_window(action: Callable[[], None], calls: int) -> float:
        """Return the seconds that this many calls take."""
        synchronize()
        start = clock()
        for _ in range(calls):
            action()
        synchronize()
        return clock() - start

    first_call_ms: dict[str, float | None] = {}
    calls: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in actions}
    with _no_garbage_collection():
        for name, action in actions.items():
            first_call_ms[name] = 1e3 * run_window(action, 1) if warmup else None
            run_window(action, warmup - 1)
            calls[name] = _calibrate(action, min_window_s, run_window)
        for index in range(rounds):
            names = list(actions)
            for name in names if index % 2 == 0 else reversed(names):
                elapsed_s = run_window(actions[name], calls[name])
                samples[name].append(1e3 * elapsed_s / calls[name])
    return {
        name: _summarize(samples[name], calls[name], warmup, first_call_ms[name])
        for name in actions
    }


def device_synchronizer(device: torch.device | str) -> Callable[[], None]:
    """Return a function that waits until all work queued on the device is done.

    Args:
        device: The device; on the CPU nothing is queued and the function does nothing.
    """
    target = torch.device(device)
    if target.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(target)


def ms_per_micro_batch(ms_per_update: float, *, accumulation_steps: int) -> float:
    """Return the time of one forward and backward pass's share of an update.

    Args:
        ms_per_update: Time of a whole update, in milliseconds.
        accumulation_steps: Micro-batches in an update.

    Examples:
        >>> ms_per_micro_batch(80.0, accumulation_steps=4)
        20.0
    """
    return ms_per_update / accumulation_steps


def ms_per_sample(ms_per_update: float, *, effective_batch_size: int) -> float:
    """Return the training time of one sample.

    Args:
        ms_per_update: Time of a whole update, in milliseconds.
        effective_batch_size: Samples in an update.

    Examples:
        >>> ms_per_sample(80.0, effective_batch_size=32)
        2.5
    """
    return ms_per_update / effective_batch_size


def samples_per_s(ms_per_update: float, *, effective_batch_size: int) -> float:
    """Return the training throughput.

    Args:
        ms_per_update: Time of a whole update, in milliseconds.
        effective_batch_size: Samples in an update.

    Examples:
        >>> samples_per_s(80.0, effective_batch_size=32)
        400.0
    """
    return 1e3 * effective_batch_size / ms_per_update


def s_per_epoch(ms_per_update: float, *, effective_batch_size: int, num_train: int) -> float:
    """Return the training time of one epoch: its whole updates, without evaluations.

    Args:
        ms_per_update: Time of a whole update, in milliseconds.
        effective_batch_size: Samples in an update.
        num_train: Samples in the training split; a rest smaller than an update is dropped.

    Examples:
        >>> s_per_epoch(80.0, effective_batch_size=32, num_train=330)
        0.8
    """
    return (num_train // effective_batch_size) * ms_per_update / 1e3


def _calibrate(
    action: Callable[[], None],
    min_window_s: float,
    run_window: Callable[[Callable[[], None], int], float],
) -> int:
    """Return the number of calls whose window was seen to last ``min_window_s``."""
    calls = 1
    while calls < _MAX_CALLS_PER_WINDOW:
        elapsed_s = run_window(action, calls)
        if elapsed_s >= min_window_s:
            break
        # Aim a little above the goal, but never trust one short window for more than tenfold.
        wanted = 1.1 * calls * min_window_s / elapsed_s if elapsed_s > 0 else math.inf
        calls = math.ceil(min(10 * calls, max(2 * calls, wanted)))
    return calls


def _summarize(
    samples_ms: list[float], calls: int, warmup: int, first_call_ms: float | None
) -> Timing:
    """Return the samples with their quartiles."""
    q25, median, q75 = (float(q) for q in np.quantile(samples_ms, [0.25, 0.5, 0.75]))
    return Timing(
        samples_ms=tuple(samples_ms),
        median_ms=median,
        q25_ms=q25,
        q75_ms=q75,
        calls_per_window=calls,
        warmup=warmup,
        first_call_ms=first_call_ms,
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not again before the end."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
