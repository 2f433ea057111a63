"""Signals that ask to stop are noted once; a second one ends the process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from runner import cli
from runner.base.errors import UserError
from runner.base.signals import STOPPING
from runner.data.workers import _start_worker
from runner.runtime.signals import StopSignals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU"])
def test_a_signal_is_noted_by_name_and_the_old_handler_comes_back(name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.received == ""
        signal.raise_signal(number)
        assert signals.received == name
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("error", [None, AttributeError, UserError])
def test_ctrl_c_ends_the_program_as_interrupted_whatever_it_breaks_off_raises(error, monkeypatch, capsys) -> None:
    def launch(*_: object) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if error is None:
                raise
            raise error("of what was broken off") from None
        return 0

    monkeypatch.setattr(cli, "launch_verb", launch)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def status_of(work: Callable[[], object]) -> int:
    """The exit status of a process that is forked and does this."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def signalled(*numbers: signal.Signals) -> None:
    with StopSignals():
        for number in numbers:
            signal.raise_signal(number)


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGINT")])
def test_a_second_signal_ends_the_process_at_once(first: str, second: str) -> None:
    numbers = signal.Signals[first], signal.Signals[second]
    assert status_of(lambda: signalled(*numbers)) == 128 + numbers[1]


@pytest.mark.parametrize("name", ["SIGHUP", "SIGQUIT", "SIGXCPU"])
def test_a_signal_that_was_ignored_from_the_start_stays_ignored(name: str) -> None:
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(number)
            assert signals.asked() == ""
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGXCPU"])
def test_a_signal_that_one_cause_sends_several_times_does_not_end_the_process_at_once(name: str) -> None:
    with StopSignals() as signals:
        for _ in range(3):
            signal.raise_signal(getattr(signal, name))
        signal.raise_signal(signal.SIGTERM)  # a service manager sends it together with SIGHUP
        signal.raise_signal(getattr(signal, name))
        assert signals.received == name


def test_a_second_signal_ends_the_worker_processes_too() -> None:
    reading, writing = os.pipe()

    def work() -> None:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        os.write(writing, str(worker.pid).encode())
        signalled(signal.SIGINT, signal.SIGINT)

    assert status_of(work) == 128 + signal.SIGINT
    os.close(writing)
    worker = os.read(reading, 20)
    deadline = time.monotonic() + 30  # half as long as the worker sleeps
    with os.fdopen(reading, "rb") as pipe:  # the worker holds its other end
        os.set_blocking(pipe.fileno(), False)
        while pipe.read() is None:
            assert time.monotonic() < deadline, f"worker {worker.decode()} is still there"
            time.sleep(0.01)


def test_workers_leave_every_signal_that_stops_a_run_to_the_main_process() -> None:
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    assert status_of(lambda: (_start_worker(0), [signal.raise_signal(number) for number in STOPPING])) == 7
    assert {number: signal.getsignal(number) for number in STOPPING} == handlers
    assert {"SIGHUP", "SIGQUIT", "SIGXCPU"} <= {number.name for number in STOPPING}


def test_outside_the_main_thread_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with StopSignals() as signals:
            seen.append((signals.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [("", before)]
