"""`find-lr`: the learning-rate range test."""

from __future__ import annotations

import contextlib
import dataclasses

from runner.base.secrets import mask_words
from runner.checkpoint import resume
from runner.config.composition import Composition
from runner.config.schema.verbs import FindLr
from runner.engine.plan import Position
from runner.run.describe import describe
from runner.run.find_rate import find_rate
from runner.run.from_checkpoint import config_and_checkpoint, load_weights_of, output_folder
from runner.tracking.verb_report import Report
from runner.train import build_run


def run(composition: Composition) -> None:
    """Find a learning rate, and write it with a plot into a folder."""
    config, found = config_and_checkpoint(composition, FindLr)
    report, own = Report(config.json), found is None
    # The length of the test replaces that of the run
    tested = dataclasses.replace(config, epochs=None, max_steps=config.num_steps)
    training = build_run(tested, make_cache=own, fresh=own)
    built = training.config  # with what comes from the data
    config = dataclasses.replace(config, data=built.data, task=built.task, model=built.model)
    with contextlib.closing(training.data):
        # With a checkpoint, the test starts from its weights: the best rate depends on them
        if found is not None:
            load_weights_of(found, config, training.model, loss=training.loss, which="raw")
            # The test freezes what is frozen at the checkpoint's position.
            training.state.position = resume.made_of(found, "position", Position)
        given = composition.job_dir or composition.run_dir
        folder = output_folder(config.output, given, config.output_root, "find-lr")
        report.header(f"find-lr of {config.name}  seed {config.seed}  {folder}", describe(config, training))
        report.warnings(training.warnings, found.warnings if found else [])
        find_rate(training, config, mask_words(composition.overrides), folder, report)
