"""Short trainings, each by `train` in a separate process: what `audit` compares and `bench` measures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from runner.base.errors import UserError
from runner.config import keys
from runner.config.composition import Composition
from runner.config.schema.train import Train
from runner.config.space import text_of
from runner.engine.loop import Loop
from runner.instrument.nested import mapped_items
from runner.runtime.hardware_metrics import core_wait, waited_for_core
from runner.runtime.memory import peak_memory, reset_peak_memory

# Only the steps matter: the run is not evaluated, followed or resumed.
_QUIET = (
    *("evaluate.every_epochs=null", "evaluate.every_steps=null", "evaluate.test=false", "limit.eval_batches=1"),
    *("checkpoint.every_epochs=null", "logger=none", "log.progress=false", "log.curves=false", "log.pictures=false"),
    *("resume=null", "max_time=null", "budget=null", "post_mortem=false", "json=false", "devices=1"),
)


def words_of(composition: Composition, schema: type[Train], *others: str) -> list[str]:
    """The words that `train` needs for the same config, without the keys that a verb adds; `others` come last."""
    kind: type = schema
    added = keys.hints(kind).keys() - keys.hints(Train).keys()
    replaced = {keys.key_of(word) for word in (*_QUIET, *others)}
    dropped = ("sweep", "search", *added, *replaced)
    flags = [f"--config-dir={folder}" for folder in composition.sources.extra]
    if composition.primary != schema.__name__.lower():
        flags.append(f"--config-name={composition.primary}")
    kept = [word for word in composition.overrides if not keys.within(keys.key_of(word), dropped)]
    return [*flags, *kept, *_QUIET, *others]


def words_from(config: Train, folder: Path, *others: str) -> list[str]:
    """The words that `train` needs for a validated config, which a folder gets; that of a checkpoint gets new weights."""
    plain = keys.to_plain(config)
    values: dict[str, Any] = {name: plain[name] for name in keys.hints(Train)} | {"ckpt_path": None, "logger": {}}
    if config.ckpt_path is not None:
        values |= {"init_from": None, "init_mismatch": "head"}
        # A file is no reason to download other weights
        values["model"] |= {"weights": None} if "weights" in values["model"] else {}
    # Interpolations are resolved: what is left is text
    values = mapped_items(values, str, lambda text: text.replace("${", r"\${"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "short_run.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    quiet = [word for word in _QUIET if word != "logger=none"]  # the file has no groups
    return [f"--config-dir={folder}", "--config-name=short_run", *quiet, *others]


def run_short(words: Sequence[str], settings: Mapping[str, Any], folder: Path) -> Path:
    """Train with words and keys into a new folder, the run directory, which is returned; a `UserError` says why the run failed."""
    others = [f"{key}={text_of(value)}" for key, value in {**settings, "hydra.run.dir": str(folder)}.items()]
    command = [sys.executable, "-m", "runner", "train", *words, *others]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        # All lines of its error, or the last line of a traceback
        before, found, after = done.stderr.rpartition("error: ")
        reason = after.strip() if found else (before or after).strip().rpartition("\n")[2]
        raise UserError(reason or f"train ended with status {done.returncode}")
    return folder


class Stopwatch:
    """A callback that measures steps after a warm-up, and ends the run, so that its schedules are those of the whole run.

    Args:
        steps: optimizer steps of this process to measure; more if they take less than `least_s` seconds, fewer if they take
            more than `most_s`.
        warmup: steps before them.
        target: a file for the result, JSON: `seconds`, `samples`, `steps`, `peak_bytes` (`peak_memory`), `cpu_wait` (`core_wait`).
    """

    def __init__(
        self, steps: int, warmup: int = 0, least_s: float = 0.0, most_s: float | None = None, target: str | None = None
    ) -> None:
        self._steps, self._warmup, self._least_s, self._most_s, self._target = steps, warmup, least_s, most_s, target
        self._done = 0
        self._began, self._samples, self._waited = time.perf_counter(), 0, waited_for_core()

    def on_start(self, loop: Loop) -> None:
        """Begin to follow the memory."""
        reset_peak_memory(loop.state.meter.device)

    def on_step(self, loop: Loop) -> None:
        """Count the step, take the time after the warm-up, and end the run after the steps to measure."""
        self._done += 1
        measured = self._done - self._warmup
        if measured < 0:
            return
        if measured == 0:
            _wait(loop)
            self._began, self._samples, self._waited = time.perf_counter(), loop.samples_seen, waited_for_core()
            return
        passed = time.perf_counter() - self._began
        enough = measured >= self._steps and passed >= self._least_s
        if enough or (self._most_s is not None and passed > self._most_s):
            loop.request_stop("the measurement is done")

    def on_end(self, loop: Loop) -> None:
        """Write the result; a run that ends early was measured as far as it went."""
        measured = self._done - self._warmup
        if measured <= 0 or self._target is None:
            return
        _wait(loop)
        result = {
            "seconds": time.perf_counter() - self._began,
            "samples": loop.samples_seen - self._samples,
            "steps": measured,
            "peak_bytes": peak_memory(loop.state.meter.device).bytes,
            "cpu_wait": core_wait((self._began, self._waited)),
        }
        Path(self._target).write_text(json.dumps(result), encoding="utf-8")


def _wait(loop: Loop) -> None:
    """Wait until the device has done its work."""
    if (device := loop.state.meter.device).type != "cpu":
        torch.accelerator.synchronize(device)


def callback(kind: type, **arguments: Any) -> str:
    """The word that adds a callback of this module to a run."""
    given = "".join(f", {name}: {json.dumps(value)}" for name, value in arguments.items())
    return f"+callbacks.short_run={{_target_: {kind.__module__}.{kind.__name__}{given}}}"
