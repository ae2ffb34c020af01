"""What every norm of weights must stand, and every field of its weight card."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from normexp.errors import UserError
from normexp.norms import NORMS, NormFactory, NormRecord

NAMES = [entry.name for entry in NORMS if entry.card.weight is not None]
LAYERS = {
    "linear": lambda: nn.Linear(6, 4),
    "conv1d": lambda: nn.Conv1d(3, 4, 3),
    "conv2d": lambda: nn.Conv2d(3, 4, 3, bias=False),
}
INPUTS = {"linear": (5, 6), "conv1d": (5, 3, 7), "conv2d": (5, 3, 4, 6)}
KINDS = [(name, kind) for name in NAMES for kind in LAYERS]


def build(name, kind, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    layer = LAYERS[kind]().to(dtype)
    NormFactory(name).parametrize(layer, role="block")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape).mul(0.5).add(0.8))
    return layer


def inputs(kind, dtype=torch.float64):
    return torch.randn(INPUTS[kind], generator=torch.Generator().manual_seed(9)).to(dtype)


def parameters(layer):
    return {name: p.detach().clone() for name, p in layer.named_parameters()}


def raw_name(name, layer):
    """Return the name of the raw weight: what of the parametrization the card does not name."""
    beside = NORMS.get(name).card.weight.parameters
    keys = [key for key, _ in layer.parametrizations.named_parameters()]
    found = [key for key in keys if key.split(".")[-1] not in beside]
    assert len(found) == 1
    return f"parametrizations.{found[0]}"


def effective(layer, values):
    """Return the effective weight with other parameters."""
    other = copy.deepcopy(layer)
    other.load_state_dict(values)
    return other.weight.detach()


def test_there_are_three():
    assert NAMES == ["scaled_weight_standardization", "weight_norm", "weight_standardization"]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_the_card_says_what_happens_to_the_weight(name, kind):
    card, layer = NORMS.get(name).card.weight, build(name, kind)
    values, key = parameters(layer), raw_name(name, layer)
    weight = layer.weight.detach()
    mean = weight.flatten(1).mean(1).abs().max().item()
    shifted = effective(layer, values | {key: values[key] + 3.0})
    assert (mean < 1e-12) == card.is_centring
    assert torch.allclose(shifted, weight, rtol=0, atol=1e-4) == card.is_centring
    scaled = effective(layer, values | {key: values[key] * 8.0})
    # An eps beside the deviation of about 0.5 shows at 1e-5.
    assert torch.allclose(scaled, weight, rtol=1e-4, atol=0) == card.is_scale_invariant
    # The rest of the parameters: one number an output each.
    rest = {k.split(".")[-1]: p for k, p in layer.named_parameters() if k != key and k != "bias"}
    assert set(rest) == set(card.parameters)
    assert all(p.numel() == len(weight) for p in rest.values())


@pytest.mark.parametrize("name", NAMES)
def test_divisor_and_eps_stand_where_the_card_says(name):
    card, known = NORMS.get(name).card.weight, NORMS.get(name).parameters()
    assert (card.eps_place is None) == ("weight_eps" not in known)
    if card.eps_place is None:
        return
    options = {"activation_gain": "none"} if "activation_gain" in known else {}
    raw = torch.tensor([[3.0, 1.0, -1.0, -3.0]], dtype=torch.float64)
    found = {}
    for eps in (1e-12, 100.0):
        layer = nn.Linear(4, 1).double()
        NormFactory(name, {"weight_eps": eps, **options}).parametrize(layer, role="block")
        layer.weight = raw
        found[eps] = (raw[0, 0] / layer.weight[0, 0]).item()
    sum_of_squares = 20.0
    exact = {None: sum_of_squares**0.5, "M-1": (sum_of_squares / 3) ** 0.5}[card.divisor]
    assert found[1e-12] == pytest.approx(exact, rel=1e-9)
    large = {"outside_sqrt": exact + 100.0, "clamp": 10.0}[card.eps_place]
    assert found[100.0] == pytest.approx(large, rel=1e-12)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_gradcheck(name, kind):
    layer = build(name, kind)
    names, values = zip(*parameters(layer).items(), strict=True)
    values = [value.requires_grad_() for value in values]
    x = inputs(kind)[:2]

    def run(*values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, values)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_vmap_over_stacked_parameters(name, kind):
    layers, x = [build(name, kind, seed) for seed in range(3)], inputs(kind)
    stacked = {
        key: torch.stack([parameters(layer)[key] for layer in layers])
        for key in parameters(layers[0])
    }

    def loss(values):
        return functional_call(layers[0], values, (x,)).square().sum()

    gradients = vmap(grad(loss))(stacked)
    for index, layer in enumerate(layers):
        layer(x).square().sum().backward()
        for key, parameter in layer.named_parameters():
            torch.testing.assert_close(gradients[key][index], parameter.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_deepcopy_state_dict_and_meta(name, kind):
    layer, other, x = build(name, kind), build(name, kind, seed=1), inputs(kind)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), layer(x))
    assert copied.weight_norm_record == layer.weight_norm_record
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert layer.weight.any()
    assert copy.deepcopy(layer).to("meta")(x.to("meta")).shape == layer(x).shape
    with torch.device("meta"):
        bare = NormFactory(name).parametrize(LAYERS[kind](), role="block")
    assert all(parameter.is_meta for parameter in bare.parameters())
    assert {k: v.shape for k, v in bare.state_dict().items()} == {
        k: v.shape for k, v in layer.state_dict().items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_an_assigned_weight_reaches_the_raw_one(name):
    layer = build(name, "linear")
    weight = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(4, 6)
    layer.weight = weight.clone()
    assert torch.equal(dict(layer.named_parameters())[raw_name(name, layer)], weight)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_compiles_whole(name, kind):
    layer, x = build(name, kind), inputs(kind)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_the_rounded_result(name):
    single = build(name, "conv2d", dtype=torch.float32)
    half = copy.deepcopy(single).bfloat16()
    single.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    assert half.weight.dtype == torch.bfloat16
    torch.testing.assert_close(half.weight.float(), single.weight, rtol=2**-8, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert single.weight.dtype == torch.float32
        assert single(inputs("conv2d", torch.float32)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_the_record_holds_every_option(name):
    factory = NormFactory(name, roles={"stem": {"name": "no_norm"}})
    layer = factory.parametrize(nn.Linear(3, 4), role="block")
    params = NORMS.get(name).complete_params({}, reserved=frozenset({"dims", "is_activated"}))
    assert layer.weight_norm_record == NormRecord(name, "block", params)
    plain = factory.parametrize(nn.Linear(3, 4), role="stem")
    assert not hasattr(plain, "weight_norm_record")
    assert not hasattr(plain, "parametrizations")


@pytest.mark.parametrize("name", NAMES)
def test_wrong_modules_are_refused(name):
    factory = NormFactory(name)
    with pytest.raises(ValueError, match="needs a linear layer or a convolution"):
        factory.parametrize(nn.ConvTranspose2d(3, 4, 3), role="block")
    layer = factory.parametrize(nn.Linear(3, 4), role="block")
    with pytest.raises(ValueError, match="parametrized already"):
        factory.parametrize(layer, role="block")


@pytest.mark.parametrize("name", ["weight_standardization", "scaled_weight_standardization"])
def test_a_single_product_has_no_deviation(name):
    line = re.escape(f"norm={name}: 2 or more products an output are needed, Linear(")
    with pytest.raises(UserError, match="^" + line):
        NormFactory(name).parametrize(nn.Linear(1, 4), role="block")
