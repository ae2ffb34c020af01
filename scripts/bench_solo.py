"""Time an update of the solo path against a hand-written loop over the same model and tensors.

Both take the same updates of ResNet-8 on digits, in turn, in one process with one thread; the
table shows medians over rounds and their ratio. The solo path is the whole of it: Lightning's
Trainer, index streams, gathering of samples, schedule, journal and divergence check.

    python scripts/bench_solo.py [--micro-batch-size 2] [--updates 400] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

from normexp.data import Dataset, load_dataset
from normexp.data.batches import IndexStream, UpdatePlan
from normexp.models import build_model, initialize
from normexp.norms import NormFactory
from normexp.training.optim import build_lr, build_optimizer, group_parameters
from normexp.training.recorder import Recorder
from normexp.training.solo import SoloModule, quiet_lightning
from normexp.training.windows import WindowSource


def build(data: Dataset) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return ResNet-8 with batch_norm, and SGD over it."""
    model = build_model(
        "cifar_resnet",
        {"depth": 8, "width": 16},
        input_shape=data.input_shape,
        num_classes=data.num_classes,
        norm=NormFactory("batch_norm", {}),
        placement="res_post",
    )
    initialize(model, seed=0)
    groups = group_parameters(model, weight_decay=5e-4, decay_roles=["weight"])
    return model, build_optimizer("sgd", groups, lr=0.01, params={"momentum": 0.9})


def time_by_hand(data: Dataset, micro_batch_size: int, updates: int) -> float:
    """Return seconds an update of the plainest loop: shuffle, index, forward, backward, step."""
    model, optimizer = build(data)
    model.train()
    inputs, targets = data.train.inputs, data.train.targets
    start = time.perf_counter()
    done = 0
    while done < updates:
        order = torch.randperm(len(inputs))
        for index in order.split(micro_batch_size)[: updates - done]:
            loss = F.cross_entropy(model(inputs[index]), targets[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            done += 1
    return (time.perf_counter() - start) / updates


def time_solo(data: Dataset, micro_batch_size: int, updates: int) -> float:
    """Return seconds an update of normexp's solo path, the Trainer's set-up left out."""
    model, optimizer = build(data)
    plan = UpdatePlan(len(data.train), micro_batch_size, 1, updates * micro_batch_size, 1)
    lr = build_lr("cosine", peak_lr=0.01, warmup_fraction=0.0, num_updates=updates, params={})
    module = SoloModule(model, plan=plan, optimizer=optimizer, lr=lr)
    source = WindowSource(
        module,
        IndexStream(plan, seed=0),
        data,
        {"crop_padding": 0, "horizontal_flip": False},
        window_updates=50,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, quiet_lightning():
        module.recorder = Recorder(Path(folder), num_train=len(data.train))
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            callbacks=[clock],
            deterministic=True,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, source)
    return clock.seconds / updates


class Clock(pl.Callback):
    """Seconds from the first window to the end of the last."""

    def on_train_epoch_start(self, *_: object) -> None:
        """Start."""
        self.start = time.perf_counter()

    def on_train_epoch_end(self, *_: object) -> None:
        """Stop."""
        self.seconds = time.perf_counter() - self.start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset("digits", {})
    times: dict[str, list[float]] = {"by hand": [], "solo": []}
    for round_ in range(options.rounds + 1):
        for name, measure in (("by hand", time_by_hand), ("solo", time_solo)):
            seconds = measure(data, options.micro_batch_size, options.updates)
            if round_ > 0:  # the first is the warm-up
                times[name].append(seconds)
    hand, solo = (statistics.median(times[name]) for name in ("by hand", "solo"))
    ratios = [b / a for a, b in zip(times["by hand"], times["solo"], strict=True)]
    print(f"ResNet-8, digits, micro-batch {options.micro_batch_size}, one thread, medians of")
    print(
        f"{options.rounds} rounds of {options.updates} updates in turn, torch {torch.__version__}"
    )
    print(f"  by hand  {1e3 * hand:.3f} ms an update")
    print(f"  solo     {1e3 * solo:.3f} ms an update")
    print(f"  ratio    {solo / hand:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
