"""Models of transformers by family, or by the config.json of a folder or of the hub; with the classes of the data."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import UserError, require
from runner.models.checks import at_least_1, cache_alone, unknown

_SOURCES = "a folder with config.json, and model.safetensors for weights, or the id of one on the hub; only torchvision has DEFAULT"
_log = logging.getLogger(__name__)


def pretrained_or_new(
    families: Mapping[str, str],
    name: str,
    weights: str | None,
    options: Mapping[str, Any],
    *,
    num_labels: int,
    fetch_weights: bool = True,
) -> Any:
    """Build a model of transformers in float32; code beside a config or weights is never run.

    Args:
        families: the class in transformers of each `model_type` that is allowed, such as "RTDetrForObjectDetection".
        name: one of `families`, or a folder or id on the hub with the config.json of one.
        weights: a folder or id on the hub with model.safetensors, and config.json if `name` is a family; None for random
            weights. Tensors of another number of classes keep random values.
        options: arguments of the class of the config, which replace those of config.json.
        num_labels: number of classes.
        fetch_weights: False builds the same model without trained weights, and uses no network.

    Raises:
        UserError: transformers is not installed, a name, weights or options are wrong, or cannot be loaded.
    """
    require("model", "runner[transformers]", "transformers")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    at_least_1(num_labels=num_labels)
    if name not in families and "/" not in name and not Path(name).is_dir():
        raise unknown("model.name", f"transformers has no family '{name}' for this task", name, [*families])
    key, source = ("weights", weights) if name in families else ("name", name)
    stated: dict[str, Any] = {"model_type": name}
    if source is not None:
        remote = fetch_weights and not Path(source).is_dir()
        with _explained(f"model.{key}", f"{source} could not be loaded", _SOURCES, remote):
            stated = dict(transformers.PreTrainedConfig.get_config_dict(source, local_files_only=not remote)[0])
    family = str(stated.get("model_type"))
    if family not in families or (name in families and name != family):
        raise UserError(f"model.{key}", f"{source} is a model of the family {family}", ", ".join(families))
    kind = getattr(transformers, families[family])
    _check_options("model.options", kind.config_class, options)
    if "out_indices" in options:
        stated.pop("out_features", None)  # says the same by names
    with _explained("model.options", f"{family} cannot be built"):
        config = kind.config_class(**stated | {**options, "num_labels": num_labels, "id2label": None, "label2id": None})
        if weights is None or not fetch_weights:
            return kind(config).float()
    with _explained("model.weights", f"{weights} could not be loaded", _SOURCES, not Path(weights).is_dir()):
        model, report = kind.from_pretrained(
            weights, config=config, dtype=torch.float32, use_safetensors=True, ignore_mismatched_sizes=True,
            output_loading_info=True,
        )  # fmt: skip
        # Only tensors with an entry for each class may have another size
        wrong = [label for label, *shapes in report["mismatched_keys"] if shapes[0][1:] != shapes[1][1:]]
        if wrong or len(report["missing_keys"]) == len(model.state_dict()):
            raise ValueError(f"the weights do not fit these options: {', '.join(wrong[:3]) or 'no tensor is there'}")
    without = {*report["missing_keys"], *(label for label, *_ in report["mismatched_keys"])}
    if new := [label for label, _ in model.named_parameters() if label in without]:
        _log.warning("%s: %d tensors start from random values: %s", weights, len(new), ", ".join(new[:3]))
    return model


def _check_options(key: str, kind: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that a class of config would keep without an effect, also those of a `backbone_config` inside."""
    import transformers

    known = inspect.signature(kind).parameters.keys() - inspect.signature(transformers.PreTrainedConfig).parameters
    known |= {"out_indices", "out_features"} if hasattr(kind, "out_indices") else set()
    for option, value in options.items():
        if option not in known:
            raise unknown(f"{key}.{option}", f"{kind.__name__} has no such argument", option, sorted(known))
        if isinstance(value, Mapping) and (family := value.get("model_type")) in transformers.CONFIG_MAPPING:
            inner = {name: each for name, each in value.items() if name != "model_type"}
            _check_options(f"{key}.{option}", transformers.CONFIG_MAPPING[family], inner)


@contextlib.contextmanager
def _explained(key: str, problem: str, allowed: str = "", remote: bool = False) -> Iterator[None]:
    """Errors of any kind name the key, and if it is so, that the hub does not answer."""
    offline = ""
    try:
        with cache_alone() if remote else contextlib.nullcontext("") as offline:
            yield
    except Exception as error:  # of validation, files, safetensors, torch
        reason = offline or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(key, f"{problem}: {reason}", allowed) from error
