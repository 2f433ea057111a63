"""One call of `bench`, from the config to the last line."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from omegaconf import DictConfig

from runner.config.app import Composition
from runner.config.schema.bench import Bench
from runner.config.secrets import mask_words
from runner.tracking.console import Console
from runner.tracking.files import finite
from runner.verbs._checkpoint import folder_for, line_or_checkpoint
from runner.verbs._work import guarded
from runner.verbs.bench import report
from runner.verbs.bench.candidate_runner import Stand, Workbench
from runner.verbs.bench.loading import Loading
from runner.verbs.bench.stats import Spread, recommended
from runner.verbs.bench.toggles import Comparison


def run(cfg: DictConfig) -> float | None:
    """Compare once: the entry point that Hydra calls.

    Returns:
        Samples a second of what is recommended, for sweepers.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    return guarded(_bench, cfg)


def _bench(composition: Composition) -> float:
    config, _ = line_or_checkpoint(composition, Bench)
    # With json=true, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if config.json else None)
    bench = Workbench(config, composition)
    try:
        found = (_toggles if config.part == "train" else _data)(composition, config, bench, console)
    finally:
        bench.close()
        Stand(bench).configure()  # the next job of a sweep, or of this process, finds what it would have found
    folder = folder_for(None, composition.job_dir or composition.run_dir, config.output_root, "benchmarks")
    title = f"{config.name}, {str(config.model['_target_']).rsplit('.', 1)[1]} on {found.record['device']}"
    record = report.write(found.record, folder, found.speeds, found.speeds[0][1].median, title)
    if config.json:
        print(json.dumps(finite(record)))
    else:
        console.line(report.recommendation(record["recommended"]))
        print(folder, flush=True)
    return found.best


@dataclasses.dataclass
class Found:
    """What is written and returned, whichever part was compared.

    Attributes:
        record: for `bench.json`.
        speeds: samples a second by name, for the picture.
        best: samples a second of what is recommended.
    """

    record: dict[str, Any]
    speeds: list[tuple[str, Spread]]
    best: float


def _toggles(composition: Composition, config: Bench, bench: Workbench, console: Console) -> Found:
    found = Comparison(composition, config, bench, console).findings()
    results = report.in_order(found.results)
    baseline, best = results[0], recommended(results) or results[0]
    report.show_results(console, results, found.device, found.sizes.repeats)
    spread = "" if config.tolerance is not None else f" ({1 + len(found.seed_losses)} seeds differ by that much)"
    console.line(
        f"losses are means over the first {found.sizes.compare} steps; "
        f"a difference up to {found.allowed:.2g} is accepted{spread}"
    )
    _tell(console, found.left_out, found.notes)
    record = {
        "part": "train",
        "overrides": mask_words(composition.words),
        "device": str(found.device),
        "recommended": list(best.candidate.words),
        "sizes": dataclasses.asdict(found.sizes),
        "seed_losses": found.seed_losses,
        "allowed_loss_difference": found.allowed,
        "baseline": report.result_record(baseline, baseline),
        "candidates": [report.result_record(result, baseline) for result in results[1:]],
        "left_out": [{"what": what, "why": why} for what, why in found.left_out],
        "notes": found.notes,
    }
    speeds = [(result.candidate.name, result.samples_per_s) for result in results]
    return Found(record, speeds, best.samples_per_s.median)


def _data(composition: Composition, config: Bench, bench: Workbench, console: Console) -> Found:
    found = Loading(config, bench, console).findings()
    found.show(console)
    _tell(console, found.left_out, found.notes)
    return Found(
        {"part": "data", "overrides": mask_words(composition.words)} | found.record(),
        found.speeds(),
        found.best.both.median,
    )


def _tell(console: Console, left_out: list[tuple[str, str]], notes: list[str]) -> None:
    report.show_left_out(console, left_out)
    for note in notes:
        console.line(f"note: {note}")
