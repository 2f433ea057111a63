"""Which settings `bench` tries: the user's own config with one toggle switched, with a preset, or with several toggles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, get_args

import yaml

from runner.config import keys
from runner.config.schema.verbs import Bench, Toggle
from runner.config.sources import Sources, text_of
from runner.config.validate import shown

Kind = Literal["baseline", "toggle", "varied", "preset", "combination"]

# Keys that say how the same training is computed. Others may be varied, but a faster value is not the same training.
SPEED_ALONE = frozenset(get_args(Toggle)) | {
    *("data.pin_memory", "data.non_blocking", "data.persistent_workers", "data.cache", "data.cache_dir"),
    *("compiler.mode", "compiler.fullgraph", "compiler.dynamic"),
}
# Only one of these makes sense at a time.
_EXCLUSIVE = {"optimizer.fused": "optimizer.kernels", "optimizer.foreach": "optimizer.kernels"}
_PREFETCHED = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """The user's config with some keys set.

    Attributes:
        kind: why it is tried.
        words: the overrides that a user would type for it; none for the baseline.
        settings: dotted keys and their values, as pairs.
        dimensions: what it switches; candidates that share one of these cannot be combined.
    """

    kind: Kind
    words: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    dimensions: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The overrides as one text."""
        return " ".join(self.words) or "as configured"

    @property
    def same_training(self) -> bool:
        """Whether it changes nothing but how the training is computed."""
        return self.kind == "preset" or all(key in SPEED_ALONE for key, _ in self.settings)

    def clashes(self, other: Candidate) -> bool:
        """Whether both switch the same thing."""
        return bool(self.dimensions & other.dimensions)


BASELINE = Candidate("baseline")


def setting(kind: Kind, **values: Any) -> Candidate:
    """A candidate from keys (with `__` for a dot) and values."""
    pairs = tuple((key.replace("__", "."), value) for key, value in values.items())
    words = tuple(f"{key}={shown(value)}" for key, value in pairs)
    return Candidate(kind, words, pairs, frozenset(_EXCLUSIVE.get(key, key) for key, _ in pairs))


def together(first: Candidate, second: Candidate) -> Candidate:
    """Both at once."""
    settings, dimensions = first.settings + second.settings, first.dimensions | second.dimensions
    return Candidate("combination", first.words + second.words, settings, dimensions)


@dataclass(frozen=True)
class Facts:
    """What decides which toggles apply, known once the baseline is built.

    Attributes:
        device: type of the device.
        cores: CPU cores that this process may use.
        threads: CPU threads that torch uses.
        precision: `false`, `bf16` or `fp16`, as the forward pass is computed.
        in_memory: whether the samples are in memory.
        workers: processes that read them otherwise.
        kernels: those of `fused` and `foreach` that the optimizer has, and whether they are on.
        convolutions: whether the model has weights of four dimensions.
        no_compiler: why nothing can be compiled here, or an empty string.
        automatic: what `amp=auto` computes in on this device.
    """

    device: str
    cores: int
    threads: int
    precision: bool | str
    in_memory: bool
    workers: int
    kernels: Mapping[str, bool]
    convolutions: bool
    no_compiler: str = ""
    automatic: bool | str = False


Skipped = tuple[str, str]
"""What is not measured, and why."""

_Found = list[Candidate] | str  # or why the toggle does not apply


def candidates(config: Bench, facts: Facts, sources: Sources) -> tuple[list[Candidate], list[Skipped]]:
    """What to compare with the baseline, one toggle at a time; and what does not apply, with the reason."""
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    for name, toggle in _TOGGLES.items():
        if config.toggles is None or name in config.toggles:
            made = toggle(config, facts)
            if isinstance(made, str):
                skipped.append((name, made))
            else:
                found += made
    found += varied(config)
    if "performance" in config.toggles if config.toggles is not None else config.combine:
        presets, others = _presets(config, facts, sources)
        found += presets
        skipped += others
    return list({candidate.name: candidate for candidate in found}.values()), skipped


def data_candidates(config: Bench, facts: Facts) -> list[Candidate]:
    """Other ways for the samples to reach the device."""
    found: list[Candidate] = []
    for name, toggle in (("placement", _placement), ("num_workers", _num_workers), ("prefetch", _prefetch)):
        if config.toggles is None or f"data.{name}" in config.toggles:
            made = toggle(config, facts)
            found += [] if isinstance(made, str) else made
    return list({candidate.name: candidate for candidate in found + varied(config)}.values())


def varied(config: Bench) -> list[Candidate]:
    """The values of `vary` that differ from the baseline's; its keys may be nested or dotted."""
    found = []
    for key, given in (keys.flatten(config.vary) if config.vary else {}).items():
        now = _value(config, key)
        for value in given if isinstance(given, list) else [given]:
            if value != now or type(value) is not type(now):
                found.append(setting("varied", **{key: value}))
    return found


def _value(config: Bench, key: str) -> Any:
    def inner(value: Any, part: str) -> Any:
        return value.get(part) if isinstance(value, dict) else getattr(value, part, None)

    return reduce(inner, key.split("."), config)


def _others(key: str, values: tuple[Any, ...] | list[Any], now: Any) -> list[Candidate]:
    """A toggle's values other than the present one."""
    return [setting("toggle", **{key: value}) for value in values if value != now]


def _amp(config: Bench, facts: Facts) -> _Found:
    return _others("amp", (False, "bf16", "fp16"), facts.precision)


def _channels_last(config: Bench, facts: Facts) -> _Found:
    if not facts.convolutions:
        return "the model has no convolution"
    return _others("channels_last", (True, False), config.channels_last)


def _compile(config: Bench, facts: Facts) -> _Found:
    now = True if config.compile == "model" else config.compile
    if not now and facts.no_compiler:
        return facts.no_compiler
    if not now and not may_compile(config, facts):
        return "takes a minute to compile on the CPU; toggles=[compile] measures it"
    return _others("compile", (False, True, "step"), now)


def may_compile(config: Bench, facts: Facts) -> bool:
    """Whether compiling is worth its time here: on the CPU only if the user asks for it."""
    return facts.device != "cpu" or (config.toggles is not None and "compile" in config.toggles)


def _activation_checkpointing(config: Bench, facts: Facts) -> _Found:
    return _others("activation_checkpointing", (True, False), config.activation_checkpointing is not False)


def _kernel(name: str) -> Callable[[Bench, Facts], _Found]:
    """The toggle of one of the ways in which an optimizer updates many tensors."""
    key, other = f"optimizer.{name}", "foreach" if name == "fused" else "fused"

    def toggle(config: Bench, facts: Facts) -> _Found:
        if name not in facts.kernels:
            return f"{config.optimizer['_target_']} does not have it"
        values = {key: not facts.kernels[name]}
        if values[key] and config.optimizer.get(other):
            values[f"optimizer.{other}"] = False
        return [setting("toggle", **values)]

    return toggle


def _cuda_only(key: str) -> Callable[[Bench, Facts], _Found]:
    def toggle(config: Bench, facts: Facts) -> _Found:
        if facts.device != "cuda":
            return f"has no effect on {facts.device}: it is a setting of CUDA's"
        return _others(key, (True, False), bool(getattr(config, key)))

    return toggle


def _matmul_precision(config: Bench, facts: Facts) -> _Found:
    if facts.device not in ("cuda", "cpu"):
        return f"has no effect on {facts.device}"
    # On CUDA tf32 is what sets high.
    return _others("matmul_precision", ("medium", None), config.matmul_precision)


def _threads(config: Bench, facts: Facts) -> _Found:
    if facts.device != "cpu":
        return f"the {facts.device} computes"
    return _others("threads", _counts(facts.cores), facts.threads) or "there is one core"


def _counts(cores: int) -> list[int]:
    """1, 2, 4, ... and the number of cores itself."""
    return sorted({*(2**power for power in range(cores.bit_length()) if 2**power <= cores), cores})


def _placement(config: Bench, facts: Facts) -> _Found:
    memory = ["ram", "device"] if facts.device != "cpu" else ["ram"]
    if facts.in_memory:
        places = ["disk", *memory] if facts.device != "cpu" else ["disk"]
    elif config.data.placement == "disk":
        places = memory
    else:
        return "the samples are read one by one"
    found = []
    for place in places:
        values: dict[str, Any] = {"data.placement": place}
        if place != "disk" and config.data.num_workers != "auto":
            values["data.num_workers"] = "auto"  # samples in memory do not allow another value
        if place != config.data.placement:
            found.append(setting("toggle", **values))
    return found


def _num_workers(config: Bench, facts: Facts) -> _Found:
    if facts.in_memory:
        return "the samples are in memory"
    return _others("data.num_workers", [0, *_counts(facts.cores)], facts.workers)


def _prefetch(config: Bench, facts: Facts) -> _Found:
    if facts.in_memory or facts.workers == 0:
        return "no worker reads ahead"
    return _others("data.prefetch", _PREFETCHED, config.data.prefetch)


def _presets(config: Bench, facts: Facts, sources: Sources) -> tuple[list[Candidate], list[Skipped]]:
    """The options of the group `performance` that are not the baseline itself."""
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    for option in sources.options("performance"):
        word = f"performance={option.name}"
        content = yaml.safe_load(text_of(option.path)) or {}
        settings = keys.flatten({key: value for key, value in content.items() if key not in ("defaults", "hydra")})
        if all(_changes_nothing(config, facts, key, value) for key, value in settings.items()):
            continue
        if settings.get("compile") and not config.compile and (facts.no_compiler or not may_compile(config, facts)):
            skipped.append((word, facts.no_compiler or "compiles; toggles=[compile,performance] measures it"))
            continue
        found.append(Candidate("preset", (word,), tuple(settings.items()), frozenset(settings)))
    return found, skipped


def _changes_nothing(config: Bench, facts: Facts, key: str, value: Any) -> bool:
    if key == "amp" and value == "auto":
        return facts.automatic == facts.precision
    if key == "channels_last" and not facts.convolutions:
        return True
    return bool(_value(config, key) == value)


_TOGGLES: dict[str, Callable[[Bench, Facts], _Found]] = {
    "amp": _amp,
    "channels_last": _channels_last,
    "optimizer.fused": _kernel("fused"),
    "optimizer.foreach": _kernel("foreach"),
    "activation_checkpointing": _activation_checkpointing,
    "compile": _compile,
    "cudnn_benchmark": _cuda_only("cudnn_benchmark"),
    "tf32": _cuda_only("tf32"),
    "matmul_precision": _matmul_precision,
    "threads": _threads,
    "data.placement": _placement,
    "data.num_workers": _num_workers,
}
