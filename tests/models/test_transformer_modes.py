"""The Transformer in other precisions, compiled, under vmap and on the meta device."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap
from transformer_cases import NUM_CLASSES, PLACEMENT_NAMES, VOCABULARY_SIZE, build, draw_tokens, pad

from normexp.models import PLACEMENTS

TEXTS = [[3, 4, 5, 6, 7], [8, 2], [5, 5, 1, 9], [4]]
WITH_QK = {"roles": {"qk": {"name": "layer_norm"}}, "positions": "rotary"}


@pytest.mark.parametrize("options", [{}, WITH_QK], ids=["learned", "rotary and qk"])
@pytest.mark.parametrize("placement", PLACEMENT_NAMES)
def test_autocast_keeps_sums_in_float32_at_every_placement(placement, options):
    # Branches are in bfloat16; what they add up to is not, in any arm.
    has_norm = PLACEMENTS[placement].has_norm_layers
    model = build(
        "layer_norm" if has_norm else "no_norm",
        placement,
        dtype=torch.float32,
        **(options if has_norm else {}),
    )
    dtypes = []
    for block in model.blocks:
        for residual in (block.attention, block.mlp):
            residual.register_forward_hook(lambda *call: dtypes.append(call[2].dtype))
            residual.branch.register_forward_hook(lambda *call: dtypes.append(call[2].dtype))
    tokens = draw_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
    assert dtypes == [torch.bfloat16, torch.float32] * 4
    logits.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    # bfloat16 has 8 bits of precision, logits are of size 1 to 4.
    torch.testing.assert_close(logits.float(), model(tokens), rtol=0, atol=0.12)


@pytest.mark.parametrize(
    ("is_causal", "norm", "options"),
    [(True, "layer_norm", WITH_QK), (False, "batch_norm", {})],
    ids=["causal", "padded"],
)
def test_compiles_to_one_graph(is_causal, norm, options):
    model = build(norm, "pre", is_causal=is_causal, dtype=torch.float32, **options)
    tokens = draw_tokens() if is_causal else pad(TEXTS, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = model(tokens)
    torch.testing.assert_close(compiled(tokens), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "padded"])
@pytest.mark.parametrize("placement", ["pre", "deepnorm", "layer_scale"])
def test_stacked_replicas_are_what_each_is_alone(placement, is_causal):
    models = [build(placement=placement, is_causal=is_causal, seed=seed) for seed in range(3)]
    parameters, buffers = stack_module_state(models)
    tokens = torch.stack([draw_tokens(seed=n) if is_causal else pad(TEXTS, 8) for n in range(3)])

    def compute_loss(parameters, buffers, tokens):
        return functional_call(models[0], (parameters, buffers), (tokens,)).square().mean()

    with warnings.catch_warnings():
        # On the CPU torch runs attention one replica after the other, and says so.
        warnings.filterwarnings("ignore", "There is a performance drop")
        gradients = vmap(grad(compute_loss))(parameters, buffers, tokens)
    for number, model in enumerate(models):
        model(tokens[number]).square().mean().backward()
        for name, parameter in model.named_parameters():
            found = gradients[name][number]
            torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "padded"])
def test_has_shapes_without_numbers(is_causal):
    with torch.device("meta"):
        model = build(is_causal=is_causal, positions="rotary")
        logits = model(torch.ones(4, 8, dtype=torch.int64))
    assert logits.is_meta
    assert logits.shape == ((4, 8, VOCABULARY_SIZE) if is_causal else (4, NUM_CLASSES))
