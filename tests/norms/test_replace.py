"""replace_norms on modules of torchvision and timm, and on small ones built for one trap each."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import normexp
from normexp.errors import UserError
from normexp.norms import NormFactory
from normexp.norms.replace import replace_norms

OLD = (nn.modules.batchnorm._NormBase, nn.LayerNorm)

# Model, side of its images, new norm, options, number of norm layers, whether an example is needed.
MODELS = {
    "resnet18": (
        lambda: torchvision.models.resnet18(num_classes=5), 32, "group_norm", {}, 20, False,
    ),
    "mobilenet_v3_small": (
        lambda: torchvision.models.mobilenet_v3_small(num_classes=5),
        32, "layer_norm_channel", {}, 34, False,
    ),
    "convnext_tiny": (
        lambda: torchvision.models.convnext_tiny(num_classes=5), 32, "rms_norm", {}, 23, True,
    ),
    "vit_b_16": (
        lambda: torchvision.models.vit_b_16(image_size=32, num_classes=5),
        32, "rms_norm", {}, 25, True,
    ),
    "timm resnet18": (
        lambda: timm.create_model("resnet18", num_classes=5), 32, "group_norm", {}, 20, False,
    ),
    "timm resnetv2_18": (
        lambda: timm.create_model("resnetv2_18", num_classes=5), 32, "group_norm", {}, 17, False,
    ),
    "timm convnext_atto": (
        lambda: timm.create_model("convnext_atto", num_classes=5),
        32, "dynamic_tanh", {}, 17, False,
    ),
    "timm vit_tiny": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5),
        32, "dynamic_tanh", {}, 25, True,
    ),
}  # fmt: skip


def images(side: int, num: int = 2) -> torch.Tensor:
    return torch.randn(num, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_well_known_models_train_and_keep_no_old_norm(name):
    build, side, to, params, count, needs_example = MODELS[name]
    model = build()
    old = {id(m) for m in model.modules() if isinstance(m, OLD)}
    if needs_example:
        with pytest.raises(ValueError, match="features, sequences or images"):
            replace_norms(model, to, **params)
        assert old == {id(m) for m in model.modules() if isinstance(m, OLD)}
    done = replace_norms(model, to, example=images(side, 1), **params)
    assert len(done) == count == len(old)
    assert not old & {id(m) for m in model.modules()}
    records = [m.norm_record for m in model.modules() if hasattr(m, "norm_record")]
    assert [record.name for record in records] == [to] * count
    assert {record.role for record in records} == {"block"}
    for item in done:
        assert type(model.get_submodule(item.path)).__name__ != item.old_class or to == "group_norm"

    called = set()
    for item in done:
        layer = model.get_submodule(item.path)
        layer.register_forward_hook(lambda *_, path=item.path: called.add(path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(images(side)), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert called == {item.path for item in done}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "timm resnetv2_18"])
def test_batch_norm_by_batch_norm_is_the_identity(name):
    """mobilenet has an eps and momentum of its own, resnetv2 activations in its norms."""
    model = MODELS[name][0]()
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.weight.uniform_(0.5, 2.0)
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2.0)
    other = copy.deepcopy(model)
    done = replace_norms(other, "batch_norm")
    assert all(item.is_affine_carried for item in done)
    for mode in (False, True, True, False):  # the second training pass meets changed buffers
        torch.manual_seed(3)  # dropout
        expected = model.train(mode)(images(32, 4))
        torch.manual_seed(3)
        assert torch.equal(other.train(mode)(images(32, 4)), expected)
    F.cross_entropy(model.eval()(images(32)), torch.tensor([0, 1])).backward()
    F.cross_entropy(other.eval()(images(32)), torch.tensor([0, 1])).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_frozen_keeps_the_function_in_evaluation():
    model = torchvision.models.mobilenet_v3_small(num_classes=5)
    model(images(32, 4))
    expected = model.eval()(images(32))
    replace_norms(model, "frozen_batch_norm")
    torch.testing.assert_close(model(images(32)), expected)
    # And back, from torchvision's frozen layers, whose gain and shift are buffers.
    model = torchvision.models.resnet18(
        num_classes=5, norm_layer=torchvision.ops.FrozenBatchNorm2d
    ).eval()
    for m in model.modules():
        if isinstance(m, torchvision.ops.FrozenBatchNorm2d):
            m.weight.uniform_(0.5, 2.0)
            m.running_mean.normal_()
    expected = model(images(32))
    done = replace_norms(model, "batch_norm")
    torch.testing.assert_close(model(images(32)), expected)
    assert done[0].carried == ("weight", "bias", "running_mean", "running_var")
    assert not model.bn1.weight.requires_grad
    assert not any(isinstance(m, torchvision.ops.FrozenBatchNorm2d) for m in model.modules())


def test_activation_and_dropout_of_timm_survive():
    norm = timm.layers.BatchNormAct2d(4, act_layer=nn.GELU, drop_layer=lambda: nn.Dropout(0.5))
    model = nn.Sequential(norm)
    act, drop = norm.act, norm.drop
    drop.eval()
    replace_norms(model, "instance_norm")
    x = images(4)[:, [0, 1, 2, 0]]
    torch.testing.assert_close(model(x), F.gelu(F.instance_norm(x)))
    assert model[0].act is act
    assert model[0].drop is drop
    assert (model[0].training, model[0].norm.training, drop.training) == (True, True, False)


@pytest.mark.parametrize(
    ("old", "shape", "dims", "permute"),
    [
        (nn.BatchNorm1d(4), (3, 4), 0, (0, 1)),
        (nn.BatchNorm1d(4), (3, 4, 5), 1, (0, 2, 1)),
        (nn.InstanceNorm1d(4), (3, 4, 5), 1, (0, 2, 1)),
        (nn.GroupNorm(2, 4), (3, 4, 5), 1, (0, 2, 1)),
        (nn.GroupNorm(2, 4), (3, 4, 5, 5), 2, (0, 1, 2, 3)),
        (nn.SyncBatchNorm(4), (3, 4, 5, 5), 2, (0, 1, 2, 3)),
        (nn.LayerNorm(4), (3, 4), 0, (0, 1)),
        (nn.LayerNorm(4), (3, 5, 4), 1, (0, 1, 2)),
        (nn.RMSNorm(4), (3, 5, 4), 1, (0, 1, 2)),
        (nn.LayerNorm(4), (3, 5, 5, 4), 2, (0, 3, 1, 2)),
        (nn.LayerNorm((5, 4)), (3, 5, 4), 1, (0, 1, 2)),
        (nn.LayerNorm((4, 5, 5)), (3, 4, 5, 5), 2, (0, 1, 2, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_channels_are_found_where_the_old_layer_had_them(old, shape, dims, permute):
    """rms_norm divides each position by its channels, so a wrong axis shows."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(old)
    (done,) = replace_norms(model, "rms_norm", example=x, keep_affine=False)
    assert (done.num_features, done.dims) == (4, dims)
    axis = permute.index(1) if len(permute) == 2 else shape.index(4)
    expected = x / (x.square().mean(axis, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(model(x).detach(), expected)


def test_own_layers_are_replaced_in_their_layout():
    model = nn.Sequential(
        NormFactory("group_norm")(8, role="stem", dims=1),
        NormFactory("no_norm")(8, role="stem", dims=0),
    )
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="example="):
        replace_norms(model, "rms_norm")
    done = replace_norms(model, "rms_norm", example=x)
    assert [(item.old_kind, item.dims, item.num_features) for item in done] == [
        ("group_norm", 1, 8),
        ("no_norm", 1, 8),
    ]
    once = x / (x.square().mean(2, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(model(x), once, rtol=1e-4, atol=1e-4)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(4)
        self.inner = nn.Sequential(self.norm1, nn.ReLU())
        self.norm2 = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm2(self.inner(self.norm1(x)))


def test_a_shared_layer_stays_one_layer():
    model = Shared()
    first, second = replace_norms(model, "group_norm", num_groups=2)
    assert (first.path, first.other_paths) == ("norm1", ("inner.0",))
    assert (second.path, second.other_paths) == ("norm2", ())
    assert model.norm1 is model.inner[0]
    assert model.norm1 is not model.norm2
    assert len(list(model.parameters())) == 4


def test_device_type_mode_and_training_of_each_layer_stay():
    model = nn.Sequential(
        nn.BatchNorm2d(8).double(),
        nn.BatchNorm2d(8).half().eval(),
        nn.Sequential(nn.Conv2d(8, 8, 1, dtype=torch.bfloat16), nn.InstanceNorm2d(8)),
        nn.BatchNorm2d(8, device="meta"),
    )
    model[0].weight.requires_grad_(False)
    model[1].running_mean = model[1].running_mean.float()
    gain = model[0].weight
    replace_norms(model, "batch_norm", affine=True)
    assert [model[i].weight.dtype for i in (0, 1)] == [torch.float64, torch.float16]
    assert [model[i].running_mean.dtype for i in (0, 1)] == [torch.float64, torch.float32]
    assert model[2][1].weight.dtype == torch.bfloat16  # bare; as the convolution beside it
    assert {t.device.type for t in model[3].state_dict().values()} == {"meta"}
    assert [model[i].training for i in (0, 1, 3)] == [True, False, True]
    assert model[0].weight is gain  # an optimizer goes on with it
    assert [p.requires_grad for p in model[0].parameters()] == [False, True]


def test_keep_affine():
    old = nn.BatchNorm2d(8)
    nn.init.constant_(old.weight, 3.0)
    old.bias.requires_grad_(False)
    model = nn.Sequential(old, nn.BatchNorm2d(8, affine=False))
    bare = copy.deepcopy(model)
    first, second = replace_norms(model, "group_norm")
    assert first.carried == ("weight", "bias")
    assert not second.is_affine_carried
    assert model[0].weight.tolist() == [3.0] * 8
    assert list(model[1].parameters()) == []
    first, second = replace_norms(bare, "group_norm", keep_affine=False)
    assert (first.carried, second.carried) == ((), ())
    assert bare[0].weight.tolist() == [1.0] * 8
    assert not bare[0].bias.requires_grad
    assert len(list(bare[1].parameters())) == 2
    # A gain without a shift hands on the gain.
    model = nn.Sequential(copy.deepcopy(old))
    (done,) = replace_norms(model, "rms_norm")
    assert done.carried == ("weight",)


def test_options_stay_only_where_they_mean_the_same():
    model = nn.Sequential(nn.BatchNorm2d(8, eps=0.5, momentum=None), nn.GroupNorm(4, 8, eps=0.25))
    x = torch.randn(2, 8, 4, 4)
    replace_norms(model, "group_norm", example=x)
    assert [model[0].eps, model[0].num_groups] == [1e-5, 8]
    assert [model[1].eps, model[1].num_groups] == [0.25, 4]
    model = nn.Sequential(nn.BatchNorm2d(8, eps=0.5, momentum=None), nn.GroupNorm(4, 8, eps=0.25))
    replace_norms(model, "batch_norm", example=x, momentum=0.5)
    assert [model[0].eps, model[0].momentum] == [0.5, 0.5]
    assert [model[1].eps, model[1].momentum] == [1e-5, 0.5]


def test_only_restricts_to_kinds_or_to_a_function():
    def build():
        return nn.Sequential(nn.BatchNorm2d(8), nn.InstanceNorm2d(8), nn.LocalResponseNorm(2))

    model = build()
    assert [r.path for r in replace_norms(model, "group_norm", only="instance_norm")] == ["1"]
    assert isinstance(model[0], nn.BatchNorm2d)
    model = build()
    kinds = ["instance_norm", "batch_norm"]
    assert [r.old_kind for r in replace_norms(model, "group_norm", only=kinds)] == kinds[::-1]
    model = build()
    done = replace_norms(model, "group_norm", only=lambda path, _module: path == "0")
    assert [r.old_class for r in done] == ["BatchNorm2d"]
    with pytest.raises(ValueError, match="only=batchnorm: did you mean batch_norm"):
        replace_norms(model, "group_norm", only="batchnorm")


def test_nothing_is_half_done():
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Sequential(nn.BatchNorm2d(6)))
    before = list(model.modules())
    line = "norm.params.num_groups=4: does not divide the 6 channels of a layer; "
    with pytest.raises(UserError, match=f"^{re.escape(line)}.*" + re.escape("(layer 1.0)")):
        replace_norms(model, "group_norm", num_groups=4)
    assert list(map(id, model.modules())) == list(map(id, before))


def test_example_leaves_buffers_and_random_state_alone():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.LayerNorm(8))
    state, before = torch.get_rng_state(), model[0].running_mean
    replace_norms(model, "layer_norm_channel", only="layer_norm", example=torch.ones(1, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert int(model[0].num_batches_tracked) == 0
    assert model[0].running_mean is before
    assert "forward" not in vars(model[0])


class MyNorm(nn.Module):
    def forward(self, x):
        return x


class MyBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


class NormBlock(nn.Module):
    """A container, by the norm in it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(x)


def test_constants_do_not_move_with_what_an_optimizer_still_holds():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.randn(4, 3, 5, 5)).square().sum().backward()
    (done,) = replace_norms(model, "frozen_batch_norm", train_affine=False)
    assert {"weight", "bias"} <= set(done.carried)
    optimizer.step()
    assert torch.equal(model[1].weight, torch.ones(8))
    assert torch.equal(model[1].bias, torch.zeros(8))


def test_a_norm_free_block_is_no_norm():
    class NormFreeBlock(nn.Sequential):  # as in timm's NFNets
        pass

    model = nn.Sequential(NormFreeBlock(nn.Conv2d(3, 8, 1)), nn.BatchNorm2d(8))
    assert [done.path for done in normexp.replace_norms(model, "rms_norm")] == ["1"]


def test_containers_are_told_from_unknown_norms():
    model = nn.Sequential(NormBlock())
    assert [r.path for r in replace_norms(model, "group_norm")] == ["0.norm"]
    model = nn.Sequential(NormBlock(), MyNorm(), MyBatchNorm(8))
    with pytest.raises(ValueError, match=re.escape("1 (MyNorm), 2 (MyBatchNorm)")):
        replace_norms(model, "group_norm")
    assert isinstance(model[0].norm, nn.BatchNorm2d)
    with pytest.raises(ValueError, match=re.escape("no known norm: 2 (MyBatchNorm)")):
        replace_norms(model, "group_norm", only="batch_norm")
    done = replace_norms(model, "group_norm", only=lambda path, _m: path == "0.norm")
    assert len(done) == 1


def held_elsewhere():
    model = nn.Sequential(nn.BatchNorm2d(8))
    model.norms = [model[0]]
    return model


def hooked():
    norm = nn.BatchNorm2d(8)
    norm.register_forward_hook(lambda *_: None)
    return nn.Sequential(norm)


def parametrized():
    norm = nn.BatchNorm2d(8)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return nn.Sequential(norm)


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: nn.BatchNorm2d(8), "^.BatchNorm2d.: the module is itself a norm"),
        (hooked, r"0 \(BatchNorm2d\): it has hooks"),
        (parametrized, r"0 \(ParametrizedBatchNorm2d\): its parameters are parametrized"),
        (held_elsewhere, r"0 \(BatchNorm2d\): also held by norms"),
        (lambda: nn.Sequential(nn.LazyBatchNorm2d()), "no known norm: 0 .LazyBatchNorm2d"),
        (lambda: torch.jit.trace(nn.ReLU(), torch.ones(1)), "before the module becomes"),
        (
            lambda: nn.Sequential(NormFactory("evo_norm_s0")(8, role="block", dims=2)),
            "evo_norm_s0 is more than a layer",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:Lazy modules:UserWarning")
def test_what_would_be_lost_is_an_error(build, line):
    with pytest.raises(ValueError, match=line):
        replace_norms(build(), "group_norm", example=images(4))


@pytest.mark.parametrize(
    ("to", "params", "line"),
    [
        ("grup_norm", {}, "norm=grup_norm: did you mean group_norm"),
        ("group_norm", {"groups": 2}, "norm.params.groups=2: .*no such parameter"),
        ("weight_norm", {}, "norm=weight_norm: acts on the weights of convolutions"),
        ("adaptive_group_norm", {}, "norm=adaptive_group_norm: a condition"),
        ("power_norm", {}, r"norm=power_norm: not defined for images.* \(layer 0\)"),
    ],
)
def test_what_no_layer_can_become(to, params, line):
    with pytest.raises(UserError, match=f"^{line}"):
        replace_norms(nn.Sequential(nn.BatchNorm2d(8)), to, **params)


def test_a_norm_with_an_activation_is_built_without_it():
    model = nn.Sequential(nn.BatchNorm2d(8))
    replace_norms(model, "evo_norm_s0")
    plain = NormFactory("evo_norm_s0")(8, role="block", dims=2, is_activated=False)
    x = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model[0](x), plain(x))


def test_an_example_that_misses_a_layer_names_it():
    model = nn.Sequential(nn.Identity())
    model.unused = nn.LayerNorm(8)
    model.forward = lambda x: x
    with pytest.raises(ValueError, match=r"unused \(LayerNorm\): no input in the forward pass"):
        replace_norms(model, "rms_norm", example=torch.ones(2, 8))


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("mask", [None, torch.tensor([[False, False, True]] * 2)])
def test_torch_encoder_calls_the_new_norms_in_evaluation(mask):
    """Its fused kernel would take the gains of the new norms for those of LayerNorm."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    replace_norms(model, "layer_norm_std_outside", example=x)
    with torch.no_grad():
        fused = model(x, src_key_padding_mask=mask)
        expected = model.train()(x, src_key_padding_mask=mask)
    torch.testing.assert_close(fused, expected)


def test_import_needs_no_torch():
    code = (
        "import sys, normexp; assert 'torch' not in sys.modules; "
        "assert callable(normexp.replace_norms); assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert normexp.replace_norms is replace_norms
    assert set(dir(normexp)) >= {"replace_norms", "Replacement"}
    with pytest.raises(AttributeError, match="replace_norm"):
        _ = normexp.replace_norm
