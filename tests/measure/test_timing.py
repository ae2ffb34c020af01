"""The timer against clocks and devices whose every number is known."""

import gc
import time
from collections.abc import Callable

import pytest
import torch

from normexp.measure import (
    device_synchronizer,
    ms_per_micro_batch,
    ms_per_sample,
    s_per_epoch,
    samples_per_s,
    time_interleaved,
)


class FakeDevice:
    """A clock, and a queue of work that takes time only when someone waits for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queued_s = 0.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def synchronize(self) -> None:
        self.log.append("sync")
        self.now_s += self.queued_s
        self.queued_s = 0.0

    def kernel(self, name: str, seconds: float) -> Callable[[], None]:
        def launch() -> None:
            self.log.append(name)
            self.queued_s += seconds

        return launch


def test_queued_work_is_waited_for() -> None:
    device = FakeDevice()
    timings = time_interleaved(
        {"a": device.kernel("a", 0.002), "b": device.kernel("b", 0.005)},
        rounds=3,
        min_window_s=0.02,
        warmup=2,
        synchronize=device.synchronize,
        clock=device.clock,
    )
    assert list(timings) == ["a", "b"]
    for name, expected_ms in (("a", 2.0), ("b", 5.0)):
        timing = timings[name]
        assert timing.samples_ms == pytest.approx((expected_ms,) * 3)
        assert timing.median_ms == pytest.approx(expected_ms)
        assert timing.first_call_ms == pytest.approx(expected_ms)
        assert timing.calls_per_window * expected_ms >= 20.0
        assert timing.warmup == 2


def test_windows_alternate_and_wait_at_both_ends_only() -> None:
    device = FakeDevice()
    time_interleaved(
        {"a": device.kernel("a", 1.0), "b": device.kernel("b", 1.0)},
        rounds=2,
        min_window_s=1.0,
        warmup=0,
        synchronize=device.synchronize,
        clock=device.clock,
    )
    # One call lasts a window, so the rounds are the last four windows: a b, then b a.
    windows = "".join(device.log[-12:]).replace("sync", "|")
    assert windows == "|a||b||b||a|"


@pytest.mark.parametrize("calls_in_window", [1, 7, 1000])
def test_a_window_has_two_waits_whatever_its_length(calls_in_window: int) -> None:
    device = FakeDevice()
    timings = time_interleaved(
        {"a": device.kernel("a", 1.0 / calls_in_window)},
        rounds=1,
        min_window_s=1.0,
        warmup=0,
        synchronize=device.synchronize,
        clock=device.clock,
    )
    num_calls = timings["a"].calls_per_window
    assert num_calls >= calls_in_window
    assert device.log[-num_calls - 2 :] == ["sync", *["a"] * num_calls, "sync"]


def test_slow_first_calls_are_in_no_sample() -> None:
    device = FakeDevice()
    num_calls = 0

    def action() -> None:
        nonlocal num_calls
        device.queued_s += 1.0 if num_calls < 3 else 0.01
        num_calls += 1

    timing = time_interleaved(
        {"a": action},
        rounds=5,
        min_window_s=0.05,
        warmup=3,
        synchronize=device.synchronize,
        clock=device.clock,
    )["a"]
    assert timing.samples_ms == pytest.approx((10.0,) * 5)
    assert timing.warmup == 3
    assert timing.first_call_ms == pytest.approx(1000.0)
    # Calibrated on the fast calls: 5 of them make a window.
    assert 5 <= timing.calls_per_window <= 6


def test_quartiles_are_those_of_the_samples() -> None:
    device = FakeDevice()
    costs = iter([10.0, 1.0, 2.0, 3.0, 4.0, 5.0])  # the first is the calibration

    def action() -> None:
        device.queued_s += next(costs)

    timing = time_interleaved(
        {"a": action},
        rounds=5,
        min_window_s=1.0,
        warmup=0,
        synchronize=device.synchronize,
        clock=device.clock,
    )["a"]
    assert timing.samples_ms == (1000.0, 2000.0, 3000.0, 4000.0, 5000.0)
    assert (timing.q25_ms, timing.median_ms, timing.q75_ms) == (2000.0, 3000.0, 4000.0)
    assert timing.first_call_ms is None


def test_drift_hits_all_actions_alike() -> None:
    """The machine gets slower with every window; two equal actions stay equal in the mean."""
    device = FakeDevice()

    def slower() -> None:
        device.queued_s += 1.0 + 0.1 * len(device.log)

    timings = time_interleaved(
        {"a": slower, "b": slower},
        rounds=4,
        min_window_s=1.0,
        warmup=0,
        synchronize=device.synchronize,
        clock=device.clock,
    )
    # Linear drift and alternating order: the sums agree, which a fixed order would not give.
    assert sum(timings["a"].samples_ms) == pytest.approx(sum(timings["b"].samples_ms))


def test_garbage_is_not_collected_in_a_window_and_is_after() -> None:
    states: list[bool] = []
    device = FakeDevice()

    def action() -> None:
        states.append(gc.isenabled())
        device.queued_s += 1.0

    def run() -> None:
        time_interleaved(
            {"a": action},
            rounds=2,
            min_window_s=1.0,
            warmup=1,
            synchronize=device.synchronize,
            clock=device.clock,
        )

    run()
    assert states == [False] * 4  # warm-up, calibration, two rounds
    assert gc.isenabled()

    def fail() -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        time_interleaved(
            {"a": fail}, rounds=1, min_window_s=0.0, warmup=0, synchronize=device.synchronize
        )
    assert gc.isenabled()


def test_real_clock_and_processor() -> None:
    timings = time_interleaved(
        {"sleep": lambda: time.sleep(0.002), "nothing": lambda: None},
        rounds=3,
        min_window_s=0.005,
        warmup=1,
        synchronize=device_synchronizer("cpu"),
    )
    assert timings["sleep"].q25_ms >= 2.0  # sleep never returns early
    assert 0.0 < timings["nothing"].median_ms < 0.05


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"warmup": -1}, {"min_window_s": -1.0}])
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    settings = {"rounds": 1, "warmup": 0, "min_window_s": 0.0} | bad
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        time_interleaved({}, synchronize=lambda: None, **settings)  # type: ignore[arg-type]


def test_units_agree() -> None:
    """Batch 8 with 4 accumulation steps: 32 samples an update, in 4 micro-batches."""
    ms_per_update = 80.0
    per_s = samples_per_s(ms_per_update, effective_batch_size=32)
    per_sample = ms_per_sample(ms_per_update, effective_batch_size=32)
    per_micro_batch = ms_per_micro_batch(ms_per_update, accumulation_steps=4)
    assert per_s * ms_per_update / 1e3 == pytest.approx(32)  # samples/s x s/update
    assert per_sample * 8 == pytest.approx(per_micro_batch)
    assert per_micro_batch * 4 == pytest.approx(ms_per_update)
    # 3205 samples: 100 whole updates, the rest of 5 is dropped.
    per_epoch = s_per_epoch(ms_per_update, effective_batch_size=32, num_train=3205)
    assert per_epoch == pytest.approx(100 * ms_per_update / 1e3)
    assert per_epoch * per_s == pytest.approx(3200)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_windows_contain_the_kernels() -> None:
    x = torch.randn(4096, 4096, device="cuda")

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(x, x)

    timings = time_interleaved(
        {"one": lambda: multiply(1), "four": lambda: multiply(4)},
        rounds=5,
        min_window_s=0.05,
        warmup=3,
        synchronize=device_synchronizer("cuda"),
    )
    assert timings["four"].median_ms / timings["one"].median_ms == pytest.approx(4.0, rel=0.2)
