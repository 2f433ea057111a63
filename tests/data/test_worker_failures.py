"""A worker process that dies or hangs ends in a sentence, between two steps and not in one."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from small_loaders import small_loader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from runner.base.errors import DataFailed
from runner.data.workers import WorkerLoader, _deaths_raised

pytestmark = pytest.mark.slow

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]  # that a script imports from


class Numbered(Dataset[Any]):
    """Images that tell which they are; what is to go wrong happens at sample 40, and in a worker alone."""

    def __init__(self, wrong: str = "", side: int = 2) -> None:
        self.wrong, self.side = wrong, side

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 40 and get_worker_info() is not None:
            if self.wrong == "hangs":
                time.sleep(1000)
            elif self.wrong == "takes a second":
                for _ in range(10):  # what is left of one sleep is over when the process goes on
                    time.sleep(0.1)
            elif self.wrong == "exits":
                os._exit(5)
            elif self.wrong == "calls exit":
                sys.exit()
            elif self.wrong:
                os.kill(os.getpid(), int(self.wrong) if self.wrong.isdecimal() else getattr(signal, self.wrong))
        return torch.full((1, self.side, self.side), index, dtype=torch.uint8), index


def loader(wrong: str = "", workers: int = 2, side: int = 2, **options: Any) -> WorkerLoader:
    options = {"persistent_workers": True, **options}
    made: WorkerLoader = small_loader(workers, Numbered(wrong, side), torch.arange(80), shuffle=False, **options)
    return made


def gone(pids: list[int]) -> bool:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return False
    return True


@pytest.mark.parametrize("persistent", some([True, False], 0))
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("SIGKILL", r"worker process 1 \(pid \d+\) was killed by SIGKILL \(the system kills .* memory\)"),
        ("SIGBUS", r"worker process 1 \(pid \d+\) was killed by SIGBUS \(.*/dev/shm is full\)"),
        ("SIGVTALRM", r"worker process 1 \(pid \d+\) was killed by SIGVTALRM\n"),
        ("35", r"worker process 1 \(pid \d+\) was killed by signal 35\n"),
        ("exits", r"worker process 1 \(pid \d+\) ended with status 5"),
        ("calls exit", r"worker process 1 \(pid \d+\) ended with status 0 \(.*exit\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:ERROR. Unexpected")
def test_a_worker_that_dies_is_named_with_its_signal(wrong: str, words: str, persistent: bool) -> None:
    made = loader(wrong, persistent_workers=persistent)
    batches = made.batches(0, 0, 10)
    with contextlib.closing(made):
        first = next(batches)
        pids, began = [worker.pid for worker in made._iterator._workers], time.monotonic()
        with pytest.raises(DataFailed, match=words) as caught:
            list(batches)
        assert time.monotonic() - began < 60, "at once, and not when torch's own limit of 300 s has passed"
        assert first.targets.tolist() == list(range(8))
        assert "data.num_workers=0" in str(caught.value)
        assert gone(pids), "the others are ended too"


def test_a_limit_on_file_sizes_that_shared_memory_exceeds_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # which workers inherit
    try:
        with (
            contextlib.closing(loader(side=64)) as made,
            pytest.raises(DataFailed, match=r"data\.num_workers: .*shared memory: .*File too large") as caught,
        ):
            list(made.batches(0, 0, 10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "data.num_workers=0" in str(caught.value)


def test_a_worker_that_dies_while_the_main_process_computes_is_reported_when_the_next_batch_is_requested() -> None:
    made = loader(prefetch=1)
    batches = made.batches(0, 0, 10)
    with contextlib.closing(made):
        next(batches)
        pid = made._iterator._workers[0].pid
        os.kill(pid, signal.SIGKILL)
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            pass
        for _ in range(1000):  # a signal's handler runs between two instructions
            torch.zeros(10).sum()
        with pytest.raises(DataFailed, match="worker process 0"):
            list(batches)


def test_a_death_while_torch_tries_temporary_files_breaks_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made, whole = loader(prefetch=1), tempfile._TemporaryFileWrapper  # type: ignore[attr-defined]
    batches = made.batches(0, 0, 10)

    def dying(*words: Any) -> Any:
        file = whole(*words)
        worker.kill()
        while worker.exitcode is None:
            pass
        return file

    monkeypatch.setattr(tempfile, "_TemporaryFileWrapper", dying)
    with contextlib.closing(made):
        next(batches)
        worker = made._iterator._workers[0]
        with _deaths_raised():
            tempfile.NamedTemporaryFile().close()
        with pytest.raises(DataFailed, match="worker process 0"):
            list(batches)


def test_a_limit_of_time_is_waited_for_in_parts() -> None:
    for limit, wait, waits in ((None, 0, 1), (0.5, 0.25, 2), (12.0, 5, 3), (600.0, 5, 120)):
        made = loader(timeout_s=limit)
        assert (made._loader.timeout, made._waits) == (wait, waits)


def test_another_loader_works_on_after_a_death_in_the_first() -> None:
    with pytest.raises(DataFailed):
        list(loader("SIGKILL").batches(0, 0, 10))
    with contextlib.closing(loader()) as made:
        for epoch in (0, 1):
            assert torch.cat([batch.targets for batch in made.batches(epoch, 0, 10)]).tolist() == list(range(80))


def test_a_child_process_of_user_code_that_fails_is_no_worker() -> None:
    with contextlib.closing(loader()) as made:
        batches = made.batches(0, 0, 10)
        next(batches)
        assert subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"], check=False).returncode == 3
        assert len(list(batches)) == 9


def test_a_custom_loader_before_ours_changes_nothing() -> None:
    assert len(list(DataLoader(Numbered(), batch_size=8, num_workers=1))) == 10
    with pytest.raises(DataFailed, match="SIGKILL"):
        list(loader("SIGKILL").batches(0, 0, 10))


@pytest.mark.parametrize("persistent", some([True, False], 1))
def test_workers_that_hang_are_waited_for_as_long_as_configured(persistent: bool) -> None:
    made = loader("hangs", timeout_s=1.0, persistent_workers=persistent)
    with contextlib.closing(made):
        batches = made.batches(0, 0, 10)
        next(batches)
        pids = [worker.pid for worker in made._iterator._workers]
        began = time.monotonic()
        with pytest.raises(DataFailed, match=r"data\.timeout_s: no batch came .* for 1 s.* samples 40, 41") as caught:
            list(batches)
        assert time.monotonic() - began < 15, "ten seconds and more for each worker without a limit for all"
        assert "data.num_workers=0" in str(caught.value)
        assert gone(pids)


@pytest.mark.parametrize("persistent", some([True, False], 0))
def test_frozen_workers_do_not_hold_up_the_end(persistent: bool) -> None:
    made = loader(workers=3, persistent_workers=persistent)
    batches = made.batches(0, 0, 10)
    next(batches)
    pids = [worker.pid for worker in made._iterator._workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    made.close()
    batches.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 12, "five to ten seconds for each worker without a limit for all"
    assert gone(pids)


LEFT_RUNNING = """
import sys
sys.path[:0] = sys.argv[2:]
from test_worker_failures import loader

kept = []
for persistent in (True, False):
    made = loader(sys.argv[1], workers=1, prefetch=1, persistent_workers=persistent)
    batches = made.batches(0, 0, 10)
    for _ in range(5):
        next(batches)
    kept += [made, batches]
raise SystemExit(3)
"""


@pytest.mark.parametrize("wrong", some(["", "hangs"], 0))
def test_a_process_that_ends_in_the_middle_of_an_epoch_does_not_wait_for_its_workers(wrong: str) -> None:
    command = [sys.executable, "-c", LEFT_RUNNING, wrong, *FOLDERS]
    done = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


def test_without_workers_nothing_is_timed() -> None:
    assert len(list(loader("hangs", workers=0, timeout_s=0.001).batches(0, 0, 10))) == 10


STOPPED = """
import sys
sys.path[:0] = sys.argv[1:]
from test_worker_failures import loader

made = loader("takes a second", timeout_s=3.0)
for number, batch in enumerate(made.batches(0, 0, 10)):
    print(number, flush=True)
made.close()
"""


@pytest.mark.extended
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["the process", "the process and its workers"])
def test_the_time_in_which_a_process_is_stopped_does_not_count(send: Any) -> None:
    command = [sys.executable, "-c", STOPPED, *FOLDERS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as it:
        assert it.stdout is not None
        assert it.stderr is not None
        while it.stdout.readline() != "4\n":  # the next batch takes a second
            pass
        time.sleep(0.3)
        send(it.pid, signal.SIGSTOP)
        time.sleep(5)
        send(it.pid, signal.SIGCONT)
        rest, errors = it.communicate(timeout=60)
    assert (it.returncode, rest.split(), errors) == (0, ["5", "6", "7", "8", "9"], "")
