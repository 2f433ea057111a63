"""Initial weights for any model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

Scheme = Literal["normal", "xavier", "kaiming", "orthogonal", "trunc_normal"]

_STD = 0.02
_WHITENING_EPS = 5e-4  # keeps components without variance from being amplified; of images with a deviation of 1
_SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": functools.partial(nn.init.normal_, std=_STD),
    "trunc_normal": functools.partial(nn.init.trunc_normal_, std=_STD, a=-2 * _STD, b=2 * _STD),
    "xavier": nn.init.xavier_uniform_,
    "kaiming": functools.partial(nn.init.kaiming_normal_, nonlinearity="relu"),
    "orthogonal": nn.init.orthogonal_,
}
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# Classes of residual blocks, of torchvision, timm and this package
_RESIDUAL = (
    "BasicBlock", "Bottleneck", "BottleneckBlock", "DarkBlock", "DlaBasic", "DlaBottleneck", "EdgeBlock", "ResBottleneckBlock",
)  # fmt: skip
_HAS_SHORTCUT = ("has_skip", "use_res_connect", "apply_residual")  # attributes that are true of other residual blocks
_SHORTCUTS = ("downsample", "shortcut", "proj")  # attributes of blocks, of which `shortcut` is None where there is none
_SWIN_V2 = ("SwinTransformerBlockV2", "SwinTransformerV2Block", "SwinTransformerV2CrBlock")
_BRANCHES = dict.fromkeys(_SWIN_V2, ("norm1", "norm2"))  # blocks with two branches that end in norms


def draw_small_head(head: nn.Linear | nn.Conv2d) -> None:
    """Draw small weights: all classes are about equally likely at first, so that the first loss is ln(num_classes)."""
    nn.init.normal_(head.weight, std=0.01)
    if head.bias is not None:
        nn.init.zeros_(head.bias)


def draw_weights(model: nn.Module, scheme: Scheme) -> None:
    """Draw the weights of every linear layer, convolution and attention, and set their biases to zero.

    `normal` and `trunc_normal` have a standard deviation of 0.02, the latter cut at two of them (as in Dosovitskiy et al.,
    arXiv:2010.11929); `xavier` is uniform (Glorot and Bengio, 2010); `kaiming` is normal, by the fan-in, for ReLU (He et
    al., arXiv:1502.01852); `orthogonal` makes the rows of each weight, seen as a matrix, orthonormal, or the columns where
    there are fewer (Saxe et al., arXiv:1312.6120). Draws from torch's global generator.

    Raises:
        ValueError: if the model has no such layer.
    """
    count = 0
    for weight, bias in _layers(model):
        count += 1
        _SCHEMES[scheme](weight)
        if bias is not None:
            nn.init.zeros_(bias)
    if not count:
        raise ValueError(f"{type(model).__name__} has no linear layer and no convolution")


def _layers(model: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each layer; the matrices of an attention one by one, the bias with the first."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            yield module.weight, module.bias
        elif isinstance(module, nn.MultiheadAttention):
            joined: Tensor | None = module.in_proj_weight  # None if keys or values have another width
            weights = (
                [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
                if joined is None
                else list(joined.detach().chunk(3))
            )
            yield weights[0], module.in_proj_bias
            yield from ((weight, None) for weight in weights[1:])


def whiten(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Let the first convolution whiten patches of the images: its outputs are their principal components, each with both signs.

    After Jordan (arXiv:2404.00498), section 3.1, and Page ("How to train your ResNet", 2018). The convolution has two outputs
    for each number of a patch. `batches` are normalised images (B, C, H, W).

    Raises:
        ValueError: if the first convolution has another number of outputs, or groups or a dilation.
    """
    layer = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if layer is None or layer.groups > 1 or layer.dilation != (1, 1):
        raise ValueError("the model has no convolution of images, or its first one has groups or a dilation")
    patch = layer.weight[0].numel()
    if layer.out_channels != 2 * patch:
        needed = f"needs two outputs for each of {patch} numbers of a patch"
        raise ValueError(f"the first convolution {needed}, and it has {layer.out_channels}")
    weight, products, count = layer.weight, torch.zeros(patch, patch, dtype=torch.float64), 0
    for images in batches:
        patches = nn.functional.unfold(images, layer.kernel_size).transpose(1, 2).reshape(-1, patch).double().cpu()
        products += patches.T @ patches
        count += len(patches)
    values, vectors = torch.linalg.eigh(products / count)
    filters = (vectors / (values + _WHITENING_EPS).sqrt()).T
    with torch.no_grad():
        weight.copy_(torch.cat([filters, -filters]).view(weight.shape))


def zero_last_norms(model: nn.Module) -> list[str]:
    """Let every residual block start as its shortcut: set the scale of the norm that ends its branch to zero.

    After Goyal et al., "Accurate, Large Minibatch SGD" (arXiv:1706.02677), section 5.1. A residual block has a class of
    `_RESIDUAL`, or one of the attributes `_HAS_SHORTCUT` is true. Its branch ends in its last layer with weights, in the
    constructor's order, without those of its shortcut.

    Returns:
        Dotted names of the norms.

    Raises:
        ValueError: if no residual block ends in a norm.
    """
    found = [(f"{path}.{name}", norm) for path, block in model.named_modules() for name, norm in _last_norms(block)]
    if not found:
        known = f"such as a class {_RESIDUAL[0]}, or one with {_HAS_SHORTCUT[0]} = True"
        raise ValueError(f"{type(model).__name__} has no residual block that ends in a norm with a scale, {known}")
    for _, norm in found:
        nn.init.zeros_(norm.weight)
    return [name.removeprefix(".") for name, _ in found]


def _last_norms(block: nn.Module) -> list[tuple[str, Any]]:
    """The norms that end the branches of a residual block; none of any other module."""
    kind = type(block).__name__
    if kind in _BRANCHES:
        return [(name, block.get_submodule(name)) for name in _BRANCHES[kind]]
    if getattr(block, "shortcut", ...) is None:
        return []
    if kind not in _RESIDUAL and not any(getattr(block, name, False) is True for name in _HAS_SHORTCUT):
        return []
    layers = [(name, module) for name, module in block.named_modules() if module._parameters]
    last = [(name, module) for name, module in layers if name.partition(".")[0] not in _SHORTCUTS][-1:]
    return [(name, module) for name, module in last if isinstance(module, _NORMS) and module.weight is not None]


def set_prior(layer: nn.Module, counts: Tensor) -> None:
    """Set a head's bias to the logarithm of each class's share, so that the first loss is the entropy of the classes.

    `counts` are the training samples per class, int64 (C,); a class without samples counts as one.

    Raises:
        ValueError: if the layer has no bias per class.
    """
    bias = getattr(layer, "bias", None)
    if bias is None:
        raise ValueError("the head has no bias")
    if bias.shape != counts.shape:
        raise ValueError(f"the head has {len(bias)} outputs, and the data {len(counts)} classes")
    shares = counts.clamp_min(1).double()
    with torch.no_grad():
        bias.copy_((shares / shares.sum()).log())
