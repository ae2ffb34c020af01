"""How the Transformer starts: sizes of its weights, pairing, loss, and gradients by depth."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformer_cases import CROSS, PLACEMENT_NAMES, build, draw_tokens

from normexp.data import load_dataset
from normexp.models import PLACEMENTS, build_model, initialize, parameter_roles
from normexp.norms import NORMS, NormFactory

WIDTH, DEPTH = 256, 3
LINEAR = [
    f"blocks.{block}.{part}"
    for block in range(2)
    for part in (
        *(f"attention.branch.{name}" for name in ("query", "key", "value", "out")),
        *(f"mlp.branch.{name}" for name in ("up", "down")),
    )
]


def norm_of(placement):
    return "layer_norm" if PLACEMENTS[placement].has_norm_layers else "no_norm"


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        *((placement, {}) for placement in PLACEMENT_NAMES),
        ("pre", {"scale_residual_init": True}),
        ("post", {"scale_residual_init": True}),
    ],
)
def test_every_weight_has_the_size_that_its_placement_gives(placement, options):
    sizes = {"width": WIDTH, "depth": DEPTH, "mlp_ratio": 4, "length": 300, **options}
    model = build(norm_of(placement), placement, **sizes)
    # Xavier normal: variance 2 / (inputs + outputs). DeepNet, figure 2: beta of an encoder or
    # decoder alone, on feed-forward, value and output. GPT-2: 1 / sqrt(residual layers).
    square, ratio4 = math.sqrt(1 / WIDTH), math.sqrt(2 / (5 * WIDTH))
    beta = (8 * DEPTH) ** -0.25 if placement == "deepnorm" else 1.0
    end = (2 * DEPTH) ** -0.5 if options else 1.0
    expected = {
        "query": square,
        "key": square,
        "value": square * beta,
        "out": square * beta * end,
        "up": ratio4 * beta,
        "down": ratio4 * beta * end,
        "head": square,
        "position_embedding": 0.02,
        # Times sqrt(width) it has variance 1.
        "token_embedding": square,
    }
    seen = set()
    for name, role in parameter_roles(model).items():
        parameter = model.get_parameter(name)
        if role == "bias":
            assert not parameter.any()
        if role != "weight":
            continue
        kind = name.split(".")[-2]
        seen.add(kind)
        # Five standard errors of a standard deviation.
        tolerance = 5 / math.sqrt(2 * parameter.numel())
        assert parameter.std().item() == pytest.approx(expected[kind], rel=tolerance), name
    assert seen == set(expected)


def raw_weights(model):
    """Return the weights that are drawn, by the plain name of their layer."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            weights = getattr(module, "parametrizations", None)
            if weights is None:
                found[path] = module.weight
                continue
            # torch's own weight norm keeps a size beside a direction.
            by_size = dict(weights.weight.named_parameters()).get("original1")
            found[path] = module.weight if by_size is not None else weights.weight.original
    return found


@pytest.mark.parametrize("norm", sorted({norm for norm, _ in CROSS}))
def test_arms_of_a_seed_share_every_weight(norm):
    reference = raw_weights(build("layer_norm", "pre", dtype=torch.float32))
    assert set(LINEAR) < set(reference)
    for placement in [placement for name, placement in CROSS if name == norm]:
        found = raw_weights(build(norm, placement, dtype=torch.float32))
        assert found.keys() == reference.keys()
        for path, weight in found.items():
            expected = reference[path]
            if placement == "deepnorm" and path.rpartition(".")[2] in (
                "value",
                "out",
                "up",
                "down",
            ):
                expected = expected * 16**-0.25
            # A size and a direction multiply to the weight but for rounding.
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)


def test_another_seed_has_other_weights():
    one, other = (raw_weights(build(seed=seed)) for seed in (0, 1))
    assert not any(torch.equal(one[path], other[path]) for path in one)


@pytest.mark.parametrize("placement", PLACEMENT_NAMES)
def test_every_parameter_has_its_role(placement):
    norm = norm_of(placement)
    has_norm = norm != "no_norm"
    roles = parameter_roles(
        build(norm, placement, roles={"qk": {"name": "rms_norm"}} if has_norm else {})
    )
    for name, role in roles.items():
        owner, kind = name.split(".")[-2:]
        if owner.startswith("norm_") or owner.endswith("_norm"):
            assert role == "norm", name
        elif owner == "gain":
            assert role == "skip", name
        else:
            assert role == {"weight": "weight", "bias": "bias"}[kind], name
    found = set(roles.values())
    has_gain = placement in ("rezero", "rezero_pre", "layer_scale")
    assert found == {"weight", "bias"} | ({"norm"} if has_norm else set()) | (
        {"skip"} if has_gain else set()
    )


@pytest.mark.parametrize(
    ("norm", "placement"), [pair for pair in CROSS if NORMS.get(pair[0]).card.weight is not None]
)
def test_a_norm_of_weights_is_on_every_linear_layer_of_the_blocks(norm, placement):
    model = build(norm, placement)
    roles = {
        path: module.weight_norm_record.role
        for path, module in model.named_modules()
        if hasattr(module, "weight_norm_record")
    }
    assert roles == {path: path.split(".")[2] for path in LINEAR}


def test_a_norm_of_weights_may_be_on_one_branch_alone():
    model = build(roles={"mlp": {"name": "weight_norm"}}, placement="pre")
    paths = [p for p, module in model.named_modules() if hasattr(module, "weight_norm_record")]
    assert paths == [path for path in LINEAR if ".mlp." in path]


@pytest.mark.parametrize("placement", sorted(set(PLACEMENT_NAMES) - {"none"}))
def test_a_language_model_starts_near_the_loss_of_a_guess(placement):
    # Features of variance 1 and a head of variance 1/width give logits of variance 1, with which
    # the mean of ln(sum(exp(logits))) is ln(v) + 1/2. Without any norm the sums grow.
    torch.manual_seed(0)
    model = build(norm_of(placement), placement, width=128, depth=4, num_heads=4, length=32)
    model.head = nn.Linear(128, 100, bias=False).double()
    nn.init.normal_(model.head.weight, std=128**-0.5)
    targets = torch.randint(100, (32, 32))
    loss = F.cross_entropy(model(draw_tokens(32, 32)).flatten(0, 1), targets.flatten()).item()
    assert loss == pytest.approx(math.log(100) + 0.5, abs=0.15)


# How the last gradient depends on the depth: Xiong et al., ICML 2020, theorem 1. It is of the
# loss of one position; in the mean over positions it is larger the more alike these are.
DEPTHS = (2, 4, 8, 16)


def measure_gradients(placement, depth, activation, seed, data):
    """Return gradient norms of the last feed-forward weight: of the mean loss, and of one position.

    The gradient of a position's loss is the outer product of what goes into the layer and of the
    gradient at its output. Also the size of the last sum.
    """
    model = build_model(
        "transformer",
        {"depth": depth, "width": 64, "activation": activation},
        input_shape=data.input_shape,
        num_classes=data.num_classes,
        norm=NormFactory("layer_norm"),
        placement=placement,
        tokens=data.tokens,
    )
    initialize(model, seed)
    kept = {}
    model.get_submodule(model.last_branch_weight.removesuffix(".weight")).register_forward_hook(
        lambda module, inputs, output: kept.update(into=inputs[0].detach(), out=output)
    )
    model.blocks[-1].register_forward_hook(lambda *call: kept.update(sum=call[2].detach()))
    rows = slice(16 * seed, 16 * seed + 16)
    inputs, targets = data.train.inputs[rows], data.train.targets[rows]
    losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    weight = model.get_parameter(model.last_branch_weight)
    whole, out = torch.autograd.grad(losses, (weight, kept["out"]))
    single = (kept["into"].norm(dim=-1) * out.norm(dim=-1)).mean()
    size = kept["sum"].square().mean().sqrt()
    return torch.stack([whole.norm() / targets.numel(), single, size])


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_last_gradient_is_flat_over_depth_for_post_and_falls_for_pre(activation):
    data = load_dataset("python_docs", {"context_length": 64})
    whole, single, size = {}, {}, {}
    for placement in ("post", "pre"):
        rows = [
            sum(measure_gradients(placement, depth, activation, seed, data) for seed in range(8))
            / 8
            for depth in DEPTHS
        ]
        whole[placement], single[placement], size[placement] = torch.stack(rows).unbind(1)
    # post: a position's gradient does not know the depth. The mean over positions grows a little,
    # since they become alike, which attention makes of them.
    assert single["post"].max() < 1.1 * single["post"].min()
    assert whole["post"].max() < 1.45 * whole["post"].min()
    # pre: it falls at every doubling, as the last norm divides it by a sum that grows.
    for gradients in (whole["pre"], single["pre"]):
        assert (gradients[1:] < gradients[:-1]).all()
    assert whole["pre"][-1] < 0.6 * whole["pre"][0]
    assert single["pre"][-1] < 0.5 * single["pre"][0]
    undivided = single["pre"] * size["pre"]
    assert undivided.max() < 1.1 * undivided.min()
