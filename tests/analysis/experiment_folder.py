"""Writes result folders as a sweep would leave them, with numbers chosen by the test."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ENVIRONMENT = {
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "is_dirty": False,
    "normexp": "0.1.0",
    "python": "3.11.9",
    "torch": "2.14.0",
    "torchvision": "0.29.0",
    "lightning": "2.6.6",
    "numpy": "2.4.0",
    "platform": "Linux-6.1-x86_64",
    "cpu": "Example CPU",
    "num_cores": 2,
    "device": "cpu",
    "num_threads": 1,
    "precision": "32-true",
    "data_fingerprint": "f" * 64,
    "numerics_version": 1,
    "started_at": "2026-01-02T03:04:05+00:00",
}
TIMINGS = ("forward_ms", "forward_backward_ms", "update_ms", "prediction_ms")
HISTORY = pa.schema(
    [
        ("samples", pa.int64()),
        ("update", pa.int64()),
        ("epoch", pa.float64()),
        ("evaluation", pa.int64()),
        ("split", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("wall_s", pa.float64()),
    ]
)


class ExperimentFolder:
    """Writes the files that a sweep would leave, one call a file or run."""

    def __init__(self, root: Path, factors: Sequence[str], **plan: Any) -> None:
        self.path = root
        self.plan: dict[str, Any] = {
            "schema_version": 1,
            "name": root.name,
            "experiment": root.name,
            "title": "A title",
            "question": "Which norm is better?",
            "figures": [],
            "factors": list(factors),
            "command": f"normexp run experiment={root.name}",
            "cells": [],
            **plan,
        }
        self.write_plan()

    def write_plan(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "experiment.json").write_text(json.dumps(self.plan))

    def add_cell(
        self, cell: str, factors: Mapping[str, Any], seeds: Sequence[int] = (0, 1, 2)
    ) -> str:
        self.plan["cells"].append({"cell": cell, "factors": dict(factors), "seeds": list(seeds)})
        self.write_plan()
        return cell

    def run_dir(self, cell: str, seed: int) -> Path:
        folder = self.path / "runs" / cell / f"seed={seed}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def config(self, cell: str) -> dict[str, Any]:
        factors = next((item["factors"] for item in self.plan["cells"] if item["cell"] == cell), {})
        return {
            "name": self.path.name,
            "data": {"name": "digits", "params": {"root": "/data"}},
            "model": {"name": "cifar_resnet", "params": {}},
            "norm": {"name": factors.get("norm", "batch_norm"), "params": {}, "roles": {}},
            "micro_batch_size": factors.get("micro_batch_size", 8),
            "accumulation_steps": 1,
            "cell_factors": {key: str(value) for key, value in factors.items()},
            "trainer": {"num_threads": 1, "checkpoint_interval_s": 60},
        }

    def add_run(
        self,
        cell: str,
        seed: int,
        accuracy: float | str | None,
        *,
        status: str = "completed",
        reason: str | None = None,
        statistic_set: int | None = 32,
        curve: Sequence[tuple[int, float | None, float | None]] = (),
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        updates: int = 100,
        summary: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a run; ``curve`` holds (samples, val/loss, val/accuracy) of each evaluation."""
        folder = self.run_dir(cell, seed)
        used = {**self.config(cell), **(config or {})}
        (folder / "config.yaml").write_text(yaml.safe_dump(used))
        (folder / "environment.json").write_text(json.dumps({**ENVIRONMENT, **(environment or {})}))
        batch = used["micro_batch_size"] * used["accumulation_steps"]
        values = {"test/accuracy": accuracy, "test/loss": 0.5, **(metrics or {})}
        content = {
            "schema_version": 1,
            "run_id": f"{zlib.crc32(cell.encode()):08x}{seed:08x}",
            "cell": cell,
            "seed": seed,
            "status": status,
            "reason": reason,
            "metrics": {key: value for key, value in values.items() if value is not None},
            "totals": {
                "samples": updates * batch,
                "updates": updates,
                "micro_steps": updates,
                "epochs": 2.0,
                "dropped_samples": 0,
                "effective_batch_size": batch,
                "wall_s": 1.5,
            },
            "model": {
                "num_parameters": 1234,
                "min_statistic_set": statistic_set,
                "norm_layers": [],
            },
            "parameter_groups": [],
            "commit": ENVIRONMENT["commit"],
            **(summary or {}),
        }
        (folder / "summary.json").write_text(json.dumps(content))
        write_history(folder, curve, batch)
        return folder

    def add_cost(self, cell: str, update_ms: float = 4.0, **conditions: Any) -> None:
        spread = {"median": update_ms, "q25": update_ms - 1, "q75": update_ms + 1}
        timing = {**spread, "samples": [update_ms]}
        config = self.config(cell)
        content = {
            "schema_version": 1,
            "cost_key": "k",
            "conditions": {
                "device": "cpu",
                "cpu": "Example CPU",
                "num_threads": 1,
                "precision": "32-true",
                "memory_format": "contiguous",
                "mode": "eager",
                "torch": "2.14.0",
                "warmup_updates": 10,
                "rounds": 5,
                "window": 20,
                "is_alone": True,
                "measured_at": f"2026-01-02T03:04:0{len(cell) % 10}+00:00",
                **conditions,
            },
            "timing": dict.fromkeys(
                ("forward_ms", "forward_backward_ms", "update_ms", "prediction_ms"), timing
            ),
            "norm_kernel": "fused",
            "prediction_batch_size": 256,
            "micro_batch_size": config["micro_batch_size"],
            "accumulation_steps": 1,
            "effective_batch_size": config["micro_batch_size"],
            "memory": {
                "parameter_bytes": 4936,
                "gradient_bytes": 4936,
                "optimizer_bytes": 4936,
                "buffer_bytes": 512,
                "saved_for_backward_bytes": 3 * 1024**2,
                "peak_allocated_bytes": None,
                "peak_reserved_bytes": None,
            },
            "num_parameters": 1234,
        }
        folder = self.path / "runs" / cell
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cost.json").write_text(json.dumps(content))


def write_history(
    folder: Path, curve: Sequence[tuple[int, float | None, float | None]], batch: int
) -> None:
    rows: list[dict[str, Any]] = []
    for k, (samples, loss, accuracy) in enumerate(curve, start=1):
        place = {
            "samples": samples,
            "update": samples // batch,
            "epoch": samples / 400,
            "wall_s": 0.1 * k,
        }
        rows.append({**place, "evaluation": None, "split": "train", "metric": "loss", "value": 1.0})
        for metric, value in (("loss", loss), ("accuracy", accuracy)):
            rows.append(
                {**place, "evaluation": k, "split": "val", "metric": metric, "value": value}
            )
    columns = {name: [row[name] for row in rows] for name in HISTORY.names}
    pq.write_table(pa.table(columns, schema=HISTORY), folder / "history.parquet")
