"""`bench`: the toggles, compared on this machine."""

from __future__ import annotations

from typing import Any

from runner.base.files import write_json
from runner.base.secrets import mask_words
from runner.config.app import Composition
from runner.config.schema.verbs import Bench
from runner.config.targets import called
from runner.lab.bench.candidate_runner import CandidateRunner, Workbench
from runner.lab.bench.comparison import Comparison
from runner.run.from_checkpoint import config_and_checkpoint, output_folder
from runner.tracking.environment import environment
from runner.tracking.plots import bars
from runner.tracking.verb_report import Report


def run(composition: Composition) -> float:
    """Compare the config with each toggle.

    Returns:
        Samples a second of what is recommended, for sweepers.
    """
    config, _ = config_and_checkpoint(composition, Bench)
    report = Report(config.json)
    bench = Workbench(config, composition)
    # Toggles change switches of the whole process, so they are put back whatever happens
    try:
        results, best, found = Comparison(config, bench, report, composition.sources).run()
    finally:
        bench.close()
        # torch's switches are set again, for the next job of a sweep or of this process
        CandidateRunner(bench).configure()
    folder = output_folder(None, composition.job_dir or composition.run_dir, config.output_root, "benchmarks")
    picture, path = folder / "bench.png", folder / "bench.json"
    names, speeds = [result.candidate.name for result in results], [result.samples_per_s for result in results]
    spreads = [(speed.median, speed.low, speed.high) for speed in speeds]
    title = f"{config.name}, {called(config.model['_target_'], config.model.get('name'))} on {found['device']}"
    bars(names, spreads, spreads[0][0], "samples/s, median and quartiles", target=picture, title=title)
    record: dict[str, Any] = {"overrides": mask_words(composition.overrides), **found}
    record |= {"environment": environment(), "written": [str(path), str(picture)]}
    write_json(path, record)
    if not report.json(record):
        report.line(f"recommended: {' '.join(best.candidate.words) or 'nothing to change'}")
        report.folder(folder)
    return best.samples_per_s.median
