"""Rules between keys of single verbs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, get_origin

from runner.config import keys
from runner.config.errors import Problem, nearest
from runner.config.schema.audit import Audit
from runner.config.schema.bench import Bench
from runner.config.schema.export import Export
from runner.config.schema.find_lr import FindLr
from runner.config.schema.inspect import FEATURE_FILES, Inspect
from runner.config.schema.train import Train


def verb_conflicts(config: Train) -> list[Problem]:
    """Combinations of a verb's own keys that cannot be run; each says what to set."""
    if isinstance(config, Bench):
        return _of_bench(config)
    if isinstance(config, Audit):
        return _of_audit(config)
    if isinstance(config, Export):
        return _of_export(config)
    if isinstance(config, Inspect):
        return _of_inspect(config)
    if isinstance(config, FindLr) and config.start >= config.end:
        return [Problem("start", f"is {config.start:g}, and end is {config.end:g}", "less than end")]
    return []


def _of_bench(config: Bench) -> list[Problem]:
    """What a comparison cannot do."""
    found = _of_vary(config.vary)
    wrong = {problem.key for problem in found}
    for key in keys.flatten(config.vary) if config.vary else {}:
        if f"vary.{key}" not in wrong and config.part == "data" and not key.startswith("data."):
            message = "is not about the data, which is all that part=data compares"
            found.append(Problem(f"vary.{key}", message, "keys of data, or part=train"))
    return found


def _of_export(config: Export) -> list[Problem]:
    """What cannot be quantised, and formats and batch sizes that are none."""
    found: list[Problem] = []
    formats = [config.format] if isinstance(config.format, str) else config.format
    if not formats:
        found.append(
            Problem("format", "names no format", "one or several of safetensors, torch_export, onnx, torchscript")
        )
    if not config.batch_sizes:
        found.append(Problem("batch_sizes", "names no batch size to compare at", "such as [1,8]"))
    if config.int8 and "onnx" not in formats:
        found.append(
            Problem("int8", "is made from the ONNX model, which format does not include", "format=onnx, or int8=false")
        )
    if config.int8 and config.include_preprocessing:
        message = "is calibrated on normalised images, which a model with include_preprocessing=true does not take"
        found.append(Problem("int8", message, "one of the two"))
    return found


def _of_vary(vary: dict[str, Any]) -> list[Problem]:
    """Keys to vary that there are not, or that are whole sections."""
    found: list[Problem] = []
    for key in keys.flatten(vary) if vary else {}:
        kind = keys.find(Train, key)
        if kind is None:
            pool = keys.all_keys(Train)
            found.append(Problem(f"vary.{key}", "varies what is not a key", "a key of the schema", _alike(key, pool)))
        elif kind is not Any and _is_section(kind):
            found.append(
                Problem(f"vary.{key}", "varies a whole section", f"keys inside it, such as vary.{key}.name=[a,b]")
            )
    return found


def _of_audit(config: Audit) -> list[Problem]:
    """What an audit cannot compare."""
    found = _of_vary(config.vary)
    for key, value in keys.flatten(config.vary).items() if config.vary else []:
        if isinstance(value, list) and len(value) != 2:
            message = f"has {len(value)} value{'' if len(value) == 1 else 's'}, but there are two sides"
            found.append(Problem(f"vary.{key}", message, f"vary={key}:A,B, or the other value alone"))
    if (config.a is None) != (config.b is None):
        given, missing = ("a", "b") if config.b is None else ("b", "a")
        message = f"is missing, and {given} is given"
        found.append(Problem(missing, message, f"{missing}=PATH to compare it with, or neither to compare steps"))
    if config.a is not None and config.vary:
        found.append(Problem("vary", "has no effect on checkpoints that are there", "vary={}, or neither a nor b"))
    return found


def _of_inspect(config: Inspect) -> list[Problem]:
    """A file of features whose ending says no format."""
    ending = PurePath(config.output or "").suffix
    if not config.features or ending in ("", *FEATURE_FILES):
        return []
    allowed = f"a file that ends in {' or '.join(FEATURE_FILES)}, a folder, or null"
    return [Problem("output", f"cannot be {config.output} where features are written", allowed)]


def _is_section(annotation: Any) -> bool:
    return any(
        dataclasses.is_dataclass(member) or get_origin(keys.bare(member)) is dict for member in keys.members(annotation)
    )


def _alike(key: str, pool: Sequence[str]) -> str:
    """The key spelled most like one with a part missing or misspelled, in the form of `vary`; empty if there is none."""
    same_leaf = [known for known in pool if known.rpartition(".")[2] == key.rpartition(".")[2]]
    close = min(same_leaf, key=len) if same_leaf else nearest(key, pool)
    return f"vary.{close}" if close else ""
