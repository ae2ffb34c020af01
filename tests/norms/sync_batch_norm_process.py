"""One of the processes that share statistics: runs every case and saves what came out.

Usage: python sync_batch_norm_process.py FOLDER RANK WORLD_SIZE
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from normexp.norms.sync_batch_norm import build_sync_batch_norm


def run_case(case, rank):
    """Train on some micro-batches, then evaluate; return what came out."""
    layer = build_sync_batch_norm(case["num_features"], dims=case["dims"], **case["params"])
    layer = layer.to(case["dtype"])
    if case["params"].get("affine", True):
        with torch.no_grad():
            layer.weight.copy_(case["weight"])
            layer.bias.copy_(case["bias"])
    outputs, gradients = [], []
    for batch in case["batches"]:
        x = batch["x"][rank].requires_grad_()
        mask = () if batch["mask"] is None else (batch["mask"][rank],)
        y = layer(x, *mask)
        (y * batch["grad"][rank]).sum().backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
    return {
        "outputs": outputs,
        "gradients": gradients,
        "parameter_gradients": [parameter.grad for parameter in layer.parameters()],
        "buffers": dict(layer.named_buffers()),
        "evaluated": layer.eval()(case["batches"][0]["x"][rank]).detach(),
        "printed": str(layer),
    }


def main(folder, rank, world_size):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    cases = torch.load(folder / "cases.pt")
    torch.save([run_case(case, rank) for case in cases], folder / f"results{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
