"""Gain and shift: each scales, or moves, its own channel and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import Subject, count_channels, draw, max_difference, tell

# Where the output is of size 1 in float64.
_TOLERANCE = 1e-9


@contract_check(
    "weight_c multiplies channel c and bias_c is added to it, where they are one a channel.",
    fields=("parameters",),
)
def try_gain_and_shift(subject: Subject) -> Iterator[str]:
    """Compare the output at drawn gains and shifts with that at ones and zeros."""
    declared = subject.card.parameters
    names = [name for name in ("weight", "bias") if declared.get(name) == ("C",)]
    if not names:
        raise DoesNotApply("it has no gain or shift of one number a channel")
    for specimen in subject.specimens(is_plain=True):
        if not all(name in specimen.parameters for name in names):
            continue  # the parameters are not the declared ones, which another check tells
        channels = count_channels(specimen.shape)
        x = draw(specimen.shape, "gains")
        neutral = {"weight": torch.ones(channels), "bias": torch.zeros(channels)}
        at_rest = {name: neutral[name].to(x.dtype) for name in names}
        plain = specimen(x, parameters=specimen.parameters | at_rest)
        for name in names:
            drawn = draw((channels,), "gains", name)
            y = specimen(x, parameters=specimen.parameters | at_rest | {name: drawn})
            by_channel = drawn[:, None, None] if len(specimen.shape) == 4 else drawn
            expected = plain * by_channel if name == "weight" else plain + by_channel
            difference = max_difference(y, expected)
            if difference > _TOLERANCE:
                does = "multiply" if name == "weight" else "be added to"
                yield (
                    f"parameters: {name} is declared as one number a channel, which should "
                    f"{does} its own channel; on shape {tell(specimen.shape)} the output is off by "
                    f"{difference:.2g}"
                )
