"""Signals that ask to stop are noted once; a second one ends the process."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from runner.runtime.signals import StopSignals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_is_noted_by_name_and_the_old_handler_comes_back(name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.received == ""
        signal.raise_signal(number)
        assert signals.received == name
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGINT")])
def test_a_second_signal_ends_the_process_at_once(first: str, second: str) -> None:
    pid = os.fork()
    if pid == 0:
        with StopSignals():
            signal.raise_signal(getattr(signal, first))
            signal.raise_signal(getattr(signal, second))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + getattr(signal, second)


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
