"""cifar_resnet: parameter counts and map sizes by hand, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normexp.errors import UserError
from normexp.models import MODELS, PLACEMENTS, build_model
from normexp.norms import NormFactory, describe_norm_layers


def build(norm="batch_norm", placement="res_post", input_shape=(3, 32, 32), **params):
    norm = norm if isinstance(norm, NormFactory) else NormFactory(norm)
    return build_model(
        "cifar_resnet",
        params,
        input_shape=input_shape,
        num_classes=10,
        norm=norm,
        placement=placement,
    )


def count(model):
    return sum(p.numel() for p in model.parameters())


# ResNet-20, width 16: 3x3 convolutions of the stem and of three stages of 6.
RESNET20_CONVS = 9 * (3 * 16 + 6 * 16 * 16 + (16 + 5 * 32) * 32 + (32 + 5 * 64) * 64)
RESNET20_CLASSIFIER = 64 * 10 + 10
RESNET20_PROJECTIONS = 16 * 32 + 32 * 64


def test_resnet20_with_padding_has_the_papers_size():
    # Gains and shifts of the stem and 6 norms a stage; He et al. 2016, table 6: 0.27M.
    norms = 2 * (16 + 6 * 16 + 6 * 32 + 6 * 64)
    model = build(depth=20, shortcut="padding")
    assert count(model) == RESNET20_CONVS + norms + RESNET20_CLASSIFIER == 269_722


def test_resnet20_with_projections():
    norms = 2 * (16 + 6 * 16 + 7 * 32 + 7 * 64)
    expected = RESNET20_CONVS + RESNET20_PROJECTIONS + norms + RESNET20_CLASSIFIER
    assert count(build(depth=20)) == expected == 272_474


def test_resnet20_by_placement():
    common = RESNET20_CONVS + RESNET20_PROJECTIONS + RESNET20_CLASSIFIER
    # pre: norm1 has its block's input channels, then a final norm; the stem, conv2 and the
    # projections feed sums and have biases.
    norm1 = 3 * 16 + (16 + 2 * 32) + (32 + 2 * 64)
    norm2 = 3 * (16 + 32 + 64)
    biases = 16 + 3 * (16 + 32 + 64) + (32 + 64)
    assert count(build(depth=20, placement="pre")) == common + 2 * (norm1 + norm2 + 64) + biases
    # post: stem, norm1 and norm2, no bias anywhere, no norm on the projections.
    norms = 16 + 6 * (16 + 32 + 64)
    assert count(build(depth=20, placement="post")) == common + 2 * norms
    # none: a bias in every convolution.
    biases = 16 + 6 * (16 + 32 + 64) + (32 + 64)
    assert count(build("no_norm", depth=20, placement="none")) == common + biases


@pytest.mark.parametrize("placement", ["res_post", "pre", "post"])
def test_forward_is_stem_blocks_mean_and_classifier(placement):
    model = build("instance_norm", placement, input_shape=(1, 8, 8), num_stages=2).double()
    x = torch.linspace(-1, 1, 2 * 64, dtype=torch.float64).reshape(2, 1, 8, 8).sin()
    maps = model.stem.conv(x)
    if placement != "pre":
        maps = model.stem.norm(maps).clamp(min=0)
    maps = model.stages[1][0](model.stages[0][0](maps))
    if placement == "pre":
        maps = model.final_norm(maps).clamp(min=0)
    expected = maps.flatten(2).mean(2) @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", ["res_post", "pre", "post"])
@pytest.mark.parametrize("norm", ["no_norm", "rms_norm"])
def test_every_convolution_has_a_bias_without_a_centring_norm(placement, norm):
    convs = [m for m in build(norm, placement).modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convs) == 9
    assert all(conv.bias is not None for conv in convs)


@pytest.mark.parametrize(
    ("placement", "with_bias"),
    [
        ("res_post", set()),
        ("post", set()),
        (
            "pre",
            {"stem.conv"}
            | {f"stages.{stage}.0.conv2" for stage in range(3)}
            | {f"stages.{stage}.0.shortcut.conv" for stage in (1, 2)},
        ),
    ],
)
def test_bias_only_where_the_output_meets_no_centring_norm(placement, with_bias):
    convs = {
        path: module
        for path, module in build("group_norm", placement).named_modules()
        if isinstance(module, torch.nn.Conv2d)
    }
    assert {path for path, conv in convs.items() if conv.bias is not None} == with_bias


def test_bias_follows_the_norm_of_the_role():
    roles = {"stem": {"name": "no_norm"}, "downsample": {"name": "rms_norm"}}
    model = build(NormFactory("batch_norm", {}, roles))
    assert model.stem.conv.bias is not None
    assert model.stages[1][0].shortcut.conv.bias is not None
    assert model.stages[1][0].conv1.bias is None


@pytest.mark.parametrize(("num_stages", "sizes"), [(3, [128, 32, 8]), (4, [128, 32, 8, 2])])
def test_digits_statistic_sets_at_micro_batch_2(num_stages, sizes):
    # 8x8 images: maps of 8, 4, 2 and 1 a side, times 2 samples.
    model = build(input_shape=(1, 8, 8), num_stages=num_stages)
    layers = describe_norm_layers(model, (1, 8, 8), 2)
    assert sorted({layer.statistic_set_size for layer in layers}, reverse=True) == sizes


def test_roles_are_told_apart():
    model = build(input_shape=(1, 8, 8))
    roles = [layer.role for layer in describe_norm_layers(model, (1, 8, 8), 2)]
    assert {role: roles.count(role) for role in roles} == {"stem": 1, "block": 6, "downsample": 2}
    model = build(input_shape=(1, 8, 8), placement="pre")
    roles = [layer.role for layer in describe_norm_layers(model, (1, 8, 8), 2)]
    assert {role: roles.count(role) for role in roles} == {"block": 6, "final": 1}


@settings(max_examples=20, deadline=None)
@given(side=st.integers(1, 33), num_stages=st.integers(1, 6))
def test_every_stage_halves_the_side_or_the_model_is_refused(side, num_stages):
    shape = (1, side, side + 3)
    sides = [side]
    while len(sides) < num_stages:
        sides.append((sides[-1] + 1) // 2)
    if num_stages > 1 and sides[-2] == 1:
        with pytest.raises(UserError, match=r"^model\.params\.num_stages="):
            build(input_shape=shape, num_stages=num_stages, width=8)
        return
    model = build(input_shape=shape, num_stages=num_stages, width=8)
    layers = describe_norm_layers(model, shape, 2)
    seen = [layer.input_shape[2] for layer in layers if layer.path.endswith("0.norm1")]
    assert seen == sides


@pytest.mark.parametrize("depth", [2, 7, 9, 18])
def test_a_depth_that_is_not_6n_plus_2_is_refused(depth):
    with pytest.raises(UserError, match=rf"^model\.params\.depth={depth}: 6n\+2 is needed"):
        build(depth=depth)


def test_layers_with_weights_outside_three_stages():
    # depth 14 is n = 2; with 2 stages 2*2*2+2 = 10 layers, projections not counted.
    model = build(depth=14, num_stages=2, shortcut="padding")
    assert len([p for p in model.parameters() if p.ndim > 1]) == 10


@pytest.mark.parametrize("key", ["width", "num_stages"])
def test_sizes_below_one_are_refused(key):
    with pytest.raises(UserError, match=rf"^model\.params\.{key}=0: "):
        build(**{key: 0})


def test_samples_that_are_no_images_are_refused():
    with pytest.raises(UserError, match=re.escape("model.name=cifar_resnet: needs images")):
        build(input_shape=(64,))


def test_zero_gain_is_on_the_last_norm_of_every_branch_only():
    model = build(depth=14, zero_init_last_gain=True)
    zero = {name for name, p in model.named_parameters() if not p.any() and "weight" in name}
    assert zero == {f"stages.{s}.{b}.norm2.weight" for s in range(3) for b in range(2)}


@pytest.mark.parametrize(
    ("norm", "placement", "reason"),
    [
        ("no_norm", "res_post", "norm no_norm has no gain"),
        (NormFactory("group_norm", {"affine": False}), "res_post", "norm group_norm has no gain"),
        ("batch_norm", "pre", "placement res_post is needed, not pre"),
        ("batch_norm", "post", "placement res_post is needed, not post"),
    ],
)
def test_an_impossible_zero_gain_is_refused(norm, placement, reason):
    line = re.escape(f"model.params.zero_init_last_gain=True: {reason}")
    with pytest.raises(UserError, match=f"^{line}"):
        build(norm, placement, zero_init_last_gain=True)


PRE_ACTIVATED = ("rezero_pre", "layer_scale", "skip_init")


@pytest.mark.parametrize("placement", ["rezero", "rezero_pre", "skip_init", "layer_scale"])
def test_resnet20_with_learned_skips_by_placement(placement):
    common = RESNET20_CONVS + RESNET20_PROJECTIONS + RESNET20_CLASSIFIER
    # A bias in every convolution; a gain a block: one number, or one a channel.
    biases = 16 + 6 * (16 + 32 + 64) + (32 + 64)
    gains = 3 * (16 + 32 + 64) if placement == "layer_scale" else 9
    norm = "no_norm" if placement in ("rezero", "skip_init") else "batch_norm"
    without = {"rezero": common + biases, "skip_init": common + biases}
    expected = without.get(placement) or count(build("batch_norm", "pre", depth=20))
    assert count(build(norm, placement, depth=20)) == expected + gains


def test_resnet20_with_fixup():
    common = RESNET20_CONVS + RESNET20_PROJECTIONS + RESNET20_CLASSIFIER
    # Five scalars a block, one after the stem and one before the classifier.
    assert count(build("no_norm", "fixup", depth=20)) == common + 5 * 9 + 2


@pytest.mark.parametrize("placement", MODELS.get("cifar_resnet").card.placements)
def test_sums_are_in_bfloat16_under_autocast_at_every_placement(placement):
    # An arm with float32 sums would be slower and larger for its parameters' type alone.
    norm = "group_norm" if PLACEMENTS[placement].has_norm_layers else "no_norm"
    model, dtypes = build(norm, placement, input_shape=(1, 8, 8)), []
    for stage in model.stages:
        for block in stage:
            block.register_forward_hook(lambda *call: dtypes.append(call[2].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 1, 8, 8))
    assert dtypes == [torch.bfloat16] * 3


@pytest.mark.parametrize("placement", ["rezero", "rezero_pre", "skip_init", "layer_scale", "fixup"])
def test_forward_with_learned_skips(placement):
    norm = "instance_norm" if placement in ("rezero_pre", "layer_scale") else "no_norm"
    model = build(norm, placement, input_shape=(1, 8, 8), num_stages=2).double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 + 0.01 * index)
    x = torch.linspace(-1, 1, 2 * 64, dtype=torch.float64).reshape(2, 1, 8, 8).sin()
    maps = model.stem.conv(x)
    if placement == "fixup":
        maps = maps + model.stem.shift.bias
    if placement not in PRE_ACTIVATED:
        maps = maps.clamp(min=0)
    maps = model.stages[1][0](model.stages[0][0](maps))
    if norm != "no_norm":
        maps = model.final_norm(maps)
    if placement in PRE_ACTIVATED:
        maps = maps.clamp(min=0)
    features = maps.flatten(2).mean(2)
    if placement == "fixup":
        features = features + model.classifier_shift.bias
    expected = features @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)


def test_fixup_counts_all_blocks_of_the_model():
    scales = {
        (depth, num_stages): build("no_norm", "fixup", depth=depth, num_stages=num_stages)
        .stages[0][0]
        .conv1.initial_scale
        for depth, num_stages in [(8, 3), (20, 3), (14, 2)]
    }
    assert scales == {(8, 3): 3**-0.5, (20, 3): 1 / 3, (14, 2): 1 / 2}


def test_layer_scale_init_reaches_every_block_and_no_other_placement():
    model = build("batch_norm", "layer_scale", layer_scale_init=1e-5)
    gains = [p for name, p in model.named_parameters() if "gain" in name]
    assert len(gains) == 3
    assert all((gain == 1e-5).all() for gain in gains)
    line = re.escape(
        "model.params.layer_scale_init=1e-05: placement layer_scale is needed, not pre"
    )
    with pytest.raises(UserError, match=f"^{line}"):
        build("batch_norm", "pre", layer_scale_init=1e-5)
