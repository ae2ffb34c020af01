"""What computes the norm: how many nodes of the graph do arithmetic, and strides of images."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import DISTINCT, Subject, draw, max_difference, tell

# Nodes that move or mark elements and compute nothing.
_LAYOUT = re.compile(
    r"(\w*View|Reshape\w*|Permute|Transpose|T|Mt|Clone|ToCopy|Copy\w*|Contiguous|Squeeze|Unsqueeze|"
    r"Expand|Repeat|Slice|Select|Split\w*|Chunk|Unbind|Cat|Stack|AsStrided|Alias|Flatten|Unflatten|"
    r"Detach|Narrow|Movedim|Swapaxes)Backward\d*"
)


def find_arithmetic(y: Tensor, x: Tensor) -> list[str]:
    """Return the names of the graph's nodes between input and output that compute something.

    Args:
        y: The output.
        x: The input; requires a gradient.
    """
    leads_to_input: dict[Node, bool] = {}

    def visit(node: Node) -> bool:
        if node not in leads_to_input:
            leads_to_input[node] = False  # graphs have no cycles
            variable = getattr(node, "variable", None)
            following = [visit(other) for other, _ in node.next_functions if other is not None]
            leads_to_input[node] = variable is x or any(following)
        return leads_to_input[node]

    if y.grad_fn is None:
        return []
    visit(y.grad_fn)
    nodes = [node for node, leads in leads_to_input.items() if leads]
    return [
        node.name()
        for node in nodes
        if getattr(node, "variable", None) is not x and not _LAYOUT.fullmatch(node.name())
    ]


def name_kernel(nodes: list[str]) -> str:
    """Return what a card calls that many nodes; a function of Python is a composite."""
    if not nodes:
        return "none"
    is_own = not re.fullmatch(r"\w*Backward\d+", nodes[0])  # torch's own names end in a digit
    return "composite" if len(nodes) > 1 or is_own else "fused"


@contract_check(
    "On the CPU it is one kernel, several, or nothing to compute, as declared.",
    fields=("kernel_cpu",),
)
def try_kernel_cpu(subject: Subject) -> Iterator[str]:
    """Count the nodes of the autograd graph between input and output."""
    yield from _try_kernel(subject, "kernel_cpu", "cpu")


@contract_check(
    "The same on CUDA; without such a device only whether there is anything to compute.",
    fields=("kernel_cuda",),
)
def try_kernel_cuda(subject: Subject) -> Iterator[str]:
    """Count the nodes of the autograd graph on CUDA."""
    if torch.cuda.is_available():
        yield from _try_kernel(subject, "kernel_cuda", "cuda")
        return
    declared = subject.card.kernel_cuda
    found = {_find_kernel(subject, dims, "cpu")[0] for dims in subject.card.dims}
    if (declared == "none") != (found == {"none"}):
        yield (
            f"kernel_cuda={declared} is declared; found {' and '.join(sorted(found))} on the CPU, "
            "and what is computed there is computed on CUDA"
        )
    elif declared != "none":
        raise DoesNotApply("there is no CUDA device to count kernels on")


def _try_kernel(subject: Subject, name: str, device: str) -> Iterator[str]:
    declared = getattr(subject.card, name)
    for dims in subject.card.dims:
        found, nodes = _find_kernel(subject, dims, device)
        if found != declared:
            told = ", ".join(nodes) or "nothing"
            yield (
                f"{name}={declared} is declared; found {found} on an input {tell(DISTINCT[dims])}: "
                f"the graph computes {told}"
            )


def _find_kernel(subject: Subject, dims: int, device: str) -> tuple[str, list[str]]:
    """Return the kind of kernel, and the nodes that compute."""
    specimen = subject.specimen(DISTINCT[dims], dtype=torch.float32)
    x = draw(specimen.shape, "kernel").float().to(device).requires_grad_()
    state = {key: value.to(device) for key, value in specimen.state.items()}
    parameters = {k: p.to(device).requires_grad_() for k, p in specimen.parameters.items()}
    specimen.module.to(device)
    nodes = find_arithmetic(specimen(x, state=state, parameters=parameters), x)
    return name_kernel(nodes), nodes


@contract_check(
    "Images in channels-last strides give the same values, and come out in such strides exactly "
    "if the card says so.",
    fields=("keeps_channels_last",),
)
def try_keeps_channels_last(subject: Subject) -> Iterator[str]:
    """Call the norm on images in both layouts."""
    declared = subject.card.keeps_channels_last
    if 2 not in subject.card.dims:
        if declared:
            yield "keeps_channels_last=True is declared, but dims has no images [N, C, H, W] (2)"
            return
        raise DoesNotApply("there is no form for images [N, C, H, W]")
    specimen = subject.specimen(DISTINCT[2])
    x = draw(specimen.shape, "layout")
    y = specimen(x.contiguous(memory_format=torch.channels_last))
    difference = max_difference(y, specimen(x))
    if difference > 1e-9:
        yield f"keeps_channels_last: in such strides the output is {difference:.2g} different"
    found = y.is_contiguous(memory_format=torch.channels_last)
    if found != declared:
        yield (
            f"keeps_channels_last={declared} is declared, but images {tell(specimen.shape)} in "
            f"such strides come out with strides {list(y.stride())}"
        )
