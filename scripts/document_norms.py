"""Write docs/norms.md, the catalogue of norms, from their cards.

    python scripts/document_norms.py [--check]

``--check`` writes nothing and ends with exit code 1 if the file is not what the cards say.
"""

from __future__ import annotations

import argparse
import sys
import typing
from pathlib import Path

from normexp.norms import NORMS, SHAPES, Axis, NormCard
from normexp.norms._registry import Divisor, EpsPlace, Kernel, SingleValue
from normexp.registry import Entry

FILE = Path(__file__).parents[1] / "docs" / "norms.md"

HEAD = """\
# Norms

Written by `scripts/document_norms.py` from the cards of the norms; the contract suite proves them
by experiment (`normexp check NAME` shows it), all but what is text; formulas are held against NumPy
in `tests/norms`. `normexp list norms --json` has all fields.

Inputs are features `[N, C]`, sequences `[N, L, C]` and images `[N, C, H, W]`. The M elements of a
statistic set share one mean and variance (or mean of squares); `var` is the biased variance unless
the formula says otherwise. A ghost is a chunk of the batch, a part the first channels.

What each field of a card means stands in `normexp.norms.NormCard`; those with a fixed choice take:

{choices}
"""


def main() -> int:
    """Write the catalogue, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    text = (
        HEAD.format(choices=list_choices()) + "\n" + "\n".join(describe(entry) for entry in NORMS)
    )
    if not arguments.check:
        FILE.write_text(text)
        return 0
    if FILE.read_text() == text:
        return 0
    print(
        f"{FILE.name} is not what the cards say: python scripts/document_norms.py", file=sys.stderr
    )
    return 1


def list_choices() -> str:
    """Return the values of every field with a fixed choice."""
    choices = {
        "axes of `statistic_sets`": Axis,
        "`divisor`": Divisor,
        "`eps_place`": EpsPlace,
        "`single_value`": SingleValue,
        "`kernel_cpu`, `kernel_cuda`": Kernel,
    }
    return "\n".join(
        f"- {name}: {', '.join(f'`{value}`' for value in typing.get_args(kind))}"
        for name, kind in choices.items()
    )


def describe(entry: Entry[NormCard]) -> str:
    """Return the section of one norm."""
    card = entry.card
    lines = [f"## `{entry.name}`", "", f"    {card.formula}", ""]
    if card.weight is not None:
        lines += [f"    {card.weight.formula}", ""]
    rows = {
        "source": card.source,
        "statistics over": describe_sets(card),
        "eps": describe_eps(card),
        "parameters": ", ".join(
            f"`{name}` [{', '.join(shape)}]" if shape else f"`{name}` (a scalar)"
            for name, shape in describe_parameters(card).items()
        ),
        "state": ", ".join(f"`{name}`" for name in card.state),
        "options": ", ".join(
            f"`{name}={parameter.default}`"
            for name, parameter in entry.parameters().items()
            if name not in ("dims", "is_activated")
        ),
        "training": describe_training(card),
        "a single value": card.single_value or "",
        "kernel": describe_kernel(card),
        "notes": describe_notes(card),
    }
    lines += [f"- {name}: {text}" for name, text in rows.items() if text]
    return "\n".join(lines) + "\n"


def describe_sets(card: NormCard) -> str:
    """Return what each statistic is computed over, for each kind of input."""
    kinds = []
    for dims, sets in card.statistic_sets.items():
        shape = SHAPES[dims].split(" ")[0]
        shown = (", then " if card.is_chained else ", ").join(" x ".join(axes) for axes in sets)
        kinds.append(f"{shape}: {shown or 'no statistic'}")
    if card.weight is not None:
        kinds.append("weight: fan-in of each output")
    return "; ".join(kinds)


def describe_eps(card: NormCard) -> str:
    """Return where eps stands."""
    places = {
        "inside_sqrt": "inside the square root",
        "outside_sqrt": "outside the square root",
        "clamp": "a lower bound",
        "magnitude": "added to the magnitude of the input",
    }
    shown = [places[card.eps_place]] if card.eps_place else []
    if card.weight is not None and card.weight.eps_place:
        shown.append(f"of the weight: {places[card.weight.eps_place]}")
    return "; ".join(shown)


def describe_parameters(card: NormCard) -> dict[str, tuple[str, ...]]:
    """Return the parameters of the layer and, behind them, of the weight."""
    return card.parameters | (card.weight.parameters if card.weight is not None else {})


def describe_training(card: NormCard) -> str:
    """Return in words how training couples what should be apart."""
    facts = [
        "mixes samples" if card.mixes_samples else "each sample alone",
        "mixes positions" if card.mixes_positions else "each position alone",
        "the same in evaluation" if card.is_same_in_eval else "another function in evaluation",
    ]
    if card.mixes_positions and card.takes_mask:
        facts.append("sequences take a mask")
    return ", ".join(facts)


def describe_kernel(card: NormCard) -> str:
    """Return what computes the norm, and whether that is one kernel."""
    kinds = {"CPU": card.kernel_cpu, "CUDA": card.kernel_cuda}
    if card.kernel_cpu == "none":
        return card.kernel
    if card.kernel_cpu == card.kernel_cuda:
        return f"{card.kernel_cpu}; {card.kernel.removeprefix('composite').lstrip(' ;') or 'own'}"
    return f"{', '.join(f'{kind} on {device}' for device, kind in kinds.items())}; {card.kernel}"


def describe_notes(card: NormCard) -> str:
    """Return what is out of the ordinary."""
    notes = {
        "experimental": card.is_experimental,
        "brings its own activation": card.includes_activation,
        "needs a condition with every input: for own models": card.takes_condition,
        "the backward pass is not the derivative of the forward pass": not card.has_exact_gradient,
        "not under torch.vmap": not card.is_vectorizable,
    }
    return ", ".join(note for note, holds in notes.items() if holds)


if __name__ == "__main__":
    sys.exit(main())
