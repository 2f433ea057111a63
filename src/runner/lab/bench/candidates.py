"""The settings that `bench` tries: the user's own config with one toggle switched, or with a preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import yaml

from runner.config import keys
from runner.config.frozen import to_plain
from runner.config.schema.verbs import Bench, Toggle
from runner.config.sources import Sources, text_of
from runner.config.validate import shown

Kind = Literal["baseline", "toggle", "varied", "preset"]

# Keys that say how the same training is computed. Others may be varied, but a faster value is not the same training.
SPEED_ALONE = frozenset(get_args(Toggle)) | {
    *("data.prefetch", "data.pin_memory", "data.non_blocking", "data.persistent_workers"),
    *("data.cache", "data.cache_dir"),
    *("compiler.mode", "compiler.fullgraph", "compiler.dynamic"),
}


@dataclass(frozen=True)
class Candidate:
    """The user's config with some keys set."""

    kind: Kind  # why it is tried
    words: tuple[str, ...] = ()  # the overrides that a user would type for it; none for the baseline
    settings: Mapping[str, Any] = field(default_factory=dict)  # dotted keys and their values

    @property
    def name(self) -> str:
        """The overrides as one text."""
        return " ".join(self.words) or "as configured"

    @property
    def same_training(self) -> bool:
        """True if it changes nothing but how the training is computed."""
        return self.kind == "preset" or self.settings.keys() <= SPEED_ALONE


BASELINE = Candidate("baseline")


def setting(kind: Kind, values: Mapping[str, Any]) -> Candidate:
    """A candidate from dotted keys and values."""
    return Candidate(kind, tuple(f"{key}={shown(value)}" for key, value in values.items()), values)


@dataclass(frozen=True)
class RunTraits:
    """The properties of the baseline, once it is built, that decide which toggles apply."""

    device: str  # type of the device
    cores: int  # CPU cores that this process may use
    threads: int  # CPU threads that torch uses
    precision: bool | str  # `false`, `bf16` or `fp16`, as the forward pass is computed
    workers: int | None  # processes that read samples; None if they are in memory
    kernels: Mapping[str, bool]  # those of `fused` and `foreach` that the optimizer has, and whether they are on
    convolutions: bool  # whether the model has weights of four dimensions


Skipped = tuple[str, str]
"""What is not measured, and why."""


def candidates(config: Bench, traits: RunTraits, sources: Sources) -> tuple[list[Candidate], list[Skipped]]:
    """The candidates, one toggle at a time; and those that do not apply, with the reason."""
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    # Each toggle alone, as only then its effect is known
    for name, made in _toggles(config, traits).items():
        if config.toggles is not None and name not in config.toggles:
            continue
        if isinstance(made, str):
            skipped.append((name, made))
        else:
            found += [setting("toggle", values) for values in made]
    found += varied(config)
    # The presets combine several toggles, and are tried because these may help or hinder each other
    if config.toggles is None or "performance" in config.toggles:
        for preset in _presets(config, sources):
            if preset.settings.get("compile") and not config.compile and (why := _why_not_compiled(config, traits)):
                skipped.append((preset.name, why))
            else:
                found.append(preset)
    return list({candidate.name: candidate for candidate in found}.values()), skipped


def varied(config: Bench) -> list[Candidate]:
    """The values of `vary` that differ from the baseline's; its keys may be nested or dotted."""
    now = keys.flatten(to_plain(config))
    return [
        setting("varied", {key: value})
        for key, given in (keys.flatten(config.vary) if config.vary else {}).items()
        for value in (given if isinstance(given, list) else [given])
        if value != now.get(key)
    ]


def _toggles(config: Bench, traits: RunTraits) -> dict[str, str | list[dict[str, Any]]]:
    """The settings to try for each toggle, other than the present one, or why it does not apply."""
    device, cores, both = traits.device, traits.cores, (True, False)
    # Powers of two and all cores are enough to see the trend
    counts = sorted({*(2**power for power in range(cores.bit_length())), cores})
    compiled = True if config.compile == "model" else config.compile
    not_cuda = "" if device == "cuda" else f"has no effect on {device}: it is a setting of CUDA's"
    rows: dict[str, tuple[Sequence[Any], Any, str]] = {  # values, the present one, why it does not apply
        "amp": ((False, "bf16", "fp16"), traits.precision, ""),
        "channels_last": (both, config.channels_last, "" if traits.convolutions else "the model has no convolution"),
        "activation_checkpointing": (both, config.activation_checkpointing is not False, ""),
        "compile": ((False, True, "step"), compiled, "" if compiled else _why_not_compiled(config, traits)),
        "cudnn_benchmark": (both, bool(config.cudnn_benchmark), not_cuda),
        "tf32": (both, bool(config.tf32), not_cuda),
        # On CUDA tf32 is what sets high.
        "matmul_precision": (
            ("medium", None),
            config.matmul_precision,
            "has no effect here" if device == "mps" else "",
        ),
        "threads": (counts, traits.threads, "" if device == "cpu" else f"the {device} computes"),
        "data.num_workers": (
            [0, *counts],
            traits.workers,
            "the samples are in memory" if traits.workers is None else "",
        ),
    }
    return {
        "optimizer.fused": _kernel(config, traits, "fused", "foreach"),
        "optimizer.foreach": _kernel(config, traits, "foreach", "fused"),
        "data.placement": _placement(config, traits),
        **{
            name: why or [{name: value} for value in values if value != now]
            for name, (values, now, why) in rows.items()
        },
    }


def _kernel(config: Bench, traits: RunTraits, name: str, other: str) -> str | list[dict[str, Any]]:
    """The toggle of one of the ways in which an optimizer updates many tensors, of which only one can be on."""
    if name not in traits.kernels:
        return f"{config.optimizer['_target_']} does not have it"
    switched = not traits.kernels[name]
    instead = {f"optimizer.{other}": False} if switched and other in traits.kernels else {}
    return [{f"optimizer.{name}": switched, **instead}]


def _why_not_compiled(config: Bench, traits: RunTraits) -> str:
    """The reason why compiling is not tried: the CPU computes, and the user does not ask for it."""
    if traits.device != "cpu" or "compile" in (config.toggles or ()):
        return ""
    return "takes a minute to compile on the CPU; toggles=[compile,performance] measures it"


def _placement(config: Bench, traits: RunTraits) -> str | list[dict[str, Any]]:
    if traits.workers is not None and config.data.placement != "disk":
        return "the samples are read one by one"
    places = ["disk", "ram"] if traits.device == "cpu" else ["disk", "ram", "device"]
    now = "ram" if traits.workers is None and traits.device == "cpu" else config.data.placement
    # Samples in memory allow no other number of workers.
    automatic = {} if config.data.num_workers == "auto" else {"data.num_workers": "auto"}
    return [{"data.placement": place, **(automatic if place != "disk" else {})} for place in places if place != now]


def _presets(config: Bench, sources: Sources) -> list[Candidate]:
    """The options of the group `performance` that are not the baseline itself."""
    found = []
    now = keys.flatten(to_plain(config))
    for option in sources.options("performance"):
        content = yaml.safe_load(text_of(option.path)) or {}
        settings = keys.flatten({key: value for key, value in content.items() if key not in ("defaults", "hydra")})
        if any(now.get(key) != value for key, value in settings.items()):
            found.append(Candidate("preset", (f"performance={option.name}",), settings))
    return found
