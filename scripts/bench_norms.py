"""Time forward and backward of norm layers against torch's, torchvision's or timm's counterpart.

Both work on the same tensors, in turn, in one process with one thread; the table shows medians
over rounds and the median of the rounds' ratios. A row slower than 1.1 times its counterpart is
measured once more with three times the rounds, and then states a reason; without one the script
ends with exit code 1. timm and torchvision are compared
where they are installed (``pip install normexp[dev]``).

    python scripts/bench_norms.py [--rounds 15] [--only rms_norm,group_norm] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import timm.layers
import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normexp.measure import ForeignLoad, device_synchronizer, time_interleaved
from normexp.norms import NORMS, NormFactory

# Features [N, C], sequences [N, L, C], images [N, C, H, W].
SHAPES = {0: (512, 256), 1: (32, 128, 256), 2: (32, 64, 16, 16)}
SMALL_SHAPES = {0: (32, 128), 1: (4, 32, 64), 2: (2, 16, 8, 8)}
LIMIT = 1.1

# Why a layer may be slower than its counterpart; printed beside its ratio. "/small" is the small
# shape, where a call takes some ten microseconds whatever it computes.
CHECKS = "some 5 to 10 us a call in Python: checks of shape, type and"
FORMULA = "the published formula has no kernel; timm's is another one (eps inside the root), which "
REASONS: dict[str, str] = {
    "sync_batch_norm/small": f"{CHECKS} process group",
    "frozen_batch_norm/small": f"{CHECKS} constants",
    "rms_norm/small": f"{CHECKS} size",
    "evo_norm_s0/small": f"{CHECKS} groups",
    "weight_standardization": f"{FORMULA}is batch_norm's kernel",
    "scaled_weight_standardization": f"{FORMULA}is batch_norm's kernel",
}


class Transposed(nn.Module):
    """A layer for ``[N, C, L]``, given ``[N, L, C]``: how a user applies torch's to sequences."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, channels last again."""
        y: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return y


class Chunks(nn.Module):
    """Batch norm applied to one chunk of the batch after the other."""

    def __init__(self, layer: nn.Module, size: int) -> None:
        super().__init__()
        self.layer = layer
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return the chunks' outputs, joined."""
        return torch.cat([self.layer(chunk) for chunk in x.split(self.size)])


@dataclass(frozen=True)
class Pair:
    """One comparison: our norm with options, and what it is measured against."""

    norm: str
    dims: int
    counterpart: str
    build_theirs: Callable[[int], nn.Module]
    params: dict[str, Any]


def pair(
    norm: str, dims: int, counterpart: str, build: Callable[[int], nn.Module], **params: Any
) -> Pair:
    """Return a comparison."""
    return Pair(norm, dims, counterpart, build, params)


def list_pairs() -> list[Pair]:
    """Return all comparisons; a counterpart is built with our eps and groups."""
    layers = timm.layers
    return [
        pair("batch_norm", 0, "torch BatchNorm1d", nn.BatchNorm1d),
        pair("batch_norm", 1, "torch BatchNorm1d", lambda c: Transposed(nn.BatchNorm1d(c))),
        pair("batch_norm", 2, "torch BatchNorm2d", nn.BatchNorm2d),
        pair("sync_batch_norm", 2, "torch SyncBatchNorm, one process", nn.SyncBatchNorm),
        pair(
            "frozen_batch_norm",
            2,
            "torchvision FrozenBatchNorm2d",
            torchvision.ops.FrozenBatchNorm2d,
            train_affine=False,
        ),
        pair(
            "ghost_batch_norm",
            2,
            "torch BatchNorm2d on chunks of 8",
            lambda c: Chunks(nn.BatchNorm2d(c), 8),
            ghost_size=8,
        ),
        pair("layer_norm", 0, "torch LayerNorm", nn.LayerNorm),
        pair("layer_norm", 1, "torch LayerNorm", nn.LayerNorm),
        pair("layer_norm_chw", 2, "torch GroupNorm(1)", lambda c: nn.GroupNorm(1, c)),
        pair("layer_norm_channel", 2, "timm LayerNorm2d", lambda c: layers.LayerNorm2d(c)),
        pair("group_norm", 1, "torch GroupNorm", lambda c: Transposed(nn.GroupNorm(8, c))),
        pair("group_norm", 2, "torch GroupNorm", lambda c: nn.GroupNorm(8, c)),
        pair(
            "instance_norm",
            1,
            "torch InstanceNorm1d",
            lambda c: Transposed(nn.InstanceNorm1d(c, affine=True)),
        ),
        pair(
            "instance_norm", 2, "torch InstanceNorm2d", lambda c: nn.InstanceNorm2d(c, affine=True)
        ),
        pair("rms_norm", 0, "torch RMSNorm", lambda c: nn.RMSNorm(c, eps=1e-6)),
        pair("rms_norm", 1, "torch RMSNorm", lambda c: nn.RMSNorm(c, eps=1e-6)),
        pair("rms_norm", 2, "timm RmsNorm2d", lambda c: layers.RmsNorm2d(c)),
        pair(
            "filter_response_norm",
            2,
            "timm FilterResponseNormTlu2d",
            lambda c: layers.FilterResponseNormTlu2d(c, eps=1e-6),
        ),
        pair("evo_norm_s0", 2, "timm EvoNorm2dS0", lambda c: layers.EvoNorm2dS0(c, groups=8)),
        pair("evo_norm_b0", 2, "timm EvoNorm2dB0", lambda c: layers.EvoNorm2dB0(c)),
        pair(
            "weight_norm",
            2,
            "torch weight_norm",
            lambda c: parametrizations.weight_norm(nn.Conv2d(c, c, 3, padding=1)),
        ),
        pair(
            "weight_standardization",
            2,
            "timm StdConv2d + torch GroupNorm",
            lambda c: nn.Sequential(
                layers.StdConv2d(c, c, 3, padding=1, bias=True), nn.GroupNorm(8, c)
            ),
        ),
        pair(
            "scaled_weight_standardization",
            2,
            "timm ScaledStdConv2d",
            lambda c: layers.ScaledStdConv2d(c, c, 3, padding=1, bias=True, gamma=1.71396),
        ),
    ]


def build_ours(pair: Pair, num_channels: int) -> nn.Module:
    """Return our layer; a norm of weights comes with the convolution that it acts on."""
    factory = NormFactory(pair.norm, pair.params)
    layer = factory(num_channels, role="block", dims=pair.dims, is_activated=True)
    if NORMS.get(pair.norm).card.weight is None:
        return layer
    conv = nn.Conv2d(num_channels, num_channels, 3, padding=1)
    return nn.Sequential(factory.parametrize(conv, role="block"), layer)


def as_action(layer: nn.Module, x: Tensor, g: Tensor) -> Callable[[], None]:
    """Return a forward and backward pass on given tensors."""
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def run() -> None:
        torch.autograd.grad(layer(x), [x, *parameters], g)

    return run


def measure(pairs: Sequence[Pair], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each pair and size."""
    for pair in pairs:
        for size, shapes in (("large", SHAPES), ("small", SMALL_SHAPES)):
            if size == "small" and pair.norm == "ghost_batch_norm":
                continue  # two samples have no chunks of 8
            row = measure_pair(pair, size, shapes[pair.dims], rounds)
            if row["ratio"] > LIMIT:  # once more, and longer: a few windows may have been disturbed
                row = measure_pair(pair, size, shapes[pair.dims], 3 * rounds)
            yield row


def measure_pair(pair: Pair, size: str, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Return the times of one pair at one shape."""
    torch.manual_seed(0)
    num_channels = shape[2] if pair.dims == 1 else shape[1]
    x, g = torch.randn(shape, requires_grad=True), torch.randn(shape)
    ours, theirs = build_ours(pair, num_channels), pair.build_theirs(num_channels)
    timings = time_interleaved(
        {"ours": as_action(ours, x, g), "theirs": as_action(theirs, x, g)},
        rounds=rounds,
        min_window_s=0.02,
        warmup=3,
        synchronize=device_synchronizer("cpu"),
    )
    ratios = [
        a / b for a, b in zip(timings["ours"].samples_ms, timings["theirs"].samples_ms, strict=True)
    ]
    ratio = statistics.median(ratios)
    reason = REASONS.get(f"{pair.norm}/{size}") or REASONS.get(pair.norm, "none stated")
    return {
        "norm": pair.norm,
        "shape": list(shape),
        "counterpart": pair.counterpart,
        "ours_ms": timings["ours"].median_ms,
        "theirs_ms": timings["theirs"].median_ms,
        "ratio": ratio,
        "kernel": NORMS.get(pair.norm).card.kernel_cpu,
        "reason": reason if ratio > LIMIT else "",
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    table = Table(title=f"forward + backward on the CPU, one thread, torch {torch.__version__}")
    for column in ("norm", "shape", "counterpart", "ours ms", "theirs ms", "ratio", "kernel"):
        table.add_column(column, justify="right" if column[-2:] in ("ms", "io") else "left")
    table.add_column("why slower than 1.1")
    for row in rows:
        shape = " x ".join(str(extent) for extent in row["shape"])
        times = (f"{row['ours_ms']:.3f}", f"{row['theirs_ms']:.3f}", f"{row['ratio']:.2f}")
        table.add_row(row["norm"], shape, row["counterpart"], *times, row["kernel"], row["reason"])
    Console(width=150).print(table)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="norms, separated by commas")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    only = set(filter(None, arguments.only.split(",")))
    load = ForeignLoad()
    rows = list(measure([p for p in list_pairs() if not only or p.norm in only], arguments.rounds))
    share = load.share()
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
        print(f"share of the cores that other processes used meanwhile: {share}")
    return int(any(row["reason"] == "none stated" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
