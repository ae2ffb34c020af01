"""An output follows the input at its own place; gain and shift act on their own channel."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import Subject, draw, max_difference, tell
from normexp.norms import channel_axis, count_channels

# Where the output is of size 1 in float64.
_TOLERANCE = 1e-9
# Inputs with enough numbers in each channel to correlate.
_SHAPES = {0: (60, 8), 1: (12, 10, 8), 2: (12, 8, 4, 5)}
# Every norm here is far above; the output of another channel is near 0.
_MIN_CORRELATION = 0.5


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


@contract_check(
    "Each output follows the input at its own place: in every channel the two correlate.",
    fields=(),
)
def try_own_input(subject: Subject) -> Iterator[str]:
    """Correlate the output of independent inputs with them, channel by channel."""
    for dims in subject.card.dims:
        specimen = subject.specimen(_SHAPES[dims], is_generic=False, is_plain=True)
        x = draw(specimen.shape, "own_input")
        axis = channel_axis(dims)
        rows = [t.movedim(axis, 0).flatten(1) for t in (x, specimen(x))]
        a, b = (row - row.mean(1, keepdim=True) for row in rows)
        correlations = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
        if not bool((correlations > _MIN_CORRELATION).all()):  # NaN where nothing varies
            worst = int(correlations.nan_to_num(-1.0).argmin())
            yield (
                f"on shape {tell(specimen.shape)} the output of channel {worst} does not follow "
                f"its own input: they correlate by {float(correlations[worst]):.2f}"
            )
