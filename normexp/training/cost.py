"""The cost of cells, measured apart from training: time by part of an update, memory by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from normexp.config.schema import CellConfig
from normexp.data import DATASETS, load_dataset
from normexp.measure import (
    ForeignLoad,
    Timing,
    device_synchronizer,
    fold_norms,
    memory_by_part,
    peak_allocated_bytes,
    saved_for_backward_bytes,
    storage_bytes,
    time_interleaved,
)
from normexp.norms import NORMS, NormRecord
from normexp.records import NUMERICS_VERSION, SCHEMA_VERSION, hash_of
from normexp.records.environment import describe_cpu
from normexp.training.build import build_start
from normexp.training.objective import sum_losses
from normexp.training.positions import kernel_of

PREDICTION_BATCH_SIZE = 256
WARMUP_CALLS = 5
ROUNDS = 9
MIN_WINDOW_S = 0.03
# Share of the machine's cores that others may use before a timing no longer counts as alone.
ALONE_BELOW = 0.05


def cost_key(config: CellConfig) -> str:
    """Return a hash of all that can change what an update costs.

    Cells that differ in rate, budget or schedule alone share it and are measured once.

    Args:
        config: A checked cell.
    """
    # How long texts are and how many symbols they have may depend on any of the parameters.
    is_text = DATASETS.get(config.data.name, key="data").card.is_text
    data = {k: v for k, v in config.data.params.items() if is_text or k == "image_size"}
    placement = config.placement.name if config.placement else None
    return hash_of(
        [
            [config.data.name, data],
            asdict(config.model),
            asdict(config.norm),
            placement,
            [config.optimizer.name, config.optimizer.params],
            [config.micro_batch_size, config.accumulation_steps, config.precision],
            [config.trainer.accelerator, config.trainer.num_threads],
            [PREDICTION_BATCH_SIZE, NUMERICS_VERSION, config.plugins_sha256],
            *(["folding"] if "folding" in config.probes else []),
            *(["adaptive_clip"] if config.optimizer.adaptive_clip is not None else []),
        ]
    )[:16]


def measure_costs(configs: Sequence[CellConfig]) -> list[dict[str, Any]]:
    """Return the cost records of cells, measured in turn so that drift hits all alike.

    Nothing else may run meanwhile. The models are fresh and thrown away.

    Args:
        configs: Cells with equal device, threads and precision.

    Returns:
        What ``cost.json`` holds, one for each cell.
    """
    threads = {config.trainer.num_threads for config in configs}
    if len(threads) != 1:
        raise ValueError(f"cells with one number of threads are needed, found {sorted(threads)}")
    torch.set_num_threads(threads.pop())
    torch.use_deterministic_algorithms(True)  # as in training
    subjects, memory = [], []
    for config in configs:
        subjects.append(_build_subject(config))
        memory.append(subjects[-1].measure_memory(others=subjects[:-1]))
    actions = {
        f"{index}/{name}": action
        for index, subject in enumerate(subjects)
        for name, action in subject.actions().items()
    }
    device = subjects[0].device
    load = ForeignLoad()
    timings = time_interleaved(
        actions,
        rounds=ROUNDS,
        min_window_s=MIN_WINDOW_S,
        warmup=WARMUP_CALLS,
        synchronize=device_synchronizer(device),
    )
    foreign_share = load.share()
    return [
        {
            "schema_version": SCHEMA_VERSION,
            "cost_key": cost_key(subject.config),
            "conditions": _describe_conditions(subject, foreign_share),
            "timing": {
                name: _describe_timing(timings[f"{index}/{name}"]) for name in subject.actions()
            },
            "prediction_batch_size": PREDICTION_BATCH_SIZE,
            "micro_batch_size": subject.config.micro_batch_size,
            "accumulation_steps": subject.config.accumulation_steps,
            "effective_batch_size": subject.config.effective_batch_size,
            "memory": memory[index],
            "num_parameters": sum(p.numel() for p in subject.model.parameters()),
            "norm_kernel": _describe_kernels(subject.model, device),
        }
        for index, subject in enumerate(subjects)
    ]


@dataclass
class _Subject:
    """A cell's model with all that an update needs, ready to be timed."""

    config: CellConfig
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], None] | None
    inputs: Tensor
    targets: Tensor
    prediction_inputs: Tensor

    def autocast(self) -> torch.autocast:
        """Return the context of the cell's precision."""
        is_mixed = self.config.precision == "bf16-mixed"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_mixed)

    def forward(self) -> Tensor:
        """Return the loss of one micro-batch, with the graph for its backward pass."""
        with self.autocast():
            loss = sum_losses(self.model(self.inputs), self.targets)
        return loss / (self.config.accumulation_steps * self.targets.numel())

    def forward_backward(self) -> None:
        """Run forward and backward of one micro-batch; gradients add up as in an update."""
        torch.autograd.backward(self.forward())

    def update(self) -> None:
        """Take one whole update."""
        for _ in range(self.config.accumulation_steps):
            self.forward_backward()
        if self.clip is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def predict(self) -> None:
        """Predict the fixed batch."""
        self.model.eval()
        with torch.inference_mode(), self.autocast():
            self.model(self.prediction_inputs)
        self.model.train()

    def actions(self) -> Mapping[str, Callable[[], None]]:
        """Return what is timed, by the name in the record."""

        def forward() -> None:
            self.forward()

        actions: dict[str, Callable[[], None]] = {
            "forward_ms": forward,
            "forward_backward_ms": self.forward_backward,
            "update_ms": self.update,
            "prediction_ms": self.predict,
        }
        if "folding" in self.config.probes:
            actions["folded_prediction_ms"] = self.predict_folded
        return actions

    @cached_property
    def folded(self) -> nn.Module:
        """The model with its batch norms folded; built after memory was measured without it."""
        return fold_norms(self.model, self.prediction_inputs[:2])[0]

    def predict_folded(self) -> None:
        """Predict the fixed batch with the folded model."""
        with torch.inference_mode(), self.autocast():
            self.folded(self.prediction_inputs)

    def measure_memory(self, others: Sequence[_Subject]) -> dict[str, int | None]:
        """Return bytes by part; activations as saved for backward, and the peak of an update.

        Args:
            others: Subjects that wait for their timing; a device's own counters would count
                them in, so they stand aside.
        """
        for other in others:
            other.to(torch.device("cpu"))
        try:
            return self._measure_memory()
        finally:
            for other in others:
                other.to(other.device)

    def to(self, device: torch.device) -> None:
        """Move all tensors; where they are on the CPU already, nothing happens."""
        self.model.to(device)
        for state in self.optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if torch.is_tensor(v)})
        self.inputs = self.inputs.to(device)
        self.targets = self.targets.to(device)
        self.prediction_inputs = self.prediction_inputs.to(device)

    def _measure_memory(self) -> dict[str, int | None]:
        self.forward_backward()
        self.optimizer.step()
        parts = memory_by_part(self.model, self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        batch = [self.inputs, self.targets]
        fixed = [*self.model.parameters(), *self.model.buffers(), *batch]
        saved = saved_for_backward_bytes(self.forward, exclude=fixed)

        def resident() -> int:
            now = memory_by_part(self.model, self.optimizer)
            return sum(now.values()) + storage_bytes(batch)

        peak = peak_allocated_bytes(self.update, self.device, resident_bytes=resident)
        return {
            **parts,
            "saved_for_backward_bytes": saved,
            "peak_allocated_bytes": peak.allocated,
            "peak_reserved_bytes": peak.reserved,
        }


def _build_subject(config: CellConfig) -> _Subject:
    """Return a freshly initialised model of a cell, with real samples.

    Texts have all their padding, as the longest batch has: the most that an update costs.
    """
    device = _device_of(config)
    data = load_dataset(config.data.name, config.data.params)
    # A rate this small keeps the numbers of thousands of timed updates ordinary.
    model, _, optimizer, clip = build_start(config, data, seed=0, lr=1e-6)
    model.to(device)
    size = config.micro_batch_size
    inputs = data.train.inputs
    if inputs.is_floating_point():
        inputs = inputs.to(next(model.parameters()).dtype)
    prediction = inputs[torch.arange(PREDICTION_BATCH_SIZE) % len(data.train)]
    return _Subject(
        config=config,
        device=device,
        model=model,
        optimizer=optimizer,
        clip=clip,
        inputs=inputs[:size].to(device, copy=True),
        targets=data.train.targets[:size].to(device, copy=True),
        prediction_inputs=prediction.to(device),
    )


def _device_of(config: CellConfig) -> torch.device:
    """Return the device that Lightning would choose."""
    is_gpu = config.trainer.accelerator in ("gpu", "auto") and torch.cuda.is_available()
    return torch.device("cuda", 0) if is_gpu else torch.device("cpu")


def _describe_kernels(model: nn.Module, device: torch.device) -> str:
    """Return what computes the model's norms there: fused, composite, both, or none.

    A composite against a fused kernel is a comparison of code as much as of methods.
    """
    kinds = {
        kernel_of(module, NORMS.get(record.name).card, model, device.type)
        for module in model.modules()
        if isinstance(record := getattr(module, "norm_record", None), NormRecord)
    }
    return ", ".join(sorted(kinds - {"none"}, reverse=True)) or "none"


def _describe_timing(timing: Timing) -> dict[str, Any]:
    return {
        "median": timing.median_ms,
        "q25": timing.q25_ms,
        "q75": timing.q75_ms,
        "samples": list(timing.samples_ms),
        "calls_per_window": timing.calls_per_window,
        "first_call": timing.first_call_ms,
    }


def _describe_conditions(subject: _Subject, foreign_share: float | None) -> dict[str, Any]:
    config, device = subject.config, subject.device
    is_cuda, is_text = device.type == "cuda", not subject.inputs.is_floating_point()
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else describe_cpu(),
        "cpu": describe_cpu(),
        "num_threads": config.trainer.num_threads,
        "precision": config.precision,
        "memory_format": "contiguous",
        "mode": "eager",
        # Of a text, its padding included: the most that a batch is cut to.
        "num_positions": subject.inputs.shape[1] if is_text else None,
        "torch": torch.__version__,
        "warmup_calls": WARMUP_CALLS,
        "rounds": ROUNDS,
        "min_window_s": MIN_WINDOW_S,
        "is_deterministic": True,
        "foreign_cpu_share": foreign_share,
        "is_alone": None if foreign_share is None else foreign_share < ALONE_BELOW,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
