"""sync_batch_norm: two processes against batch_norm of their samples joined, and one alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import batch as oracle
from torch import distributed, nn

from normexp.norms.batch_norm import build_batch_norm
from normexp.norms.sync_batch_norm import CARD, build_sync_batch_norm

C = 4
WEIGHT = torch.linspace(0.5, 2.0, C, dtype=torch.float64)
BIAS = torch.linspace(-1.0, 1.0, C, dtype=torch.float64)
TAIL = {0: (C,), 1: (5, C), 2: (C, 3, 2)}
# Name: dims, samples of the two processes, whether with masks, options.
CASES = {
    "features": (0, (3, 3), False, {}),
    "sequences": (1, (2, 2), False, {}),
    "images": (2, (2, 2), False, {}),
    "unequal": (2, (1, 4), False, {}),
    "one sample each": (0, (1, 1), False, {}),
    "none on one": (0, (0, 3), False, {}),
    "masks": (1, (2, 3), True, {}),
    "cumulative": (2, (1, 3), False, {"momentum": None}),
    "no affine": (1, (1, 2), True, {"affine": False, "eps": 1e-3}),
}


def draw(shape, *seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(3.0, 2.0, shape))


def make_case(name):
    dims, sizes, is_masked, params = CASES[name]
    batches = []
    for step in range(2):
        shapes = [(size, *TAIL[dims]) for size in sizes]
        masks = [draw(shape[:2], step, rank, 2) > 2.0 for rank, shape in enumerate(shapes)]
        batches.append(
            {
                "x": [draw(shape, step, rank, 0) for rank, shape in enumerate(shapes)],
                "grad": [draw(shape, step, rank, 1) for rank, shape in enumerate(shapes)],
                "mask": masks if is_masked else None,
            }
        )
    return {
        "num_features": C,
        "dims": dims,
        "params": params,
        "dtype": torch.float64,
        "weight": WEIGHT,
        "bias": BIAS,
        "batches": batches,
    }


def launch(folder, cases, world_size):
    """Run the cases in so many processes and return the results of each."""
    torch.save(cases, folder / "cases.pt")
    script = Path(__file__).with_name("sync_batch_norm_process.py")
    commands = [
        [sys.executable, script, folder, str(r), str(world_size)] for r in range(world_size)
    ]
    processes = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, errors
    return [torch.load(folder / f"results{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes found, by case."""
    cases = [make_case(name) for name in CASES]
    first, second = launch(tmp_path_factory.mktemp("two"), cases, 2)
    return dict(zip(CASES, zip(first, second, strict=True), strict=True))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_batch_norm_of_all_samples(name, results):
    case, pair = make_case(name), results[name]
    layer = build_batch_norm(C, dims=case["dims"], **case["params"]).double()
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(WEIGHT)
            layer.bias.copy_(BIAS)
    for step, batch in enumerate(case["batches"]):
        x = torch.cat(batch["x"]).requires_grad_()
        mask = () if batch["mask"] is None else (torch.cat(batch["mask"]),)
        y = layer(x, *mask)
        (y * torch.cat(batch["grad"])).sum().backward()
        close(torch.cat([result["outputs"][step] for result in pair]), y.detach())
        close(torch.cat([result["gradients"][step] for result in pair]), x.grad)
    for index, parameter in enumerate(layer.parameters()):
        close(sum(result["parameter_gradients"][index] for result in pair), parameter.grad)
    for result in pair:
        for key, buffer in layer.named_buffers():
            close(result["buffers"][key], buffer)
    x = torch.cat(case["batches"][0]["x"])
    close(torch.cat([result["evaluated"] for result in pair]), layer.eval()(x).detach())
    assert "over 2 processes" in pair[0]["printed"]


@pytest.mark.parametrize("name", ["unequal", "masks"])
def test_two_processes_match_the_formula(name, results):
    batch = make_case(name)["batches"][0]
    parts = [x.numpy() for x in batch["x"]]
    masks = None if batch["mask"] is None else [mask.numpy() for mask in batch["mask"]]
    expected = oracle.sync_batch_norm(parts, WEIGHT.numpy(), BIAS.numpy(), 1e-5, masks)
    for result, part in zip(results[name], expected, strict=True):
        np.testing.assert_allclose(result["outputs"][0], part, rtol=0, atol=1e-10)


@pytest.fixture
def group_of_one(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def check_equals_batch_norm(dims):
    layer, plain = build_sync_batch_norm(C, dims=dims), build_batch_norm(C, dims=dims)
    for seed in range(2):
        x = draw((6, *TAIL[dims]), seed).float()
        assert torch.equal(layer(x), plain(x))
    state = plain.state_dict()
    assert all(torch.equal(state[key], value) for key, value in layer.state_dict().items())
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    assert layer.world_size == 1
    assert "a single process" in str(layer)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_without_a_process_group_it_is_batch_norm(dims):
    check_equals_batch_norm(dims)


def test_in_a_group_of_one_it_is_batch_norm(group_of_one):
    # torch's own class raises on the CPU as soon as there is a group.
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        nn.SyncBatchNorm(C)(draw((6, C)).float())
    for dims in (0, 1, 2):
        check_equals_batch_norm(dims)


def test_it_is_torchs_layer():
    # So that what looks for torch's class, such as a converter or a strategy, finds it.
    assert isinstance(build_sync_batch_norm(C, dims=2), nn.SyncBatchNorm)


def test_state_is_declared():
    found = tuple(name for name, _ in build_sync_batch_norm(C, dims=2).named_buffers())
    assert found == CARD.state
