"""What all tests share: a scratch folder, compositions as a job gets them, and ways to call the program."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import extras
import forked
import pytest
from composition_cache import install

from runner.base.errors import Problem
from runner.cli import main
from runner.config.composition import Composition
from runner.config.load import opened, problems_in
from runner.config.schema import VERBS

REPOSITORY = Path(__file__).resolve().parents[1]

# Importing and collecting tests leaves no garbage, and looking for it takes a quarter of the time.
gc.disable()

# One thread a process: the tests run in as many processes as there are cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Folders of tests are in memory, where there is room: flushing a file to a disk takes milliseconds, and a run flushes a dozen.
_MEMORY = Path("/dev/shm")
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# A process that `nohup` or a shell's background job starts ignores some signals, and so would every run of the tests.
for _name in ("SIGHUP", "SIGQUIT", "SIGXCPU"):
    signal.signal(getattr(signal, _name), signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

FAST = ("threads=1", "logger=none", "log.progress=false", "log.curves=false")


# Fixtures that run the program or compose its config.
PROGRAM = {"run", "spawn", "compose", "made", "made_once", "start", "on_terminal", "project", "workplaces"}


def pytest_collection_finish() -> None:
    """Collect garbage again, but never look at modules and tests, which stay."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run the program, and begin with the slow ones, so that no process is left alone with them."""
    for item in items:
        if not PROGRAM.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("program")
        for marker in item.iter_markers("extra"):
            if not extras.installed(name := marker.kwargs["name"]):
                item.add_marker(pytest.mark.skip(reason=f"the extra [{name}] is not installed"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tests that were skipped because an extra is not installed."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    for name in extras.PACKAGES:
        if count := sum(f"the extra [{name}] is not installed" in reason for reason in reasons):
            terminalreporter.write_line(f"{count} tests skipped: pip install -e '.[{name}]' to run them")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def composition_cache() -> Iterator[None]:
    """Hydra merges the shipped files once for all commands of a process that select the same options."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def imported_once() -> Iterator[None]:
    """Whatever starts the fork server of a test process: later ranks and programs find all that they import loaded."""
    start = forkserver.ensure_running

    def start_elsewhere() -> None:
        with contextlib.chdir(
            REPOSITORY
        ):  # it imports torch for seconds, and the folder of a short test is gone by then
            start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "set_forkserver_preload", lambda names: None)
        patch.setattr(forkserver, "ensure_running", start_elsewhere)
        yield


@dataclass
class Result:
    """A call of the program that has ended."""

    status: int
    out: str
    err: str

    @property
    def directory(self) -> Path:
        """The run directory: the last line printed."""
        return Path(self.out.strip().splitlines()[-1])

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    def logged(self, split: str) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` about a split."""
        return [record for record in self.metrics if record["split"] == split]

    @property
    def last(self) -> dict[str, Any]:
        """The contents of the last checkpoint."""
        from runner.checkpoint.file import read

        return read(self.directory / "checkpoints" / "last.safetensors")


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scratch folder that the test runs in; modules in it are forgotten, so that another test can use their names."""
    monkeypatch.chdir(tmp_path)
    for name in ("RUNNER_TRUST", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def own_module(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write a module of a user's own, which configs may name, also in other processes: `own_module("slow", SOURCE)`."""

    def write(name: str, source: str) -> Path:
        monkeypatch.syspath_prepend(str(workdir))
        monkeypatch.setenv("PYTHONPATH", str(workdir), prepend=os.pathsep)
        monkeypatch.setenv("RUNNER_TRUST", f"{name} {os.environ.get('RUNNER_TRUST', '')}")
        path = workdir / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Call the program in this process: `run("train", "epochs=1")`."""
    import torch

    # A scratch folder is in no repository, and asking git about that takes longer than ten steps.
    monkeypatch.setattr("runner.tracking.environment._git", lambda *_: None)

    def call(*words: str) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(list(words))
        return Result(status, out.getvalue(), err.getvalue())

    yield call
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


@pytest.fixture
def accepted(run: Callable[..., Result]) -> Callable[..., Result]:
    """Call the program in this process, which must succeed: `accepted("eval", "ckpt_path=last")`."""

    def call(*words: str) -> Result:
        result = run(*words)
        assert result.status == 0, result.err + result.out
        return result

    return call


@pytest.fixture
def json_of(accepted: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """The object that a verb prints for programs, which must succeed: `json_of("eval", "ckpt_path=last")`."""
    return lambda *words: json.loads(accepted(*words, "json=true").out)


@pytest.fixture
def rejected(run: Callable[..., Result]) -> Callable[..., Result]:
    """Call the program in this process with a mistake, which it must answer by a sentence."""

    def call(*words: str) -> Result:
        result = run(*words)
        assert result.status == 2, result.err + result.out
        assert "Traceback" not in result.err + result.out
        return result

    return call


@pytest.fixture
def train(accepted: Callable[..., Result]) -> Callable[..., Result]:
    """A quick training in this process, which must succeed: `train("epochs=1", "amp=true")`."""
    return lambda *words: accepted("train", *FAST, *words)


@pytest.fixture
def bomb(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, signal.Signals], tuple[str, ...]]:
    """The words of a run that a signal reaches after an optimizer step."""
    monkeypatch.setenv("RUNNER_TRUST", f"bombs {os.environ.get('RUNNER_TRUST', '')}")
    node = "+callbacks.bomb={{_target_: bombs.Bomb, step: {}, number: {}}}"
    return lambda step, number: (*FAST, node.format(step, int(number)))


@pytest.fixture
def stopped(run: Callable[..., Result], bomb: Callable[..., tuple[str, ...]]) -> Callable[..., Result]:
    """A training that SIGTERM reaches after an optimizer step: `stopped(3, "epochs=1")`."""

    def call(step: int, *words: str) -> Result:
        result = run("train", *words, *bomb(step, signal.SIGTERM))
        assert result.status == 75, result.err + result.out
        assert (result.summary["status"], result.summary["global_step"]) == ("preempted", step)
        return result

    return call


@pytest.fixture
def killed(run: Callable[..., Result], workdir: Path, bomb: Callable[..., tuple[str, ...]]) -> Callable[..., Path]:
    """The directory of a training that SIGKILL ends after an optimizer step; to be resumed with `callbacks=none`."""

    def call(step: int, *words: str) -> Path:
        directory = workdir / "killed"
        # A fork has imported everything already, which takes longer than all the rest.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                run(
                    "train", *words, *bomb(step, signal.SIGKILL), f"hydra.run.dir={directory}", "checkpoint.async=false"
                )
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        return directory

    return call


# Results of trainings with their directories, for all tests of a process.
_TRAINED: dict[tuple[str, ...], tuple[Result, Path]] = {}


@pytest.fixture
def train_once(
    train: Callable[..., Result], workdir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Result]:
    """A training that other tests use, too: the first one trains, and each has a copy of the directory for itself."""

    def call(*words: str) -> Result:
        if words not in _TRAINED:
            result = train(*words)
            kept = tmp_path_factory.mktemp("trained") / "run"
            _TRAINED[words] = result, shutil.copytree(result.directory, kept, symlinks=True)
            return result
        result, kept = _TRAINED[words]
        if result.directory.exists():  # another run of this test began in the same second of another minute or day
            free = f"{result.directory}-kept"
            result = Result(result.status, result.out.replace(str(result.directory), free), result.err)
        shutil.copytree(kept, result.directory, symlinks=True)
        return result

    return call


@pytest.fixture
def spawn(workdir: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Call the program in a separate process, and wait for it."""

    return lambda *words: forked.run(words)


# The same words give the same composition, and composing is what takes the time.
_KNOWN: dict[tuple[str, ...], Composition] = {}


@pytest.fixture
def compose(workdir: Path) -> Callable[..., Composition]:
    """What the words after a verb amount to, as the (first) job sees it: `compose("model=mlp", verb="eval")`."""

    def call(*words: str, verb: str = "train") -> Composition:
        call_id = (verb, *words)
        if call_id in _KNOWN:
            return copy.deepcopy(_KNOWN[call_id])
        with opened(verb, words) as composition:
            assert isinstance(composition, Composition)
            if not any(word.startswith("--") for word in words):
                _KNOWN[call_id] = copy.deepcopy(composition)
        return composition

    return call


@pytest.fixture
def problems(compose: Callable[..., Composition]) -> Callable[..., dict[str, Problem]]:
    """The problems that validation finds in a composition, by key."""

    def call(*words: str, verb: str = "train") -> dict[str, Problem]:
        composition = compose(*words, verb=verb)
        return {problem.key: problem for problem in problems_in(composition.values, composition, VERBS[verb])[1]}

    return call


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the words in the file's `SMALL`."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(tmp_path_factory.mktemp("made"))
        assert main(["train", *FAST, *request.module.SMALL]) == 0
        return Path(out.getvalue().splitlines()[-1]).resolve()


@pytest.fixture
def trained(made: Path, workdir: Path) -> Path:
    """A copy of it, in the folder of the test."""
    return Path(shutil.copytree(made, workdir / "outputs" / "data" / made.name))
