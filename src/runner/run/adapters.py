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
    """Put the adapters that the config asks for into a model; only they and `adapters.trained` require gradients afterwards.

    `image` gives an image as the model takes it, (1, C, H, W). Raises `UserError` if a pattern matches nothing, or peft is
    missing or refuses a layer.
    """
    settings = config.adapters
    if settings.rank is None:
        return
    require("adapters", "runner[lora]", "peft")
    from peft import LoraConfig, inject_adapter_in_model

    names, whole = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name], set[str]()
    for pattern in settings.trained or ():
        whole |= matching("adapters.trained", pattern, names, "module or parameter")
    if settings.trained is None:
        whole = {head_of(model, image(), "adapters.trained").path}
    inside = tuple(f"{name}." for name in whole)
    trained = [each for name, each in model.named_parameters() if each.requires_grad and f"{name}.".startswith(inside)]
    able = [name for name, each in model.named_modules() if _fits(each) and not f"{name}.".startswith(inside)]
    chosen, some = set[str](), ", ".join(able[:5])
    for pattern in settings.modules:
        chosen |= matching("adapters.modules", pattern, able, "plain Linear or Conv2d layer", prose=some)
    with explaining("adapters", "peft refuses them: ", "other values of adapters.modules and adapters.rank"):
        target = f"({'|'.join(map(re.escape, sorted(chosen)))})"
        options = {"lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "target_modules": target}
        inject_adapter_in_model(LoraConfig(r=settings.rank, **options), model)
    for parameter in trained:  # peft leaves nothing but the adapters
        parameter.requires_grad_(True)


def _fits(module: nn.Module) -> bool:
    """True if an adapter computes what a change of the layer's weights would.

    That of peft ignores dilation and padding mode, and MultiheadAttention does not call its output layer, a subclass.
    """
    plain = type(module) is nn.Conv2d and (module.groups, *module.dilation, module.padding_mode) == (1, 1, 1, "zeros")
    return plain or type(module) is nn.Linear


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
