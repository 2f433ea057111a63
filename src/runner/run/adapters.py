"""Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) in a model, by peft, which takes seconds to import."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

from torch import Tensor, nn

from runner.base.errors import require
from runner.base.patterns import matching
from runner.config.schema.train import Train
from runner.run.finetune import explaining, head_of


def adapt(config: Train, model: nn.Module, image: Callable[[], Tensor]) -> None:
    """Put the adapters of `adapters` into a model, in which only they and what `adapters.trained` names are trained from now on.

    `image` gives an image as the model takes it, (1, C, H, W). Raises `UserError` if a pattern matches nothing.
    """
    settings, modules = config.adapters, dict(model.named_modules())
    if settings.rank is None:
        return
    require("adapters", "runner[lora]", "peft")
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name in (*modules, *dict(model.named_parameters())) if name]
    whole = [head_of(model, image(), "adapters.trained").path] if settings.trained is None else settings.trained
    found = (matching("adapters.trained", each, names, "module or parameter") for each in whole)
    inside = tuple(f"{name}." for name in set[str]().union(*found))
    trained = [each for name, each in model.named_parameters() if each.requires_grad and f"{name}.".startswith(inside)]
    # In evaluations, TransformerEncoderLayer reads the weights of its parts and does not call them
    fused = tuple(f"{name}." for name, each in modules.items() if isinstance(each, nn.TransformerEncoderLayer))
    able = [name for name, each in modules.items() if _fits(each) and not f"{name}.".startswith(inside + fused)]
    kind, some = "plain Linear or Conv2d layer", ", ".join(able[:5])
    found = (matching("adapters.modules", each, able, kind, prose=some) for each in settings.modules)
    target = f"({'|'.join(map(re.escape, sorted(set[str]().union(*found))))})"
    with explaining("adapters", "peft refuses them: ", "other values of adapters.modules and adapters.rank"):
        options = {"lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "target_modules": target}
        inject_adapter_in_model(LoraConfig(r=settings.rank, **options), model)
    for parameter in trained:  # peft leaves nothing but the adapters
        parameter.requires_grad_(True)
    if not model.training:  # as loaded models often are, and then all of it is trained
        model.train()
    for module in modules.values():  # so that BatchNorm keeps its statistics
        own = [each.requires_grad for each in module.parameters(recurse=False)]
        module.training &= not own or any(own)


def _fits(module: nn.Module) -> bool:
    """True if an adapter of peft, which ignores dilation and padding mode, computes what a change of the layer's weights would."""
    plain = type(module) is nn.Conv2d and (module.groups, *module.dilation, module.padding_mode) == (1, 1, 1, "zeros")
    return plain or type(module) is nn.Linear  # and not a subclass, such as MultiheadAttention never calls


def merged(config: Train, model: nn.Module) -> nn.Module:
    """A copy of the model in which the adapters are added to the weights of their layers; without adapters, the model itself."""
    if config.adapters.rank is None:
        return model
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "merge") and hasattr(layer, "base_layer"):
            layer.merge()
            model.set_submodule(name, layer.base_layer)
    return model
