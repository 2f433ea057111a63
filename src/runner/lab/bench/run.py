"""`bench`: the toggles, each compared with the config as it is by short trainings in turn."""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runner.base.cores import cores
from runner.base.errors import UserError, first_line
from runner.base.files import write_json
from runner.base.secrets import mask_words
from runner.config.composition import Composition
from runner.config.load import resolve_changes
from runner.config.schema.verbs import Bench
from runner.config.space import text_of
from runner.config.targets import called
from runner.data.workers import WorkerLoader
from runner.lab.bench.candidates import BASELINE, Candidate, RunTraits, candidates
from runner.lab.short_runs import Stopwatch, callback, run_short, words_from, words_of
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint, output_folder
from runner.run.run import Run
from runner.tracking.environment import environment
from runner.tracking.formats import amount, number
from runner.tracking.plots import bars
from runner.tracking.verb_report import Report, mib
from runner.train import build_run, busy

_FEWEST_ROUNDS = 3  # however long they take: fewer show no spread
_LEAST_S = 0.5  # of a measurement: less measures the scheduler of the system more than the steps
_TOO_SLOW = 5  # times as long as the baseline: a measurement ends then, with fewer steps
_WARMUP = 3  # steps that load kernels, compile and choose algorithms
# A gain that nobody would notice is no reason to change a config, however surely it was measured
_SMALLEST_GAIN = 1.02


class Result:
    """The measurements of a candidate."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.speeds: list[float] = []  # samples a second, of each round
        self.ratios: list[float] = []  # speed relative to the baseline's in the same round
        self.step_ms: list[float] = []
        self.peak_bytes = 0
        self.cpu_wait = 0.0  # see `runner.runtime.core_wait.core_wait`
        self.wall_s = 0.0  # of the fastest run, from its start to its end

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
        if self.candidate is BASELINE:
            return ""
        if not self.candidate.same_training:
            return "another training"
        if self.ratio >= _SMALLEST_GAIN and min(self.ratios) > 1:
            return ""
        return "slower" if max(self.ratios) < 1 else "no clear gain"

    def record(self) -> dict[str, Any]:
        """All figures, for programs."""
        return {
            "kind": self.candidate.kind,
            "overrides": list(self.candidate.words),
            "settings": self.candidate.settings,
            "samples_per_s": _spread(self.speeds),
            "step_ms": _spread(self.step_ms),
            "ratio": _spread(self.ratios),
            "ratios": self.ratios,
            "verdict": self.verdict,
            "peak_memory_bytes": self.peak_bytes,
            "wall_s": self.wall_s,
        }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def run(composition: Composition) -> float:
    """Compare the config with each toggle.

    Returns:
        Samples a second of what is recommended, for sweepers.
    """
    config, start = config_and_checkpoint(composition, Bench)
    report = Report(config.json)
    # One run in this process shows what is measured, and which toggles apply to it
    built = build_run(config, make_cache=start is None, fresh=start is None)
    report.header(f"{config.name}  as configured", describe(config, built))
    report.warnings(built.warnings)
    traits, device = traits_of(built), built.device
    built.data.close()
    del built
    tried, skipped = _valid(*candidates(config, traits, composition.sources), config, composition)
    measure = functools.partial(_measure, config, composition if start is None else None, traits.workers)
    report.line(f"measuring {amount(len(tried), 'candidate')} in turn with it, each run in a separate process")
    results, notes = _compare(config, tried, skipped, measure, report)
    reference, *others = results
    # The fastest first, as that is what a reader looks for
    results = [reference, *sorted(others, key=lambda result: -result.ratio)]
    best = next((result for result in results[1:] if not result.verdict), reference)
    _show(report, results, skipped, notes, device)
    folder = output_folder(None, composition.job_dir or composition.run_dir, config.output_root, "benchmarks")
    picture, path = folder / "bench.png", folder / "bench.json"
    spreads = [(statistics.median(each.speeds), min(each.speeds), max(each.speeds)) for each in results]
    title = f"{config.name}, {called(config.model['_target_'], config.model.get('name'))} on {device}"
    names = [result.candidate.name for result in results]
    bars(names, spreads, spreads[0][0], "samples/s, median and range", target=picture, title=title)
    record: dict[str, Any] = {
        "overrides": mask_words(composition.overrides),
        "device": str(device),
        "recommended": list(best.candidate.words),
        "left_out": [{"what": what, "why": why} for what, why in skipped],
        "notes": notes,
        "steps": config.steps,
        "baseline": reference.record(),
        "candidates": [result.record() for result in results[1:]],
        "environment": environment(),
        "written": [str(path), str(picture)],
    }
    write_json(path, record, named=True)
    if not report.json(record):
        report.lines(*busy(max(result.cpu_wait for result in results)))
        report.line(f"recommended: {' '.join(best.candidate.words) or 'nothing to change'}")
        report.folder(folder)
    return statistics.median(best.speeds)


def _valid(
    listed: list[Candidate], skipped: list[tuple[str, str]], config: Bench, composition: Composition
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """The candidates whose settings are allowed; the others are added to what is skipped."""
    tried = []
    for candidate in listed:
        _, problems = resolve_changes(config, candidate.settings, composition)
        if problems:
            skipped.append((candidate.name, "; ".join(f"{problem.key}: {problem.message}" for problem in problems)))
        else:
            tried.append(candidate)
    return tried, skipped


def _measure(
    config: Bench, composition: Composition | None, workers: int | None, result: Result, most_s: float | None
) -> float:
    """Measure a candidate once more, for at most so many seconds; returns how many the steps took.

    `composition` has the words that give the config; None if a checkpoint does. `workers` read samples.
    """
    with tempfile.TemporaryDirectory(prefix="runner-bench-") as scratch:
        target, began = Path(scratch) / "measured.json", time.perf_counter()
        # Batches that workers have read ahead must not make many of them look faster
        ahead = 0 if workers is None else -(-max(workers, cores()) * config.data.prefetch // config.accumulate)
        times = {"warmup": _WARMUP + ahead, "steps": config.steps, "least_s": _LEAST_S, "most_s": most_s}
        # However long the run would be, it lasts until it is measured
        long = ("epochs=100000", "max_steps=null", "log.every_steps=1000000")
        quiet = (*long, callback(Stopwatch, target=str(target), **times))
        # The config of a checkpoint is measured with new weights
        written = Path(scratch) / "conf"
        words = words_of(composition, Bench, *quiet) if composition else words_from(config, written, *quiet)
        settings = [f"{key}={text_of(value)}" for key, value in result.candidate.settings.items()]
        run_short([*words, *settings], Path(scratch) / "run")
        if not target.is_file():
            raise UserError("the run ended before it was measured")
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    wall_s = time.perf_counter() - began
    result.speeds.append(found["samples"] / found["seconds"])
    result.step_ms.append(1000 * found["seconds"] / found["steps"])
    result.peak_bytes = max(result.peak_bytes, int(found["peak_bytes"]))
    result.cpu_wait = max(result.cpu_wait, found["cpu_wait"] or 0.0)
    result.wall_s = min(result.wall_s or wall_s, wall_s)
    return float(found["seconds"])


def _compare(
    config: Bench,
    tried: list[Candidate],
    skipped: list[tuple[str, str]],
    measure: Callable[[Result, float | None], float],
    report: Report,
) -> tuple[list[Result], list[str]]:
    """Measure the baseline and the candidates round by round, until the time is over; returns results and notes."""
    deadline = time.perf_counter() + config.budget_s
    baseline, results, notes = Result(BASELINE), [Result(candidate) for candidate in tried], list[str]()
    with report.counting("bench", config.repeats * (1 + len(results))) as begin:
        for done in range(config.repeats):
            if done >= _FEWEST_ROUNDS and time.perf_counter() > deadline:
                notes.append(
                    f"{done} rounds instead of {config.repeats}, because time ran out; a larger budget_s allows more"
                )
                break
            begin(BASELINE.name)
            usual = measure(baseline, None)
            baseline.ratios.append(1.0)
            # One that fails, in whichever round, is dropped, and the others continue
            for result in list(results):
                begin(result.candidate.name)
                why = "no time was left; set a larger budget_s, or fewer toggles"
                if result.speeds or time.perf_counter() <= deadline:
                    try:
                        measure(result, _TOO_SLOW * usual)
                        result.ratios.append(result.speeds[-1] / baseline.speeds[-1])
                        continue
                    except UserError as error:
                        why = first_line(error)
                skipped.append((result.candidate.name, why))
                results.remove(result)
    return [baseline, *results], notes


def _show(
    report: Report, results: list[Result], skipped: list[tuple[str, str]], notes: list[str], device: torch.device
) -> None:
    memory = "peak MiB" if device.type == "cuda" else "peak RSS MiB"
    rows = [
        [
            result.candidate.name,
            number(statistics.median(result.speeds)),
            number(statistics.median(result.step_ms)),
            f"{result.ratio:.2f}",
            f"{min(result.ratios):.2f} to {max(result.ratios):.2f}",
            mib(result.peak_bytes, 1),
            f"{result.wall_s:.1f}",
            "" if result is results[0] else result.verdict or "pays",
        ]
        for result in results
    ]
    columns = ["overrides", "samples/s", "step ms", "ratio", "range", memory, "run s", "verdict"]
    report.table("medians of runs in turn", columns, rows)
    report.skipped(skipped)
    report.lines(*(f"note: {note}" for note in notes))


def traits_of(built: Run) -> RunTraits:
    """The properties of a built baseline that decide which toggles apply."""
    precisions: dict[torch.dtype | None, bool | str] = {None: False, torch.bfloat16: "bf16", torch.float16: "fp16"}
    loader = built.data.train.loader
    return RunTraits(
        device=built.device.type,
        cores=cores(),
        threads=torch.get_num_threads(),
        precision=precisions[built.precision.dtype],
        workers=loader.workers if isinstance(loader, WorkerLoader) else None,
        kernels=built.kernels.arguments,
        convolutions=any(parameter.ndim == 4 for parameter in built.model.parameters()),
    )
