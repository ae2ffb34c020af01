"""Byte counts against sums made by hand."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from normexp.measure import (
    memory_by_part,
    peak_allocated_bytes,
    saved_for_backward_bytes,
    storage_bytes,
)

KIB = 1024


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_saved_of_a_linear_chain() -> None:
    """x @ w1 -> relu -> @ w2: only relu's result is kept, shared by relu and the product."""
    x = torch.randn(8, 4)
    w1 = torch.randn(4, 16, requires_grad=True)
    w2 = torch.randn(16, 2, requires_grad=True)

    def forward() -> Tensor:
        return ((x @ w1).relu() @ w2).sum()

    relu_bytes = 8 * 16 * 4
    assert saved_for_backward_bytes(forward, exclude=[x, w1, w2]) == relu_bytes
    assert saved_for_backward_bytes(forward, exclude=[w1, w2]) == relu_bytes + 8 * 4 * 4
    everything = relu_bytes + (8 * 4 + 4 * 16 + 16 * 2) * 4
    # w1 is not needed for a gradient of x, which requires none: autograd does not keep it.
    assert saved_for_backward_bytes(forward, exclude=[]) == everything - 4 * 16 * 4


def test_saved_counts_a_shared_storage_once_and_whole() -> None:
    big = torch.randn(100, requires_grad=True)
    other = torch.randn(3, requires_grad=True)

    def forward() -> Tensor:
        result = big * 2.0  # keeps nothing: the factor is a number
        return (result[:3] * other).sum() + (result[50:53] * other).sum()

    # Two views of one storage of 100 floats; both products keep their view and `other`.
    assert saved_for_backward_bytes(forward, exclude=[big, other]) == 400


def test_saved_excludes_views_of_what_is_excluded() -> None:
    dataset = torch.randn(64, 4)
    w = torch.randn(4, 2, requires_grad=True)
    assert saved_for_backward_bytes(lambda: (dataset[8:16] @ w).sum(), exclude=[dataset, w]) == 0


def test_saved_leaves_out_a_graph_that_forward_dropped() -> None:
    w = torch.randn(16, requires_grad=True)

    def forward() -> Tensor:
        dropped = (w * 2.0).exp()  # keeps its result, until it goes out of use
        del dropped
        return (w * 3.0).exp().sum()

    assert saved_for_backward_bytes(forward, exclude=[w]) == 16 * 4


def test_saved_works_without_data_and_under_no_grad() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        x = torch.empty(5, 4)
    with torch.no_grad():
        counted = saved_for_backward_bytes(lambda: model(x).sum(), exclude=[x, *model.parameters()])
    assert counted == 5 * 8 * 4  # tanh's result, kept by tanh and by the second layer


def test_saved_of_batch_norm() -> None:
    """Kept: the input, and the batch's mean and inverse deviation; the buffers are excluded."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.BatchNorm2d(4))
    x = torch.randn(2, 1, 8, 8)
    counted = saved_for_backward_bytes(
        lambda: model(x).sum(), exclude=[x, *model.parameters(), *model.buffers()]
    )
    assert counted == (2 * 4 * 8 * 8 + 4 + 4) * 4


def test_saved_still_allows_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    kept: list[Tensor] = []

    def forward() -> Tensor:
        kept.append(x.exp().sum())
        return kept[-1]

    saved_for_backward_bytes(forward, exclude=[x])
    kept[0].backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


@pytest.mark.parametrize(
    ("make", "tensors_per_parameter", "extra_bytes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0),
        # AdamW: two moments, and a step counter of one float for each of the 4 parameters.
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2, 4 * 4),
    ],
)
def test_memory_by_part(make: object, tensors_per_parameter: int, extra_bytes: int) -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
    optimizer = make(model.parameters())  # type: ignore[operator]
    parameter_bytes = (10 * 20 + 20 + 20 + 20) * 4
    # Running mean and variance in float32, the counter in int64.
    expected = {
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": 0,
        "buffer_bytes": 2 * 20 * 4 + 8,
        "optimizer_bytes": 0,
    }
    assert memory_by_part(model, optimizer) == expected
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    expected["gradient_bytes"] = parameter_bytes
    expected["optimizer_bytes"] = tensors_per_parameter * parameter_bytes + extra_bytes
    assert memory_by_part(model, optimizer) == expected
    assert memory_by_part(model, None)["optimizer_bytes"] == 0


def test_a_tied_parameter_counts_once() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert memory_by_part(nn.Sequential(first, second), None)["parameter_bytes"] == 8 * 8 * 4
    assert storage_bytes([torch.zeros(10)[2:4], torch.zeros(0)]) == 40


def test_cpu_peak_of_a_chain() -> None:
    """Of the blocks of 64 KiB that live at once, three is the most: a, b and c."""
    x = torch.ones(64, 256)

    def step() -> None:
        a = x + 1  # 1 live
        b = a * 2  # 2
        c = b @ torch.eye(256)  # the 256 KiB matrix: 2 + 4 + 1 = 7
        del a, b  # 1 (the matrix is gone)
        d = c - 1  # 2
        del c, d

    peak = peak_allocated_bytes(step, "cpu", resident_bytes=lambda: storage_bytes([x]))
    assert peak.baseline == 64 * KIB
    assert peak.allocated == 64 * KIB + 7 * 64 * KIB
    assert peak.reserved is None


def test_cpu_peak_of_a_backward_pass() -> None:
    """Blocks of 256 KiB, counted by hand at each moment of the step."""
    x, w = torch.randn(256, 256), torch.randn(256, 256, requires_grad=True)
    w.grad = torch.zeros_like(w)  # seen by no profiler: its release must not upset the count

    def step() -> None:
        w.grad = None
        (x @ w).sin().sum().backward()

    def resident() -> int:
        assert w.grad is not None
        return storage_bytes([x, w, w.grad])

    block = 256 * KIB
    peak = peak_allocated_bytes(step, "cpu", resident_bytes=resident)
    assert peak.baseline == 3 * block
    # Forward: x, w, x @ w and its sine, 4. Backward of the sine: x, w, x @ w, its cosine and the
    # product with the gradient, 5. Then x, w, that product and the gradient of w, 4.
    # The loss and its gradient are 4 bytes each.
    assert peak.allocated == 5 * block + 8


def test_cpu_peak_is_the_resident_bytes_when_the_step_only_works_in_place() -> None:
    x = torch.ones(1000)

    def step() -> None:
        x.mul_(x)

    peak = peak_allocated_bytes(step, "cpu", resident_bytes=lambda: 4000)
    assert (peak.allocated, peak.baseline) == (4000, 4000)


def test_peak_on_an_uncounted_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device meta: peak memory is counted on cpu and cuda"):
        peak_allocated_bytes(lambda: None, "meta")


def test_the_console_stays_quiet_and_own_lines_pass() -> None:
    code = (
        "import os, torch\n"
        "from normexp.measure import peak_allocated_bytes\n"
        "w = torch.ones(8, requires_grad=True)\n"
        "w.grad = torch.ones(8)\n"
        "def step():\n"
        "    os.write(2, b'from the step\\n')\n"
        "    w.grad = None\n"
        "    w.square().sum().backward()\n"
        "print(peak_allocated_bytes(step, 'cpu').baseline)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
    assert done.stderr == "from the step\n" * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_peak_contains_what_lives() -> None:
    model = nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, 1024, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    peak = peak_allocated_bytes(step, "cuda")
    parts = memory_by_part(model, optimizer)
    assert peak.baseline >= parts["parameter_bytes"] + parts["optimizer_bytes"]
    assert peak.allocated > peak.baseline
    assert peak.reserved is not None
    assert peak.reserved >= peak.allocated
