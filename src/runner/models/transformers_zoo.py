"""Models of transformers by family, or by the config.json of a folder or of the hub; with the classes of the data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.base.errors import UserError, require
from runner.models.checks import at_least_1, cache_alone, unknown


def pretrained_or_new(
    auto_class: str,
    name: str,
    weights: str | None,
    options: Mapping[str, Any],
    *,
    num_labels: int,
    families: Sequence[str],
    backbones: Sequence[str] = (),
    fetch_weights: bool = True,
) -> Any:
    """Build a model of transformers in float32; code beside a config or weights is never run.

    Args:
        auto_class: name of its class in transformers, such as "AutoModelForObjectDetection".
        name: one of `families`, or a folder or id on the hub with the config.json of one.
        weights: a folder or id on the hub with model.safetensors, and config.json if `name` is a family; None for random
            weights. Tensors of another number of classes keep random values.
        options: arguments of the class of the config, which replace those of config.json.
        num_labels: number of classes.
        families: values of `model_type` that are allowed.
        backbones: families that are built by AutoBackbone instead, with the further option `out_indices`.
        fetch_weights: False builds the same model without trained weights, and uses no network.

    Raises:
        UserError: transformers is not installed, a name, weights or options are wrong, or cannot be loaded.
    """
    require("model", "runner[transformers]", "transformers")
    import transformers

    at_least_1(num_labels=num_labels)
    if name not in families and "/" not in name and not Path(name).is_dir():
        raise unknown("model.name", f"there is no family '{name}'", name, families)
    stated = {"model_type": name} if name in families and weights is None else {}
    source, key = (weights, "weights") if name in families and weights is not None else (name, "name")
    stated = stated or _loaded(key, source, fetch_weights, _config_of)
    family = str(stated.get("model_type"))
    if family not in families or (name in families and name != family):
        raise UserError(f"model.{key}", f"{source} is a model of the family {family}", ", ".join(families))
    kind = transformers.CONFIG_MAPPING[family]
    if family in backbones:
        auto_class = "AutoBackbone"
        if "out_indices" in options:
            stated.pop("out_features", None)  # says the same by names
    _check_options("model.options", kind, options, ("out_indices",) if family in backbones else ())
    auto, numbers = getattr(transformers, auto_class), {"num_labels": num_labels, "id2label": None, "label2id": None}
    try:
        config = kind(**{**stated, **options, **numbers})
        if weights is None or not fetch_weights:
            return auto.from_config(config, dtype=torch.float32)
    except Exception as error:  # each kind of option has its own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError("model.options", f"{family} cannot be built: {reason}") from error
    return _loaded("weights", weights, True, lambda source, _: _with_weights(auto, source, config))


def _check_options(key: str, kind: Any, options: Mapping[str, Any], others: Sequence[str]) -> None:
    """Refuse options that a class of config would keep without an effect, also those of a `backbone_config` inside."""
    import transformers

    known = inspect.signature(kind).parameters.keys() - inspect.signature(transformers.PreTrainedConfig).parameters
    known |= {*others}
    for option, value in options.items():
        if option not in known:
            raise unknown(f"{key}.{option}", f"{kind.__name__} has no such argument", option, sorted(known))
        if isinstance(value, Mapping) and (family := value.get("model_type")) in transformers.CONFIG_MAPPING:
            inner = transformers.CONFIG_MAPPING[family]
            _check_options(f"{key}.{option}", inner, value, ("model_type", "out_indices", "out_features"))


def _config_of(source: str, local: bool) -> dict[str, Any]:
    import transformers

    stated: dict[str, Any] = transformers.PreTrainedConfig.get_config_dict(source, local_files_only=local)[0]
    return stated


def _with_weights(auto: Any, source: str, config: Any) -> nn.Module:
    with torch.device("meta"):
        kind = type(auto.from_config(config))  # AutoBackbone itself asks the hub, even for a folder
    model, report = kind.from_pretrained(
        source, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        ignore_mismatched_sizes=True, output_loading_info=True,
    )  # fmt: skip
    # Only tensors with an entry for each class may have another size
    wrong = [name for name, *shapes in report["mismatched_keys"] if shapes[0][1:] != shapes[1][1:]]
    if wrong or len(report["missing_keys"]) == len(model.state_dict()):
        raise ValueError(f"the weights do not fit these options: {', '.join(wrong[:3]) or 'no tensor is there'}")
    loaded: nn.Module = model
    return loaded


def _loaded(key: str, source: str, fetch: bool, load: Any) -> Any:
    """What `load(source, offline)` gives; errors name the key, and that the hub does not answer."""
    offline, remote = "", fetch and not Path(source).is_dir()
    try:
        with cache_alone() if remote else contextlib.nullcontext("") as offline:
            return load(source, not remote)
    except (OSError, ValueError, RuntimeError) as error:
        reason = offline or " ".join(str(error).split())[:300]
        allowed = "a folder with config.json, and model.safetensors for weights, or the id of one on the hub"
        raise UserError(f"model.{key}", f"{source} could not be loaded: {reason}", allowed) from error
