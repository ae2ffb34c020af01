"""Buffers, and whether training and evaluation are the same function."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from normexp.contract._checks import DoesNotApply, contract_check
from normexp.contract._subject import DISTINCT, Subject, draw, max_difference, tell


@contract_check(
    "After some training on other data, training and evaluation agree exactly if the card says so.",
    fields=("is_same_in_eval",),
)
def try_is_same_in_eval(subject: Subject) -> Iterator[str]:
    """Compare the two modes on one input."""
    declared = subject.card.is_same_in_eval
    for specimen in subject.specimens():
        x, state = draw(specimen.shape, "eval"), specimen.stir()
        change = max_difference(
            specimen(x, training=True, state=state), specimen(x, training=False, state=state)
        )
        if declared and change > 1e-9:
            yield (
                f"is_same_in_eval=True is declared, but on an input {tell(specimen.shape)} "
                f"evaluation differs from training by {change:.2g}"
            )
        if not declared and change < 1e-3:
            yield (
                f"is_same_in_eval=False is declared, but on an input {tell(specimen.shape)} "
                f"evaluation differs from training by {change:.2g} only"
            )


@contract_check(
    "The buffers are the declared ones, change in training where evaluation needs them, and a "
    "state dict carries them.",
    fields=("state",),
)
def try_state(subject: Subject) -> Iterator[str]:
    """Compare names, train a little, save and load."""
    card = subject.card
    for specimen in subject.specimens():
        found = tuple(specimen.state)
        if set(found) != set(card.state):
            yield (
                f"state={', '.join(card.state) or 'none'} is declared; the buffers are "
                f"{', '.join(found) or 'none'}"
            )
        trained = specimen.stir()
        changed = [key for key in found if not torch.equal(trained[key], specimen.state[key])]
        if not card.is_same_in_eval and not changed:
            yield (
                "state: evaluation differs from training, but no buffer changes in training "
                f"(buffers: {', '.join(found) or 'none'})"
            )
        module, twin = specimen.module, subject.specimen(specimen.shape).module
        values = {**specimen.parameters, **trained}
        missing = set(values) - set(module.state_dict())
        if missing:
            yield f"state: {', '.join(sorted(missing))} is not in the state dict"
            continue
        module.load_state_dict(values, strict=True)
        twin.load_state_dict(module.state_dict(), strict=True)
        x = draw(specimen.shape, "state")
        given = (x, specimen.condition(x)) if card.takes_condition else (x,)
        if not torch.equal(module.eval()(*given), twin.eval()(*given)):
            yield "state: a layer loaded from another's state dict evaluates differently"


@contract_check("Evaluation changes no buffer and does not look at batch mates.", fields=("state",))
def try_evaluation_is_pure(subject: Subject) -> Iterator[str]:
    """Evaluate a batch and its first sample alone."""
    for specimen in subject.specimens():
        before = specimen.stir()
        x = 3.0 + 2.0 * draw(specimen.shape, "pure")
        y, after = specimen.run(x, training=False, state=before)
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        if changed:
            yield (
                f"state: evaluation changes {', '.join(changed)}; only training may (looking at a "
                "model would change it)"
            )
        alone = (
            specimen(x[:1], training=False, state=before, condition=specimen.condition(x)[:1])
            if subject.card.takes_condition
            else specimen(x[:1], training=False, state=before)
        )
        difference = max_difference(y[:1], alone)
        if difference > 1e-9:
            yield (
                f"state: in evaluation the first sample of {tell(specimen.shape)} alone comes out "
                f"{difference:.2g} different from when it stands among others"
            )


@contract_check(
    "An option momentum is the weight of the new batch in what a forward pass moves, as in torch."
)
def try_momentum(subject: Subject) -> Iterator[str]:
    """Compare the moves under two momenta, 1 : 4, past every warm-up.

    Both are small, so that several moves in one pass, as by chunks of the batch, add up.
    """
    if "momentum" not in subject.option_names:
        raise DoesNotApply("there is no option momentum")
    is_moving = False
    for dims in subject.card.dims:
        shape = DISTINCT[dims]
        layers = [subject.specimen(shape, momentum=momentum) for momentum in (1e-4, 4e-4)]
        state, x = layers[0].age(), draw(shape, "momentum")
        after = [layer.run(x, state=state)[1] for layer in layers]
        for key in (key for key, value in state.items() if value.is_floating_point()):
            near, far = (moved[key] - state[key] for moved in after)
            if not bool(near.any()) and not bool(far.any()):
                continue
            is_moving = True
            if max_difference(4.0 * near, far) > 0.01 * float(far.abs().max()):
                times = float((near * far).sum() / near.square().sum())
                yield (
                    f"a momentum 4 times as large moves {key} {times:.3g} times as far on shape "
                    f"{tell(shape)}; momentum is the weight of the new batch"
                )
    if not is_moving:
        raise DoesNotApply("no buffer moves in a forward pass")


@contract_check("A copy of the layer works alone, and on the meta device shapes come out.")
def try_copies(subject: Subject) -> Iterator[str]:
    """Copy the layer deeply; move a copy to the meta device."""
    for specimen in subject.specimens():
        x = draw(specimen.shape, "copies")
        given = (x, specimen.condition(x)) if subject.card.takes_condition else (x,)
        module = specimen.module.train()
        twin = copy.deepcopy(module)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        first = twin(*given)
        if any(not torch.equal(before[k], v) for k, v in module.state_dict().items()):
            yield "a call of a deep copy changes the buffers of the original"
        if not torch.equal(first, module(*given)):
            yield f"a deep copy gives another output on an input {tell(specimen.shape)}"
        ghost = copy.deepcopy(specimen.module).to("meta")
        y = ghost(*(tensor.to("meta") for tensor in given))
        if y.device.type != "meta" or tuple(y.shape) != specimen.shape:
            yield f"on the meta device an input {tell(specimen.shape)} came out as {tell(y.shape)}"
