"""An update is the mean over its samples, however it is split: exactly, and not for BatchNorm."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.config.schema import CellConfig, ModelConfig
from normexp.data import augment, draw_augmentation, load_dataset
from normexp.data.batches import IndexStream, epoch_order
from normexp.models import initialize
from normexp.training.check import build_cell_model, build_plan
from normexp.training.optim import build_lr, build_optimizer, group_parameters
from normexp.training.recorder import Recorder
from normexp.training.solo import SoloModule, quiet_lightning
from normexp.training.windows import WindowSource

PER_SAMPLE_NORMS = [
    "group_norm",
    "instance_norm",
    "layer_norm_channel",
    "layer_norm_chw",
    "no_norm",
    "rms_norm",
]
SPLITS = [(2, 4), (4, 2)]


def train(config: CellConfig, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model after the cell's whole budget, trained by Lightning."""
    data = load_dataset(config.data.name, config.data.params)
    plan = build_plan(config, data)
    model = build_cell_model(config, data)
    initialize(model, seed=0)
    model.to(dtype)
    groups = group_parameters(model, weight_decay=5e-4, decay_roles=["weight"])
    module = SoloModule(
        model,
        plan=plan,
        optimizer=build_optimizer("sgd", groups, lr=0.05, params={"momentum": 0.9}),
        lr=build_lr(
            "cosine", peak_lr=0.05, warmup_fraction=0.0, num_updates=plan.num_updates, params={}
        ),
    )
    module.recorder = Recorder(folder, num_train=plan.num_train)
    source = WindowSource(
        module, IndexStream(plan, 0), data, {"crop_padding": 1, "horizontal_flip": True}, 7
    )
    with quiet_lightning():
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, source)
    module.recorder.close()
    assert module.update == plan.num_updates == 20
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the difference of all weights relative to their size."""
    pairs = [
        (a.detach(), b.detach()) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    ]
    difference = torch.stack([(a - b).pow(2).sum() for a, b in pairs]).sum()
    size = torch.stack([a.pow(2).sum() for a, _ in pairs]).sum()
    return float((difference / size).sqrt())


@pytest.mark.parametrize("norm", PER_SAMPLE_NORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_split_of_an_update_does_not_matter_for_per_sample_norms(
    make_cell: Callable[..., CellConfig],
    tmp_path: Path,
    norm: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    # Instance norm over the 2x2 maps of a third stage divides by the spread of four numbers: 20
    # updates then turn float32's rounding into 4e-3. Over 4x4 maps they do not.
    stages = 2 if norm == "instance_norm" else 3
    model = ModelConfig("cifar_resnet", {"depth": 8, "width": 8, "num_stages": stages})
    whole = train(make_cell(norm, model=model), tmp_path / "whole", dtype)
    for micro, steps in SPLITS:
        config = make_cell(norm, model=model, micro_batch_size=micro, accumulation_steps=steps)
        split = train(config, tmp_path / f"{micro}x{steps}", dtype)
        assert distance(whole, split) < tolerance


def test_split_of_an_update_matters_for_batch_norm(
    make_cell: Callable[..., CellConfig], tmp_path: Path
) -> None:
    whole = train(make_cell("batch_norm", micro_batch_size=8), tmp_path / "a", torch.float64)
    config = make_cell("batch_norm", micro_batch_size=2, accumulation_steps=4)
    split = train(config, tmp_path / "b", torch.float64)
    # Two networks that learned from the same samples, yet not one network to rounding.
    assert 1e-3 < distance(whole, split) < 1.0


class ChunkedBatchNorm(nn.Module):
    """Batch norm over chunks of a batch, written from its formula; no running statistics."""

    def __init__(self, norm: nn.BatchNorm2d, chunk_size: int) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.eps, self.chunk_size = norm.eps, chunk_size

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        chunks = x.reshape(b // self.chunk_size, self.chunk_size, c, h, w)
        mean = chunks.mean(dim=(1, 3, 4), keepdim=True)
        var = (chunks - mean).pow(2).mean(dim=(1, 3, 4), keepdim=True)
        normal = ((chunks - mean) / (var + self.eps).sqrt()).reshape(x.shape)
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


def test_accumulated_batch_norm_has_the_gradients_of_chunked_statistics(
    make_cell: Callable[..., CellConfig],
) -> None:
    config = make_cell("batch_norm", micro_batch_size=2, accumulation_steps=4)
    data = load_dataset("digits", {})
    models = [build_cell_model(config, data).double() for _ in range(2)]
    for model in models:
        initialize(model, seed=0)
    accumulated, chunked = models
    for parent in list(chunked.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, ChunkedBatchNorm(child, chunk_size=2))
    inputs, targets = data.train.inputs[:8].double(), data.train.targets[:8]
    for part, labels in zip(inputs.split(2), targets.split(2), strict=True):
        (F.cross_entropy(accumulated(part), labels, reduction="sum") / 8).backward()
    F.cross_entropy(chunked(inputs), targets).backward()
    gradients: list[dict[str, Any]] = [
        {name: p.grad for name, p in model.named_parameters()} for model in models
    ]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm", ["batch_norm", "group_norm"])
def test_training_is_the_plain_loop(
    make_cell: Callable[..., CellConfig], tmp_path: Path, norm: str
) -> None:
    config = make_cell(norm, micro_batch_size=4, accumulation_steps=2)
    trained = train(config, tmp_path, torch.float64)
    data = load_dataset("digits", {})
    model = build_cell_model(config, data)
    initialize(model, seed=0)
    model.double()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 5e-4}, {"params": others}], lr=0.05, momentum=0.9
    )
    order = torch.from_numpy(epoch_order(0, 0, 1000))
    for update in range(20):
        index = order[8 * update : 8 * update + 8]
        draws = draw_augmentation(0, update, 8, crop_padding=1, horizontal_flip=True)
        inputs = augment(data.train.inputs[index], draws).double()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = (
            0.05 * (1 + math.cos(math.pi * update / 20)) / 2
        )
        optimizer.zero_grad()
        first = F.cross_entropy(model(inputs[:4]), data.train.targets[index[:4]])
        second = F.cross_entropy(model(inputs[4:]), data.train.targets[index[4:]])
        ((first + second) / 2).backward()
        optimizer.step()
    assert distance(trained, model) < 1e-12
