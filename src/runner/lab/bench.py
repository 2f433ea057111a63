"""`bench`: the toggles for speed and memory, each compared with the config as it is by short trainings in turn."""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import yaml

from runner.base.cores import cores
from runner.base.errors import UserError, first_line
from runner.base.files import write_json
from runner.base.secrets import mask_words
from runner.config import keys, sources
from runner.config.composition import Composition
from runner.config.load import problems_with
from runner.config.schema.verbs import Bench, Toggle
from runner.config.targets import called
from runner.config.validate import shown
from runner.data.workers import WorkerLoader
from runner.lab.short_runs import Stopwatch, callback, run_short, words_from
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint, output_folder
from runner.run.run import Run
from runner.tracking.environment import environment
from runner.tracking.formats import amount, number
from runner.tracking.plots import bars
from runner.tracking.verb_report import Report, mib
from runner.train import build_run, busy

# Keys that say how the same training is computed. Others may be varied, but a faster value is not the same training.
SPEED_ALONE = frozenset(get_args(Toggle)) | {
    *("data.prefetch", "data.pin_memory", "data.non_blocking", "data.persistent_workers"),
    *("data.cache", "data.cache_dir"),
    *("compiler.mode", "compiler.fullgraph", "compiler.dynamic"),
}
_FEWEST_ROUNDS = 3  # however long they take: fewer show no spread
_LEAST_S = 0.5  # of a measurement: less measures the scheduler of the system more than the steps
_TOO_SLOW = 5  # times as long as the baseline: a measurement ends then, with fewer steps
_WARMUP = 3  # steps that load kernels, compile and choose algorithms
# A gain that nobody would notice is no reason to change a config, however surely it was measured
_SMALLEST_GAIN = 1.02

Toggled = str | list[dict[str, Any]]
"""The settings to try for a toggle, other than the present one; or why it does not apply."""


@dataclass(eq=False)
class Candidate:
    """The user's config with some keys set, why it is tried, and what was measured, a value for each round."""

    kind: Literal["baseline", "toggle", "varied", "preset"]
    settings: Mapping[str, Any] = field(default_factory=dict)  # dotted keys and their values
    preset: str = ""  # the option that has them, if one does
    speeds: list[float] = field(default_factory=list)  # samples a second
    ratios: list[float] = field(default_factory=list)  # speed relative to the baseline's in the same round
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    cpu_wait: float = 0.0  # see `runner.runtime.hardware_metrics.core_wait`
    wall_s: float = 0.0  # of the fastest run, from its start to its end

    @property
    def words(self) -> list[str]:
        """The overrides that a user would type for it; none for the baseline."""
        if self.preset:
            return [f"performance={self.preset}"]
        return [f"{key}={shown(value)}" for key, value in self.settings.items()]

    @property
    def name(self) -> str:
        """The overrides as one text."""
        return " ".join(self.words) or "as configured"

    @property
    def ratio(self) -> float:
        """Median speed relative to the baseline, above 1 for faster."""
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> str:
        """The reason why it is not recommended; empty if it pays, and for the baseline.

        A gain pays if it is at least 2 % in the median, and no round is slower: with five rounds, chance alone makes all of
        them faster for 1 in 32 candidates.
        """
        if self.kind == "baseline":
            return ""
        if self.kind != "preset" and not self.settings.keys() <= SPEED_ALONE:
            return "another training"
        if self.ratio >= _SMALLEST_GAIN and min(self.ratios) > 1:
            return ""
        return "slower" if max(self.ratios) < 1 else "no clear gain"

    def record(self) -> dict[str, Any]:
        """All figures, for programs."""
        measured = {"samples_per_s": self.speeds, "step_ms": self.step_ms, "ratio": self.ratios}
        return {
            "kind": self.kind,
            "overrides": self.words,
            "settings": self.settings,
            **{name: dict(zip(("median", "low", "high"), _spread(of), strict=True)) for name, of in measured.items()},
            "ratios": self.ratios,
            "verdict": self.verdict,
            "peak_memory_bytes": self.peak_bytes,
            "wall_s": self.wall_s,
        }


def candidates(config: Bench, built: Run, found_in: sources.Sources) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates, one toggle at a time, for a built baseline; and those that do not apply, by name with the reason."""
    found, skipped, now = list[Candidate](), dict[str, str](), keys.flatten(keys.to_plain(config))
    # Each toggle alone, as only then its effect is known
    for name, made in _toggles(config, built).items():
        if config.toggles is None or name in config.toggles:
            if isinstance(made, str):
                skipped[name] = made
            else:
                found += [Candidate("toggle", settings) for settings in made]
    # The keys of `vary` may be nested or dotted
    for key, given in keys.flatten(config.vary).items():
        values = given if isinstance(given, list) else [given]
        found += [Candidate("varied", {key: value}) for value in values if value != now.get(key)]
    # The presets combine several toggles, and are tried because these may help or hinder each other
    for option in found_in.options("performance") if config.toggles is None or "performance" in config.toggles else ():
        content = yaml.safe_load(sources.text_of(option.path)) or {}
        settings = keys.flatten({key: value for key, value in content.items() if key not in ("defaults", "hydra")})
        preset = Candidate("preset", settings, option.name)
        if all(now.get(key) == value for key, value in settings.items()):
            continue
        if settings.get("compile") and not config.compile and (why := _why_not_compiled(config, built)):
            skipped[preset.name] = why
        else:
            found.append(preset)
    return list({candidate.name: candidate for candidate in found}.values()), skipped


def _toggles(config: Bench, built: Run) -> dict[str, Toggled]:
    device, both, workers = built.device.type, (True, False), workers_of(built)
    precision = {None: False, torch.bfloat16: "bf16", torch.float16: "fp16"}[built.precision.dtype]
    convolutions = any(parameter.ndim == 4 for parameter in built.model.parameters())
    # Powers of two and all cores are enough to see the trend
    counts = sorted({*(2**power for power in range(cores().bit_length())), cores()})
    compiled = True if config.compile == "model" else config.compile
    not_cuda = "" if device == "cuda" else f"has no effect on {device}: it is a setting of CUDA's"
    rows: dict[str, tuple[Sequence[Any], Any, str]] = {  # values, the present one, why it does not apply
        "amp": ((False, "bf16", "fp16"), precision, ""),
        "channels_last": (both, config.channels_last, "" if convolutions else "the model has no convolution"),
        "activation_checkpointing": (both, config.activation_checkpointing is not False, ""),
        "compile": ((False, True, "step"), compiled, "" if compiled else _why_not_compiled(config, built)),
        "cudnn_benchmark": (both, bool(config.cudnn_benchmark), not_cuda),
        "tf32": (both, bool(config.tf32), not_cuda),
        # On CUDA tf32 is what sets high.
        "matmul_precision": (
            ("medium", None),
            config.matmul_precision,
            "has no effect here" if device == "mps" else "",
        ),
        "threads": (counts, torch.get_num_threads(), "" if device == "cpu" else f"the {device} computes"),
        "data.num_workers": ([0, *counts], workers, "the samples are in memory" if workers is None else ""),
    }
    found = {f"optimizer.{name}": _kernel(config, built, name) for name in ("fused", "foreach")}
    found["data.placement"] = _placement(config, device, workers)
    for name, (values, now, why) in rows.items():
        found[name] = why or [{name: value} for value in values if value != now]
    return found


def workers_of(built: Run) -> int | None:
    """Processes that read samples; None if these are in memory."""
    loader = built.data.train.loader
    return loader.workers if isinstance(loader, WorkerLoader) else None


def _kernel(config: Bench, built: Run, name: str) -> Toggled:
    """The toggle of one of the ways in which an optimizer updates many tensors, of which only one can be on."""
    kernels, other = built.kernels.arguments, {"fused": "foreach", "foreach": "fused"}[name]
    if name not in kernels:
        return f"{config.optimizer['_target_']} does not have it"
    switched = not kernels[name]
    instead = {f"optimizer.{other}": False} if switched and other in kernels else {}
    return [{f"optimizer.{name}": switched, **instead}]


def _why_not_compiled(config: Bench, built: Run) -> str:
    if built.device.type != "cpu" or "compile" in (config.toggles or ()):
        return ""
    return "takes a minute to compile on the CPU; toggles=[compile,performance] measures it"


def _placement(config: Bench, device: str, workers: int | None) -> Toggled:
    if workers is not None and config.data.placement != "disk":
        return "the samples are read one by one"
    places = ["disk", "ram"] if device == "cpu" else ["disk", "ram", "device"]
    now = "ram" if workers is None and device == "cpu" else config.data.placement
    # Samples in memory allow no other number of workers.
    automatic = {} if config.data.num_workers == "auto" else {"data.num_workers": "auto"}
    return [{"data.placement": place, **(automatic if place != "disk" else {})} for place in places if place != now]


def _spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def run(composition: Composition) -> float:
    """Compare the config with each toggle; returns samples a second of what is recommended, for sweepers."""
    config, start = config_and_checkpoint(composition, Bench)
    report = Report(config.json)
    # One run in this process shows what is measured, and which toggles apply to it
    built = build_run(config, make_cache=start is None, fresh=start is None)
    report.header(f"{config.name}  as configured", describe(config, built))
    report.warnings(built.warnings)
    tried, skipped = candidates(config, built, composition.sources)
    device, workers = built.device, workers_of(built)
    built.data.close()
    del built
    for candidate in list(tried):
        if problems := problems_with(config, candidate.settings, composition):
            skipped[candidate.name] = "; ".join(f"{problem.key}: {problem.message}" for problem in problems)
            tried.remove(candidate)
    report.line(f"measuring {amount(len(tried), 'candidate')} in turn with it, each run in a separate process")
    measured, notes = compare(config, tried, skipped, functools.partial(_measure, config, workers), report)
    best, (baseline, *others) = recommended(measured), measured
    # The fastest first, as that is what a reader looks for
    measured = [baseline, *sorted(others, key=lambda each: -each.ratio)]
    rows = [
        [
            each.name,
            number(statistics.median(each.speeds)),
            number(statistics.median(each.step_ms)),
            f"{each.ratio:.2f}",
            f"{min(each.ratios):.2f} to {max(each.ratios):.2f}",
            mib(each.peak_bytes, 1),
            f"{each.wall_s:.1f}",
            "" if each is baseline else each.verdict or "pays",
        ]
        for each in measured
    ]
    memory = "peak MiB" if device.type == "cuda" else "peak RSS MiB"
    columns = ["overrides", "samples/s", "step ms", "ratio", "range", memory, "run s", "verdict"]
    report.table("medians of runs in turn", columns, rows)
    if skipped:
        report.table("skipped", ["what", "why"], [*map(list, skipped.items())])
    report.lines(*(f"note: {note}" for note in notes))
    folder = output_folder(None, composition.job_dir or composition.run_dir, config.output_root, "benchmarks")
    picture, path = folder / "bench.png", folder / "bench.json"
    spreads, names = [_spread(each.speeds) for each in measured], [each.name for each in measured]
    title = f"{config.name}, {called(config.model['_target_'], config.model.get('name'))} on {device}"
    bars(names, spreads, spreads[0][0], "samples/s, median and range", target=picture, title=title)
    record: dict[str, Any] = {
        "overrides": mask_words(composition.overrides),
        "device": str(device),
        "recommended": best.words,
        "left_out": [{"what": what, "why": why} for what, why in skipped.items()],
        "notes": notes,
        "steps": config.steps,
        "baseline": baseline.record(),
        "candidates": [each.record() for each in measured[1:]],
        "environment": environment(),
        "written": [str(path), str(picture)],
    }
    write_json(path, record, named=True)
    if not report.json(record):
        report.lines(*busy(max(each.cpu_wait for each in measured)))
        report.line(f"recommended: {' '.join(best.words) or 'nothing to change'}")
        report.folder(folder)
    return statistics.median(best.speeds)


def _measure(config: Bench, workers: int | None, candidate: Candidate, most_s: float | None) -> float:
    """Measure a candidate once more, for at most so many seconds; returns how many the steps took. `workers` read samples."""
    with tempfile.TemporaryDirectory(prefix="runner-bench-") as scratch:
        target, began = Path(scratch) / "measured.json", time.perf_counter()
        # Batches that workers have read ahead must not make many of them look faster
        ahead = 0 if workers is None else -(-max(workers, cores()) * config.data.prefetch // config.accumulate)
        times = {"warmup": _WARMUP + ahead, "steps": config.steps, "least_s": _LEAST_S, "most_s": most_s}
        # However long the run would be, it lasts until it is measured
        long = ("epochs=100000", "max_steps=null", "log.every_steps=1000000")
        words = words_from(config, Path(scratch) / "conf", *long, callback(Stopwatch, target=str(target), **times))
        run_short(words, candidate.settings, Path(scratch) / "run")
        if not target.is_file():
            raise UserError("the run ended before it was measured")
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    wall_s = time.perf_counter() - began
    candidate.speeds.append(found["samples"] / found["seconds"])
    candidate.step_ms.append(1000 * found["seconds"] / found["steps"])
    candidate.peak_bytes = max(candidate.peak_bytes, int(found["peak_bytes"]))
    candidate.cpu_wait = max(candidate.cpu_wait, found["cpu_wait"] or 0.0)
    candidate.wall_s = min(candidate.wall_s or wall_s, wall_s)
    return float(found["seconds"])


def compare(
    config: Bench,
    tried: list[Candidate],
    skipped: dict[str, str],
    measure: Callable[[Candidate, float | None], float],
    report: Report,
) -> tuple[list[Candidate], list[str]]:
    """Measure the baseline and the candidates round by round, until the time is over; returns these, and notes."""
    deadline = time.perf_counter() + config.budget_s
    baseline, notes = Candidate("baseline"), list[str]()
    with report.counting("bench", config.repeats * (1 + len(tried))) as begin:
        for done in range(config.repeats):
            if done >= _FEWEST_ROUNDS and time.perf_counter() > deadline:
                short = f"{done} rounds instead of {config.repeats}, because time ran out"
                notes.append(f"{short}; a larger budget_s allows more")
                break
            begin(baseline.name)
            usual = measure(baseline, None)
            baseline.ratios.append(1.0)
            for candidate in list(tried):
                begin(candidate.name)
                try:
                    if not candidate.speeds and time.perf_counter() > deadline:
                        raise UserError("no time was left; set a larger budget_s, or fewer toggles")
                    measure(candidate, _TOO_SLOW * usual)
                    candidate.ratios.append(candidate.speeds[-1] / baseline.speeds[-1])
                # One that fails, in whichever round, is dropped, and the others continue
                except UserError as error:
                    skipped[candidate.name] = first_line(error)
                    tried.remove(candidate)
    return [baseline, *tried], notes


def recommended(measured: Sequence[Candidate]) -> Candidate:
    """The fastest candidate that pays, or the baseline, which is the first."""
    return max((each for each in measured if not each.verdict), key=lambda each: each.ratio)
