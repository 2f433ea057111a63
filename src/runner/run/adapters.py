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
    # MultiheadAttention reads the weights of its output layer, of a class of its own, and never calls it
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and not f"{name}.".startswith(inside)
        if not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    ]
    chosen, some = set[str](), ", ".join(layers[:5])
    for pattern in settings.modules:
        chosen |= matching("adapters.modules", pattern, layers, "Linear or Conv2d layer", prose=some)
    with explaining("adapters", "peft refuses the layers: ", "other adapters.modules, or another adapters.rank"):
        target = f"({'|'.join(map(re.escape, sorted(chosen)))})"
        options = {"lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "target_modules": target}
        inject_adapter_in_model(LoraConfig(r=settings.rank, **options), model)
    for parameter in trained:  # by peft, nothing but the adapters
        parameter.requires_grad_(True)


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
