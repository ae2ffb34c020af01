"""Placements: where the norms of a residual block stand, one formula and its drawings each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drawing:
    """A residual block of one model family.

    Attributes:
        formula: The output of a block.
        picture: The block, drawn with characters.
    """

    formula: str
    picture: str


@dataclass(frozen=True)
class Placement:
    """One way to combine a branch f, a shortcut and norms.

    Attributes:
        name: The choice, as in the configuration.
        formula: The output of a block with branch f, whatever the branch is.
        description: What it is for and where it is known from.
        images: The block of a ResNet; None where it is not known for one.
        sequences: The block of a Transformer, once with attention and once with the feed-forward
            network for f; None where it is not known for one.
        has_norm_layers: Whether norms stand anywhere; without, only norms of weights can act.
        sets_weight_scale: Whether the initial size of its weights is part of it, so that a norm
            of weights, which takes the size away, has no place.
    """

    name: str
    formula: str
    description: str
    images: Drawing | None = None
    sequences: Drawing | None = None
    has_norm_layers: bool = True
    sets_weight_scale: bool = False


_RES_POST = Placement(
    name="res_post",
    formula="x + norm(f(x))",
    images=Drawing(
        formula="relu(x + norm2(conv2(relu(norm1(conv1(x))))))",
        picture="""\
x -+- conv1 - norm1 - relu - conv2 - norm2 -(+)- relu -> y
   |                                         |
   +-------- identity | conv - norm ---------+
""",
    ),
    sequences=Drawing(
        formula="x + norm(f(x))",
        picture="""\
x -+- f - norm -(+)-> y
   |             |
   +-------------+
after the last block: norm (role final)
""",
    ),
    description="The branch ends in a norm, the sum is not normalized: ResNet v1 (He et al., CVPR "
    "2016), where a projection shortcut has a norm of its own (role downsample); Swin v2 for "
    "Transformers (Liu et al., CVPR 2022).",
)

_PRE = Placement(
    name="pre",
    formula="x + f(norm(x))",
    images=Drawing(
        formula="x + conv2(relu(norm2(conv1(relu(norm1(x))))))",
        picture="""\
x -+- norm1 - relu -+- conv1 - norm2 - relu - conv2 -(+)-> y
   |                |                                 |
   +- identity      +- or: conv (projection) ---------+
   |                                                  |
   +--------------------------------------------------+
after the last block: norm - relu (role final)
""",
    ),
    sequences=Drawing(
        formula="x + f(norm(x))",
        picture="""\
x -+- norm - f -(+)-> y
   |             |
   +-------------+
after the last block: norm (role final)
""",
    ),
    description="The branch starts with a norm and the shortcut is clean: ResNet v2 (He et al., "
    "ECCV 2016), where a projection takes the normalized, activated input and the stem has no "
    "norm; GPT-2 and most Transformers since (Xiong et al., ICML 2020).",
)

_POST = Placement(
    name="post",
    formula="norm(x + f(x))",
    images=Drawing(
        formula="relu(norm2(x + conv2(relu(norm1(conv1(x))))))",
        picture="""\
x -+- conv1 - norm1 - relu - conv2 -(+)- norm2 - relu -> y
   |                                 |
   +-------- identity | conv --------+
""",
    ),
    sequences=Drawing(
        formula="norm(x + f(x))",
        picture="""\
x -+- f -(+)- norm -> y
   |      |
   +------+
""",
    ),
    description="The sum is normalized, as in the first Transformer (Vaswani et al., 2017); for "
    "ResNets He et al., ECCV 2016, figure 4(b), call it BN after addition.",
)

_NONE = Placement(
    name="none",
    formula="x + f(x)",
    images=Drawing(
        formula="relu(x + conv2(relu(conv1(x))))",
        picture="""\
x -+- conv1 - relu - conv2 -(+)- relu -> y
   |                         |
   +---- identity | conv ----+
""",
    ),
    sequences=Drawing(
        formula="x + f(x)",
        picture="""\
x -+- f -(+)-> y
   |      |
   +------+
""",
    ),
    description="No norm layer anywhere in the model; norm must be no_norm or a norm of weights "
    "alone.",
    has_norm_layers=False,
)

_REZERO = Placement(
    name="rezero",
    formula="x + a * f(x)",
    images=Drawing(
        formula="relu(x + a * conv2(relu(conv1(x))))",
        picture="""\
x -+- conv1 - relu - conv2 - * a -(+)- relu -> y
   |                               |
   +------- identity | conv -------+
""",
    ),
    sequences=Drawing(
        formula="x + a * f(x)",
        picture="""\
x -+- f - * a -(+)-> y
   |            |
   +------------+
""",
    ),
    description="No norm layer; the scalar a is learned and starts at 0, so that every block "
    "starts as its shortcut (Bachlechner et al., UAI 2021).",
    has_norm_layers=False,
)

_REZERO_PRE = Placement(
    name="rezero_pre",
    formula="x + a * f(norm(x))",
    images=Drawing(
        formula="x + a * conv2(relu(norm2(conv1(relu(norm1(x))))))",
        picture="""\
x -+- norm1 - relu -+- conv1 - norm2 - relu - conv2 - * a -(+)-> y
   |                |                                       |
   +- identity      +- or: conv (projection) ---------------+
   |                                                        |
   +--------------------------------------------------------+
after the last block: norm - relu (role final)
""",
    ),
    sequences=Drawing(
        formula="x + a * f(norm(x))",
        picture="""\
x -+- norm - f - * a -(+)-> y
   |                   |
   +-------------------+
after the last block: norm (role final)
""",
    ),
    description="As pre, with a learned scalar a at the end of the branch that starts at 0 "
    "(ReZero with a norm inside of the branch: Narang et al., EMNLP 2021).",
)

_SKIP_INIT = Placement(
    name="skip_init",
    formula="x + a * f(x)",
    images=Drawing(
        formula="x + a * conv2(relu(conv1(relu(x))))",
        picture="""\
x -+- relu -+- conv1 - relu - conv2 - * a -(+)-> y
   |        |                               |
   |        +- or: conv (projection) -------+
   |                                        |
   +- identity -----------------------------+
after the last block: relu
""",
    ),
    description="As pre without its norms; the scalar a is learned and starts at 0 (SkipInit: De "
    "& Smith, NeurIPS 2020). With norm scaled_weight_standardization it is near to an NF-ResNet.",
    has_norm_layers=False,
)

_LAYER_SCALE = Placement(
    name="layer_scale",
    formula="x + a_c * f(norm(x))",
    images=Drawing(
        formula="x + a_c * conv2(relu(norm2(conv1(relu(norm1(x))))))",
        picture="""\
x -+- norm1 - relu -+- conv1 - norm2 - relu - conv2 - * a_c -(+)-> y
   |                |                                         |
   +- identity      +- or: conv (projection) -----------------+
   |                                                          |
   +----------------------------------------------------------+
after the last block: norm - relu (role final)
""",
    ),
    sequences=Drawing(
        formula="x + a_c * f(norm(x))",
        picture="""\
x -+- norm - f - * a_c -(+)-> y
   |                     |
   +---------------------+
after the last block: norm (role final)
""",
    ),
    description="As pre, with a learned factor a_c a channel at the end of the branch that starts "
    "at the model's layer_scale_init (LayerScale: Touvron et al., ICCV 2021).",
)

_FIXUP = Placement(
    name="fixup",
    formula="x + a * f(x + b1) + b4",
    images=Drawing(
        formula="relu(x + a * conv2(relu(conv1(x + b1) + b2) + b3) + b4)",
        picture="""\
x -+- + b1 -+- conv1 - + b2 - relu - + b3 - conv2 - * a - + b4 -(+)- relu -> y
   |        |                                                    |
   |        +- or: conv (projection) ----------------------------+
   |                                                             |
   +- identity --------------------------------------------------+
a scalar also before the stem's relu and before the classifier
""",
    ),
    description="No norm layer; learned scalars a (starts at 1) and b1 to b4 (start at 0), no "
    "other bias but the classifier's; conv1 starts L^(-1/2) times smaller with L blocks, conv2 "
    "and the classifier start at 0 (Fixup: Zhang, Dauphin & Ma, ICLR 2019, who train the "
    "scalars at a tenth of the rate: optimizer.lr_factors.skip=0.1).",
    has_norm_layers=False,
    sets_weight_scale=True,
)

_SANDWICH = Placement(
    name="sandwich",
    formula="x + norm(f(norm(x)))",
    sequences=Drawing(
        formula="x + norm2(f(norm1(x)))",
        picture="""\
x -+- norm1 - f - norm2 -(+)-> y
   |                      |
   +----------------------+
after the last block: norm (role final)
""",
    ),
    description="Norms on both sides of the branch, the sum is not normalized (Sandwich-LN: Ding "
    "et al., NeurIPS 2021).",
)

_DEEPNORM = Placement(
    name="deepnorm",
    formula="norm(alpha * x + f(x))",
    sequences=Drawing(
        formula="norm(alpha * x + f(x))",
        picture="""\
x -+------ f -------(+)- norm -> y
   |                 |
   +---- * alpha ----+
""",
    ),
    description="The sum is normalized and the shortcut weighs alpha = (2N)^(1/4) in a model of N "
    "blocks; feed-forward, value and output weights start (8N)^(-1/4) times smaller (DeepNorm, of "
    "an encoder or a decoder alone: Wang et al., arXiv:2203.00555, figure 2).",
    sets_weight_scale=True,
)

PLACEMENTS: dict[str, Placement] = {
    placement.name: placement
    for placement in (
        _RES_POST,
        _PRE,
        _POST,
        _NONE,
        _REZERO,
        _REZERO_PRE,
        _SKIP_INIT,
        _LAYER_SCALE,
        _FIXUP,
        _SANDWICH,
        _DEEPNORM,
    )
}
