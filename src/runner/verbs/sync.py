"""`sync`: what trackers did not get while a run went on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.base.errors import FAILED, OK, UserError
from runner.base.secrets import is_masked
from runner.run.directory import RunDirectory
from runner.tracking.trackers.loggers import TRACKERS, sentence_of, stored_settings
from runner.verbs._errors import print_error
from runner.verbs._folders import checked_folder, split_words


def main(argv: Sequence[str]) -> int:
    """Send the points that MLflow or W&B did not get yet, and how the run ended: `sync RUN [RUN ...]`, runs or sweeps.

    Points that have arrived are not sent again. The address comes from the run; one with a password, which files do not
    hold, from MLFLOW_TRACKING_URI.
    """
    words, _ = split_words("sync", argv, {})
    folders = [checked_folder("sync", word, "run directories, sweeps and folders of them") for word in words]
    runs = sorted({path.parent for folder in folders for path in folder.glob("**/overrides.yaml")})
    found = [(run, name, keys) for run in runs for name in TRACKERS if (keys := stored_settings(run, name))]
    if not found:
        problem = f"needs runs of logger=mlflow or logger=wandb, got {' '.join(words) or 'nothing'}"
        raise UserError("sync", problem, "python -m runner sync outputs/digits/<run>")
    return max(_sync(run, name, keys) for run, name, keys in found)


def _sync(directory: Path, name: str, settings: dict[str, Any]) -> int:
    run = RunDirectory(directory)
    try:
        # A run that still trains sends its points itself
        run.lock()
        # Passwords of addresses are not written into the files of a run.
        if is_masked(settings.get("tracking_uri")):
            if not (address := os.environ.get("MLFLOW_TRACKING_URI")):
                problem = f"the address {settings['tracking_uri']} has a password, which files do not store"
                raise UserError("sync", problem, "the address in the variable MLFLOW_TRACKING_URI")
            settings = settings | {"tracking_uri": address}
        tracker = TRACKERS[name](**settings)
        tracker.load(directory)
        before = tracker.state.count
        # What arrived before is not sent twice, so the command can be repeated
        if tracker.state.ended is None or tracker.next_points():
            print(f"{directory}: sending to {tracker.address}", flush=True)
            tracker.deliver()
        print(f"{directory}: {name} has everything, {tracker.state.count - before} points were sent now")
    except (Exception, SystemExit) as error:
        print_error(f"{directory}: {error if isinstance(error, UserError) else sentence_of(error, name)}")
        return FAILED
    finally:
        run.unlock()
    return OK
