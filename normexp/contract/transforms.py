"""Derivatives and program transformations: gradcheck, vmap, compilation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from normexp.contract._checks import contract_check
from normexp.contract._subject import (
    DISTINCT,
    Shape,
    Specimen,
    State,
    Subject,
    draw,
    make_mask,
    max_difference,
    tell,
)

# Norms may take another way on large inputs.
_LARGE: dict[int, Shape] = {0: (4098, 8), 1: (66, 64, 8), 2: (6, 8, 24, 30)}


@contract_check(
    "The backward pass is the derivative of the forward pass exactly if the card says so.",
    fields=("has_exact_gradient",),
)
def try_has_exact_gradient(subject: Subject) -> Iterator[str]:
    """Compare gradients with finite differences, in a fresh layer and past every warm-up."""
    declared = subject.card.has_exact_gradient
    for dims in subject.card.dims:
        errors = {}
        for shape in (DISTINCT[dims], _LARGE[dims]):
            # Of many elements some would step over the bend of an activation.
            specimen = subject.specimen(shape, is_plain=shape != DISTINCT[dims])
            for when, state in (("fresh", specimen.state), ("long trained", specimen.age())):
                where = f"of a {when} layer on {tell(shape)}"
                errors[where] = _find_gradient_error(specimen, state)
                if dims == 1 and subject.card.takes_mask:
                    mask = make_mask(shape)
                    errors[f"{where} with a mask"] = _find_gradient_error(specimen, state, mask)
        where, error = max(errors.items(), key=lambda item: item[1])
        if declared != (error < 1e-5):
            yield (
                f"has_exact_gradient={declared} is declared; the gradient {where} is {error:.2g} "
                "off the finite difference, relative to its size"
            )


def _find_gradient_error(specimen: Specimen, state: State, mask: Tensor | None = None) -> float:
    """Return how far a derivative along one direction is off, of input and parameters together."""
    x = draw(specimen.shape, "gradient")
    x = x + 0.5 * x.sign()  # away from zero, where a power bends
    loss_weights = draw(specimen.shape, "loss")
    tensors = {"x": x, **specimen.parameters}
    directions = {key: draw(tuple(value.shape), "way", key) for key, value in tensors.items()}

    def loss(moved: dict[str, Tensor]) -> Tensor:
        parameters = {key: value for key, value in moved.items() if key != "x"}
        y = specimen(moved["x"], state=state, parameters=parameters, mask=mask)
        return (y * loss_weights).sum()

    leaves = {key: value.clone().requires_grad_() for key, value in tensors.items()}
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True)
    slopes = [
        (g * d).sum() for g, d in zip(gradients, directions.values(), strict=True) if g is not None
    ]
    sizes = [
        (g * d).square().sum()
        for g, d in zip(gradients, directions.values(), strict=True)
        if g is not None
    ]
    step = 1e-5
    with torch.no_grad():
        ahead = loss({key: value + step * directions[key] for key, value in tensors.items()})
        behind = loss({key: value - step * directions[key] for key, value in tensors.items()})
    difference = (ahead - behind) / (2 * step)
    return float((sum(slopes) - difference).abs() / (sum(sizes) ** 0.5 + 1e-12))


@contract_check(
    "Under torch.vmap with stacked parameters and buffers it does what single calls do, in "
    "training and in evaluation, exactly if the card says so.",
    fields=("is_vectorizable",),
)
def try_is_vectorizable(subject: Subject) -> Iterator[str]:
    """Train two stacked replicas one step, and each alone; then evaluate them."""
    declared = subject.card.is_vectorizable
    for call in subject.calls():
        problem = _find_vmap_problem(call.specimen, call.mask)
        problem = problem or _find_evaluation_problem(call.specimen, call.mask)
        if declared and problem:
            yield f"is_vectorizable=True is declared, but on {call.where} {problem}"
        if not declared and not problem:
            yield (
                "is_vectorizable=False is declared, but under torch.vmap an input "
                f"{call.where} gives the same as single calls"
            )


def _find_vmap_problem(specimen: Specimen, mask: Tensor | None) -> str | None:
    """Return what goes wrong with two stacked replicas; None if nothing does."""
    x = torch.stack([draw(specimen.shape, "vmap", replica) for replica in range(2)])
    parameters = [
        {k: p + 0.1 * replica for k, p in specimen.parameters.items()} for replica in range(2)
    ]
    ways = draw(specimen.shape, "loss")
    condition = (specimen.condition(x[0]),) if specimen.card.takes_condition else ()
    keywords = {} if mask is None else {"mask": mask}
    stacked = {k: torch.stack([p[k] for p in parameters]) for k in specimen.parameters}
    state = {k: torch.stack([v, v]) for k, v in specimen.state.items()}

    def train(p: State, b: State, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, State]]:
        y = functional_call(specimen.module, {**p, **b}, (inputs, *condition), keywords)
        return (y * ways).sum(), (y, b)

    specimen.module.train()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gradients, (y, after) = vmap(torch.func.grad(train, argnums=2, has_aux=True))(
                stacked, state, x
            )
    except Exception as error:  # whatever it is, it did not work
        return f"torch.vmap ended in {type(error).__name__}: {error}"
    loop = find_loop(caught)
    if loop is not None:
        return loop
    for replica in range(2):
        alone = x[replica].clone().requires_grad_()
        single, state_after = specimen.run(alone, parameters=parameters[replica], mask=mask)
        (gradient,) = torch.autograd.grad((single * ways).sum(), alone)
        pairs = {"output": (y[replica], single), "gradient": (gradients[replica], gradient)}
        pairs |= {f"buffer {k}": (after[k][replica], state_after[k]) for k in state_after}
        for what, (a, b) in pairs.items():
            if max_difference(a.double(), b.double()) > 1e-9:
                return f"the {what} under torch.vmap is not that of a single call"
    return None


def _find_evaluation_problem(specimen: Specimen, mask: Tensor | None) -> str | None:
    """Return what goes wrong when two stacked replicas are evaluated; None if nothing does."""
    x = torch.stack([draw(specimen.shape, "vmap", replica) for replica in range(2)])
    condition = (specimen.condition(x[0]),) if specimen.card.takes_condition else ()
    keywords = {} if mask is None else {"mask": mask}
    moved = {key: value + 0.1 for key, value in specimen.parameters.items()}
    replicas = [(specimen.parameters, specimen.state), (moved, specimen.stir())]
    tensors = [{**parameters, **state} for parameters, state in replicas]
    stacked = {key: torch.stack([each[key] for each in tensors]) for key in tensors[0]}

    def evaluate(own: State, inputs: Tensor) -> Tensor:
        y: Tensor = functional_call(specimen.module, own, (inputs, *condition), keywords)
        return y

    specimen.module.eval()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = vmap(evaluate)(stacked, x)
    except Exception as error:  # whatever it is, it did not work
        return f"in evaluation torch.vmap ended in {type(error).__name__}: {error}"
    loop = find_loop(caught)
    if loop is not None:
        return f"in evaluation {loop}"
    for replica, (parameters, state) in enumerate(replicas):
        single = specimen(x[replica], training=False, state=state, parameters=parameters, mask=mask)
        if max_difference(y[replica], single) > 1e-9:
            return "in evaluation the output under torch.vmap is not that of a single call"
    return None


def find_loop(caught: list[warnings.WarningMessage]) -> str | None:
    """Return what torch warned of if it looped over replicas instead of stacking them."""
    for warning in caught:
        if "batching rule" in str(warning.message):
            reason = str(warning.message).split(". ")[0]
            return f"torch.vmap falls back to a loop over the replicas ({reason})"
    return None


@contract_check("torch.compile takes the whole layer as one graph and keeps its results.")
def try_compile(subject: Subject) -> Iterator[str]:
    """Compile forward and backward pass without generating code."""
    for way in subject.calls():
        specimen = way.specimen
        keywords = {} if way.mask is None else {"mask": way.mask}
        torch._dynamo.reset()
        compiled = torch.compile(specimen.module.train(), fullgraph=True, backend="aot_eager")
        results = []
        for call in (specimen.module, compiled):
            specimen.module.load_state_dict({**specimen.parameters, **specimen.state})
            x = draw(specimen.shape, "compile").requires_grad_()
            given = (x, specimen.condition(x)) if specimen.card.takes_condition else (x,)
            y = call(*given, **keywords)
            (gradient,) = torch.autograd.grad((y * draw(specimen.shape, "loss")).sum(), x)
            state = {f"buffer {k}": v.clone() for k, v in specimen.module.named_buffers()}
            results.append({"output": y, "gradient": gradient, **state})
        for what, value in results[0].items():
            difference = max_difference(value.double(), results[1][what].double())
            if difference > 1e-9:
                yield f"compiled, {what} on {way.where} is {difference:.2g} different"
    torch._dynamo.reset()
