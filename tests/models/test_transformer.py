"""The Transformer against its formulas by hand, and against torch's own layer."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformer_cases import (
    PLACEMENT_NAMES,
    VOCABULARY_SIZE,
    attend_by_hand,
    build,
    draw_tokens,
    normalize_by_hand,
    pad,
    stir,
)

from normexp.data import PAD_ID
from normexp.errors import UserError
from normexp.models import PLACEMENTS, build_model, parameter_roles
from normexp.models.transformer import Rotary
from normexp.norms import NormFactory, describe_norm_layers

ALPHA = (2 * 2) ** 0.25  # deepnorm's, of 2 blocks
FORMULAS = {
    "pre": lambda r, x, f, norm: x + f(norm(r.norm_before, x)),
    "post": lambda r, x, f, norm: norm(r.norm_sum, x + f(x)),
    "res_post": lambda r, x, f, norm: x + norm(r.norm_after, f(x)),
    "sandwich": lambda r, x, f, norm: x + norm(r.norm_after, f(norm(r.norm_before, x))),
    "deepnorm": lambda r, x, f, norm: norm(r.norm_sum, ALPHA * x + f(x)),
    "rezero": lambda r, x, f, norm: x + r.gain.weight * f(x),
    "rezero_pre": lambda r, x, f, norm: x + r.gain.weight * f(norm(r.norm_before, x)),
    "layer_scale": lambda r, x, f, norm: x + r.gain.weight * f(norm(r.norm_before, x)),
    "none": lambda r, x, f, norm: x + f(x),
}
# Where the last sum is not normalized and norms stand at all.
WITH_FINAL_NORM = {"pre", "res_post", "sandwich", "rezero_pre", "layer_scale"}
# What a picture shows of a formula.
PARTS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "* a -": "a * f",
    "* a_c -": "a_c * f",
    "* alpha -": "alpha * x",
}
TEXTS = [[3, 4, 5, 6, 7], [8, 2], [5, 5, 1, 9], [4]]
ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
}


def norm_of(placement):
    return "layer_norm" if PLACEMENTS[placement].has_norm_layers else "no_norm"


def compute_by_hand(model, tokens, placement, activation):
    """Return the logits of a model with learned positions, as the papers write them."""
    length, width = tokens.shape[1], model.token_embedding.weight.shape[1]
    valid = tokens != PAD_ID
    sees = valid[:, None, :].expand(-1, length, -1)
    if model.is_causal:
        sees = sees & torch.ones(length, length, dtype=torch.bool).tril()
    x = math.sqrt(width) * model.token_embedding.weight[tokens]
    x = x + model.position_embedding.weight[:length]
    for block in model.blocks:
        attention, mlp = block.attention.branch, block.mlp.branch

        def attend(x, attention=attention):
            return attend_by_hand(attention, x, sees)

        def feed(x, mlp=mlp):
            hidden = ACTIVATIONS[activation](x @ mlp.up.weight.T + mlp.up.bias)
            return hidden @ mlp.down.weight.T + mlp.down.bias

        for residual, branch in ((block.attention, attend), (block.mlp, feed)):
            x = FORMULAS[placement](residual, x, branch, normalize_by_hand)
    if placement in WITH_FINAL_NORM:
        x = normalize_by_hand(model.final_norm, x)
    if not model.is_causal:
        x = torch.stack([row[ok].mean(0) for row, ok in zip(x, valid, strict=True)])
    return x @ model.head.weight.T + (0.0 if model.is_causal else model.head.bias)


def test_every_placement_is_drawn_and_has_a_formula():
    known = {name for name, placement in PLACEMENTS.items() if placement.sequences is not None}
    assert known == set(FORMULAS) == set(PLACEMENT_NAMES)
    for name in known:
        placement = PLACEMENTS[name]
        picture, formula = placement.sequences.picture, placement.sequences.formula
        assert "(+)" in picture
        for part, term in PARTS.items():
            assert (part in picture) == (term in formula), part
        assert ("role final" in picture) == (name in WITH_FINAL_NORM)
        assert placement.has_norm_layers == ("norm" in formula)
        # The general formula is the drawing's, but for the number of a norm.
        assert formula.replace("norm1", "norm").replace("norm2", "norm") == placement.formula


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "padded"])
@pytest.mark.parametrize("placement", PLACEMENT_NAMES)
def test_every_placement_is_its_formula(placement, is_causal, activation):
    model = stir(build(norm_of(placement), placement, is_causal=is_causal, activation=activation))
    tokens = draw_tokens() if is_causal else pad(TEXTS, 8)
    expected = compute_by_hand(model, tokens, placement, activation)
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-12)
    assert (model.final_norm is not None) == (placement in WITH_FINAL_NORM)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "padded"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_block_is_torchs_encoder_layer(placement, is_causal, activation):
    model = stir(build(placement=placement, is_causal=is_causal, activation=activation))
    block, attention, mlp = (
        model.blocks[0],
        *(getattr(model.blocks[0], part).branch for part in ("attention", "mlp")),
    )
    theirs = nn.TransformerEncoderLayer(
        8,
        2,
        16,
        dropout=0.0,
        activation=activation,
        norm_first=placement == "pre",
        batch_first=True,
        dtype=torch.float64,
    )
    inputs = [attention.query, attention.key, attention.value]
    where = "norm_before" if placement == "pre" else "norm_sum"
    with torch.no_grad():
        for kind in ("weight", "bias"):
            joined = torch.cat([getattr(layer, kind) for layer in inputs])
            getattr(theirs.self_attn, f"in_proj_{kind}").copy_(joined)
            for layer, other in (
                (theirs.self_attn.out_proj, attention.out),
                (theirs.linear1, mlp.up),
                (theirs.linear2, mlp.down),
                (theirs.norm1, getattr(block.attention, where)),
                (theirs.norm2, getattr(block.mlp, where)),
            ):
                getattr(layer, kind).copy_(getattr(other, kind))
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 8, 8)))
    if is_causal:
        hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
        expected = theirs(x, src_mask=hidden, is_causal=True)
        torch.testing.assert_close(block(x, None), expected, rtol=0, atol=1e-12)
        return
    mask = pad(TEXTS, 8) != PAD_ID
    expected = theirs(x, src_key_padding_mask=~mask)
    torch.testing.assert_close(block(x, mask)[mask], expected[mask], rtol=0, atol=1e-12)


@pytest.fixture
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("width", [2, 6, 16])
def test_rotary_turns_complex_numbers(width):
    # RoFormer, equation 12 with the pair (i, i + e/2): z_i exp(1j * position * base^(-2i/e)).
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 50, width)))
    z = torch.complex(x[..., : width // 2], x[..., width // 2 :])
    angles = [[t * 10000.0 ** (-2 * i / width) for i in range(width // 2)] for t in range(50)]
    turned = z * torch.exp(1j * torch.tensor(angles))
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(Rotary(width, 60)(x), expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_double")
def test_rotary_products_depend_on_the_distance_alone():
    rotary, rng = Rotary(8, 100), np.random.default_rng(0)
    query, key = (torch.from_numpy(rng.normal(size=8)).expand(1, 1, 100, 8) for _ in range(2))
    products = (rotary(query) @ rotary(key).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 7, 60):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    # Other distances do give other products.
    assert products[:, 0].unique().numel() == 100


def test_rotary_attention_does_not_know_where_a_text_starts():
    # Behind a padding of any length in front, the encoder's answer to a text is the same: every
    # pair of valid positions is as far apart as before. Learned positions do tell.
    answers = {}
    for positions in ("rotary", "learned"):
        model = build(is_causal=False, positions=positions, length=20)
        text = draw_tokens(1, 6)
        early = F.pad(text, (0, 14), value=PAD_ID)
        late = F.pad(text, (9, 5), value=PAD_ID)
        answers[positions] = (model(early) - model(late)).abs().max().item()
    # The table of angles is in float32.
    assert answers["rotary"] < 1e-6
    assert answers["learned"] > 1e-3


def test_rotary_has_no_parameters_and_no_place_in_the_state():
    model = build(positions="rotary")
    assert model.position_embedding is None
    assert not [name for name in model.state_dict() if "rotary" in name or "position" in name]


def test_an_encoder_without_positions_that_tell_takes_the_mean():
    # Equal tokens, rotary: all positions are the same, so the mean is each of them.
    model = build(is_causal=False, positions="rotary")
    tokens = torch.full((1, 8), 5)
    torch.testing.assert_close(model(tokens), model(tokens[:, :1]), rtol=0, atol=1e-12)


def test_tied_embeddings_are_one_parameter_with_both_gradients():
    tied, free = build(tie_embeddings=True), build()
    names = set(dict(tied.named_parameters()))
    assert names == set(dict(free.named_parameters())) - {"head.weight"}
    num_tied, num_free = (sum(p.numel() for p in m.parameters()) for m in (tied, free))
    assert num_free - num_tied == 8 * VOCABULARY_SIZE
    assert parameter_roles(tied)["token_embedding.weight"] == "weight"

    with torch.no_grad():
        free.head.weight.copy_(free.token_embedding.weight)
    tokens = draw_tokens()
    for model in (tied, free):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    assert torch.equal(tied(tokens), free(tokens))
    expected = free.token_embedding.weight.grad + free.head.weight.grad
    assert free.head.weight.grad.abs().max() > 1e-3
    torch.testing.assert_close(tied.token_embedding.weight.grad, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_norm_of_queries_and_keys_acts_per_head_then_they_are_turned(positions):
    model = stir(build(positions=positions, roles={"qk": {"name": "layer_norm"}}))
    attention = model.blocks[0].attention.branch
    assert attention.query_norm.normalized_shape == attention.key_norm.normalized_shape == (4,)
    seen = {}
    hook = nn.functional.scaled_dot_product_attention

    def note(query, key, value, **options):
        seen.update(query=query, key=key, value=value)
        return hook(query, key, value, **options)

    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 8, 8)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", note)
        attention(x, None)
    for name in ("query", "key", "value"):
        layer, norm = getattr(attention, name), getattr(attention, f"{name}_norm", None)
        wide = x @ layer.weight.T + layer.bias
        for head in (0, 1):
            part = wide[:, :, 4 * head : 4 * head + 4]
            if norm is not None:
                part = normalize_by_hand(norm, part)
                if attention.rotary is not None:
                    part = attention.rotary(part[:, None])[:, 0]
            torch.testing.assert_close(seen[name][:, head], part, rtol=0, atol=1e-12)


def test_queries_and_keys_have_a_norm_only_if_its_role_is_chosen():
    def paths(model):
        layers = describe_norm_layers(model, (8,), 2)
        return {layer.path for layer in layers if layer.role == "qk"}

    assert paths(build()) == set()
    chosen = build(roles={"qk": {"name": "rms_norm"}})
    prefix = "blocks.{}.attention.branch.{}_norm"
    assert paths(chosen) == {prefix.format(n, kind) for n in (0, 1) for kind in ("query", "key")}
    # Beside placements without other norms too, where their output is what the model has.
    assert len(paths(build("no_norm", "pre", roles={"qk": {"name": "scale_norm"}}))) == 4


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        ("model.params.depth", {"depth": 0}, "1 or more"),
        ("model.params.width", {"width": 0}, "1 or more"),
        ("model.params.num_heads", {"num_heads": 0}, "1 or more"),
        ("model.params.num_heads", {"num_heads": 3}, "a divisor of the width 8"),
        ("model.params.mlp_ratio", {"mlp_ratio": 0}, "1 or more"),
        ("model.params.mlp_ratio", {"mlp_ratio": 1.5}, ""),
        ("model.params.activation", {"activation": "tanh"}, "gelu"),
        ("model.params.positions", {"positions": "none"}, "rotary"),
        (
            "model.params.positions",
            {"positions": "rotary", "num_heads": 8},
            "pairs of features are rotated, and a head has 1",
        ),
        (
            "model.params.tie_embeddings",
            {"tie_embeddings": True, "is_causal": False},
            "only a language model",
        ),
        (
            "model.params.scale_residual_init",
            {"scale_residual_init": True, "placement": "deepnorm"},
            "initial sizes of its own",
        ),
        (
            "model.params.layer_scale_init",
            {"layer_scale_init": 0.5},
            "placement layer_scale is needed, not pre",
        ),
        ("placement", {"placement": "skip_init", "norm": "no_norm"}, "pre"),
        ("placement", {"placement": "fixup", "norm": "no_norm"}, "pre"),
        ("placement", {"placement": None}, "pre"),
        ("placement", {"placement": "deepnorm", "norm": "weight_norm"}, "no weight_norm"),
        ("placement", {"placement": "rezero", "norm": "rms_norm"}, "no_norm"),
        ("norm", {"norm": "adaptive_layer_norm"}, "condition"),
        ("norm", {"norm": "evo_norm_b0"}, "an activation right behind it"),
        ("norm.roles.qk", {"roles": {"qk": {"name": "evo_norm_b0"}}}, "a gain and a shift alone"),
        ("norm.roles.block", {"roles": {"block": {"name": "rms_norm"}}}, "attention, final, mlp"),
        (
            "norm.roles.final",
            {"roles": {"final": {"name": "rms_norm"}}, "placement": "post"},
            "its roles are attention, mlp",
        ),
        (
            "norm.roles.qk.params.num_groups",
            {"roles": {"qk": {"name": "group_norm", "params": {"num_groups": 3}}}},
            "",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(key, change, reason):
    pattern = rf"^{re.escape(key)}=[^\n]*{re.escape(reason)}[^\n]*$"
    with pytest.raises(UserError, match=pattern):
        build(**change)


def test_a_transformer_needs_texts_and_other_models_need_none():
    chosen = {"num_classes": 3, "norm": NormFactory("layer_norm")}
    with pytest.raises(UserError, match=r"^model=transformer: takes texts[^\n]+$"):
        build_model("transformer", {}, input_shape=(1, 8, 8), placement="pre", **chosen)


def test_a_text_longer_than_the_model_is_no_silent_broadcast():
    for length in (1, 8):
        for positions in ("learned", "rotary"):
            model = build(length=length, positions=positions)
            model(draw_tokens(2, length))
            with pytest.raises(ValueError, match=rf"{length + 1} positions.*{length}"):
                model(draw_tokens(2, length + 1))


@given(
    placement=st.sampled_from(PLACEMENT_NAMES),
    depth=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    size=st.integers(1, 3),
    mlp_ratio=st.integers(1, 4),
    has_bias=st.booleans(),
    is_causal=st.booleans(),
)
def test_parameters_are_as_many_as_counted_by_hand(
    placement, depth, num_heads, size, mlp_ratio, has_bias, is_causal
):
    width = num_heads * size
    model = build(
        norm_of(placement),
        placement,
        is_causal=is_causal,
        depth=depth,
        num_heads=num_heads,
        width=width,
        mlp_ratio=mlp_ratio,
        bias=has_bias,
        length=5,
    )
    block = 4 * width**2 + 2 * mlp_ratio * width**2
    block += has_bias * (4 * width + mlp_ratio * width + width)
    norms = {"sandwich": 4, "rezero": 0, "none": 0}.get(placement, 2)
    gains = {"rezero": 2, "rezero_pre": 2, "layer_scale": 2 * width}.get(placement, 0)
    ends = (VOCABULARY_SIZE + 5) * width + (placement in WITH_FINAL_NORM) * 2 * width
    ends += VOCABULARY_SIZE * width if is_causal else 3 * width + 3
    expected = depth * (block + norms * 2 * width + gains) + ends
    assert sum(p.numel() for p in model.parameters()) == expected


def test_a_copy_and_a_state_carry_everything():
    model = stir(build("batch_norm", "post", is_causal=False))
    model(draw_tokens())  # moves the running statistics
    tokens = pad(TEXTS, 8)
    state = copy.deepcopy(model.state_dict())
    other, twin = build("batch_norm", "post", is_causal=False, seed=1), copy.deepcopy(model)
    assert not torch.equal(other.eval()(tokens), model.eval()(tokens))
    other.load_state_dict(state)
    for one in (other, twin.eval()):
        assert torch.equal(one(tokens), model(tokens))
    assert torch.equal(twin.train()(tokens), model.train()(tokens))


@pytest.mark.parametrize("placement", PLACEMENT_NAMES)
def test_training_and_evaluation_are_the_same_function(placement):
    # No dropout, no statistics of a batch: nothing may differ.
    model = build(norm_of(placement), placement)
    assert torch.equal(model.train()(draw_tokens()), model.eval()(draw_tokens()))
