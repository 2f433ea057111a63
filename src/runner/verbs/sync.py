"""`sync`: what trackers did not get while a run went on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.config import stored
from runner.config.errors import FAILED, OK, UserError
from runner.config.reading import read_json, read_regular
from runner.config.secrets import is_masked
from runner.tracking.run_directory import RunDirectory
from runner.tracking.trackers.loggers import TRACKERS
from runner.tracking.trackers.tracker import sentence_of
from runner.verbs._errors import print_error
from runner.verbs._folders import checked_folder, split_words


def main(argv: Sequence[str]) -> int:
    """Send the points that MLflow or W&B did not get yet, and how the run ended: `sync RUN [RUN ...]`, runs or sweeps.

    Points that have arrived are not sent again. The address comes from the run; one with a password, which files do not
    hold, from MLFLOW_TRACKING_URI.
    """
    words, _ = split_words("sync", argv, {})
    if not words:
        raise UserError("sync", "needs run directories, got nothing", "python -m runner sync outputs/digits/<run>")
    folders = [checked_folder("sync", word, "run directories, sweeps and folders of them") for word in words]
    found = sorted({each for folder in folders for each in _runs(folder)})
    if not found:
        problem = f"{', '.join(words)} has no run with a tracker"
        raise UserError("sync", problem, "a run of logger=mlflow or logger=wandb")
    return max(_sync(directory, name) for directory, name in found)


def _runs(folder: Path) -> Iterator[tuple[Path, str]]:
    """The runs in a folder, at any depth, with the names of their trackers."""
    for directory in [path.parent for path in folder.glob("**/overrides.yaml")]:
        config = directory / "config.yaml"
        text = read_regular(config) if config.exists() else b""
        for name, kind in TRACKERS.items():
            state = directory / "trackers" / f"{name}.json"
            if state.exists() or f"{kind.__module__}.{kind.__name__}".encode() in text:
                yield directory, name


def _sync(directory: Path, name: str) -> int:
    try:
        (run := RunDirectory(directory)).lock()
    except UserError as error:
        print_error(str(error))
        return FAILED
    try:
        settings = read_json(directory / "trackers" / f"{name}.json").get("settings")
        if not settings:  # the state is missing or damaged
            loggers = stored.load(read_regular(directory / "config.yaml").decode(), str(directory))["logger"].values()
            settings = next(each for each in loggers if each.pop("_target_").endswith(f".{TRACKERS[name].__name__}"))
        if is_masked(settings.get("tracking_uri")):
            if "MLFLOW_TRACKING_URI" not in os.environ:
                problem = f"the address {settings['tracking_uri']} has a password, which files do not store"
                raise UserError("sync", problem, "the address in the variable MLFLOW_TRACKING_URI")
            settings["tracking_uri"] = os.environ["MLFLOW_TRACKING_URI"]
        tracker = TRACKERS[name](**settings)
        tracker.load(directory)
        if tracker.state.ended and not tracker.next_points():
            print(f"{directory}: {name} has everything")
            return OK
        print(f"{directory}: sending to {tracker.address}", flush=True)
        before = tracker.state.count
        tracker.deliver()
        print(f"{directory}: {name}: {tracker.state.count - before} points sent")
    except (Exception, SystemExit) as error:
        print_error(f"{directory}: {error if isinstance(error, UserError) else sentence_of(error, name)}")
        return FAILED
    finally:
        run.unlock()
    return OK
