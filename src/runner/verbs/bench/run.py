"""`bench`: the toggles, or the ways to the data, compared on this machine."""

from __future__ import annotations

from runner.config.app import Composition
from runner.config.schema.verbs import Bench
from runner.config.secrets import mask_words
from runner.verbs._checkpoint import config_and_checkpoint, output_folder
from runner.verbs._report import Report
from runner.verbs.bench.candidate_runner import CandidateRunner, Workbench
from runner.verbs.bench.loading import DataComparison
from runner.verbs.bench.report import write
from runner.verbs.bench.toggles import ToggleComparison


def run(composition: Composition) -> float:
    """Compare the config with each toggle.

    Returns:
        Samples a second of what is recommended, for sweepers.
    """
    config, _ = config_and_checkpoint(composition, Bench)
    report = Report(config.json)
    bench = Workbench(config, composition)
    try:
        if config.part == "train":
            result = ToggleComparison(config, bench, report, composition.sources).run()
        else:
            result = DataComparison(config, bench, report).run()
    finally:
        bench.close()
        CandidateRunner(bench).configure()  # torch's switches, for the next job of a sweep, or of this process
    result.record = {"part": config.part, "overrides": mask_words(composition.overrides)} | result.record
    folder = output_folder(None, composition.job_dir or composition.run_dir, config.output_root, "benchmarks")
    model = str(config.model["_target_"]).rsplit(".", 1)[1]
    record = write(result, folder, f"{config.name}, {model} on {result.record['device']}")
    if not report.json(record):
        report.line(f"recommended: {' '.join(record['recommended']) or 'nothing to change'}")
        report.folder(folder)
    return result.best
