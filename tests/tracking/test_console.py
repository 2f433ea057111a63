import errno
import io
import os
import pty
import re
import resource
import subprocess
import sys
import threading

import pytest
from stored_sweeps import FakeTerminal

from runner.tracking import console as console_module
from runner.tracking.console import Console
from runner.tracking.formats import clean
from runner.tracking.run_files import Progress

ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def _a_capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)


def _everything(console):
    console.header("runner: digits", [("model", "mlp", ""), ("device", "cpu", "no CUDA device was found")])
    console.line("a \x1b[31mred\x1b[0m line, [bold]not markup[/bold]")
    console.warn("compile=true has no effect")
    console.error("it broke\nbadly")
    console.table("jobs", ["job", "value"], [["0", "0.5"], ["1", "0.25"]])
    console.start(Progress(0, 100, total_epochs=2))
    for step in range(1, 101):
        console.advance(step, 1)
        if step % 50 == 0:
            console.metrics("train", {"lr": 0.0031, "loss": 0.412, "samples_per_s": 12_345.0}, step, 1)
            console.metrics("val", {"accuracy": 0.9733, "loss": float("nan")}, step, 1)
    console.stop()
    console.stop()
    console.line("done")


def test_a_pipe_gets_plain_ascii_lines_that_say_what_runs_and_why():
    stream = io.StringIO()
    _everything(Console(None, stream=stream))
    text = stream.getvalue()
    assert ESCAPE not in text
    assert text.isascii()
    lines = text.splitlines()
    assert lines[:3] == ["runner: digits", "  model   mlp", "  device  cpu  (no CUDA device was found)"]
    assert "a red line, [bold]not markup[/bold]" in lines
    assert "warning: compile=true has no effect" in lines
    assert "error: it broke" in lines
    train = [line for line in lines if "train" in line]
    assert re.fullmatch(
        r"epoch 1/2  step 50/100  train loss 0\.412  lr 0\.0031  12\.3k samples/s  eta \d:\d\d", train[0]
    )
    assert "epoch 1/2  step 100/100  [val]  loss nan  accuracy 0.9733" in lines


def test_run_log_has_every_line_with_a_time_and_no_escape_codes_in_either_mode(tmp_path):
    for name, stream in (("plain", io.StringIO()), ("terminal", FakeTerminal())):
        _everything(Console(tmp_path / name, stream=stream))
    plain, terminal = ((tmp_path / name).read_text() for name in ("plain", "terminal"))
    assert ESCAPE not in plain + terminal
    stamp = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(  |$)")
    assert all(stamp.match(line) for line in (plain + terminal).splitlines())
    assert [line[21:] for line in plain.splitlines()] == [line[21:] for line in terminal.splitlines()]
    assert plain.splitlines()[-1].endswith("  done")


def test_a_terminal_gets_colours_and_permanent_evaluation_lines_and_without_progress_no_bar():
    stream, plain = FakeTerminal(), FakeTerminal()
    _everything(Console(None, stream=stream))
    text = stream.getvalue()
    assert ESCAPE in text
    assert "━" in text or "─" in text
    permanent = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert sum("[val]" in line for line in permanent) == 2
    assert not any("train" in line for line in permanent)
    assert text.endswith("done\n")
    _everything(Console(None, progress=False, stream=plain))
    assert not {"━", "\r"} & {*plain.getvalue()}
    assert "train loss 0.412" in plain.getvalue()


@pytest.mark.parametrize(("wait", "shown"), [(0.02, False), (0.4, True)])
def test_the_bar_has_room_for_waiting_that_costs_and_lines_have_all_gauges(tmp_path, wait, shown):
    stream = FakeTerminal()
    console = Console(tmp_path / "run.log", stream=stream)
    console.start(Progress(0, 100, total_epochs=2))
    console.advance(1, 1)
    console.metrics("train", {"loss": 0.4, "data_wait": wait, "peak_memory_mib": 700.0, "mfu": 0.31}, 1, 1)
    console._draw("epoch 1")
    console.stop()
    bar, *below = stream.getvalue().rpartition("\r")[0].rpartition("\r")[2].split("\n")
    assert ("data wait" in bar) == shown
    assert "MiB" not in bar
    assert "memory 700 MiB" in "".join(below)
    assert "mfu" not in bar
    assert f"data wait {'40%' if shown else '2.0%'}  memory 700 MiB  mfu 31%" in (tmp_path / "run.log").read_text()


def test_below_the_bar_are_the_epoch_the_metric_with_its_best_step_memory_and_the_last_warning(monkeypatch):
    monkeypatch.setenv("LINES", "20")
    stream = FakeTerminal()
    console = Console(None, stream=stream)
    console.warn("the first")
    console.warn("the second")
    console.start(Progress(0, 100, total_epochs=5, metric="val/accuracy"), best=lambda: (0.75, 20))
    console.metrics("train", {"loss": 0.4, "peak_memory_mib": 700.0}, 30, 2)
    console.metrics("val", {"accuracy": 0.5}, 30, 2)
    console.stop()
    epoch, metrics, warnings = (
        line.rstrip() for line in clean(stream.getvalue().rpartition("epoch 2/5")[2]).split("\n")[1:4]
    )
    assert re.fullmatch(r"  this epoch  ━{8}╺━{7}", epoch)
    assert metrics == "  val/accuracy 0.5, best 0.75 at step 20  memory 700 MiB"
    assert warnings == "  2 warnings: the second"
    monkeypatch.setenv("LINES", "9")
    console = Console(None, stream=stream)
    console.start(Progress(0, 100, total_epochs=5))
    assert "this epoch" not in stream.getvalue().rpartition("starting")[2]
    console.stop()


def test_the_bar_is_not_behind_an_evaluation():
    stream = FakeTerminal()
    console = Console(None, stream=stream)
    console.start(Progress(0, 40, total_epochs=2))
    console.advance(1, 1)
    console.advance(20, 1)  # too soon to be drawn
    assert "20/40" not in stream.getvalue()
    console.metrics("val", {"loss": 1.0}, 20, 1)
    assert "20/40" in stream.getvalue().partition("[val]")[0].rpartition("\r")[0]
    console.stop()


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console_module, "perf_counter", lambda: now[0])
    return now


def test_the_bar_moves_at_most_five_times_a_second_and_without_a_thread(clock):
    stream, threads, drawn = FakeTerminal(), set(threading.enumerate()), 0
    console = Console(None, stream=stream)
    console.start(Progress(0, 1000, total_epochs=1))
    for step in range(1, 1001):
        clock[0] += 0.002
        before = len(stream.getvalue())
        console.advance(step, 1)
        drawn += len(stream.getvalue()) > before
    assert set(threading.enumerate()) <= threads, "threads of other tests may end meanwhile"
    console.stop()
    assert 8 <= drawn <= 11


def test_the_time_left_follows_the_rate_and_leaves_out_a_slow_first_step(clock):
    stream = io.StringIO()
    console = Console(None, stream=stream)
    console.start(Progress(500, 1000, total_epochs=1))
    clock[0] = 300.0
    for step in range(501, 521):
        console.advance(step, 1)
        clock[0] += 0.5
    console.metrics("train", {"loss": 1.0}, 520, 1)
    expected = round(480 * 10.0 / 19)
    assert f"eta {expected // 60}:{expected % 60:02d}" in stream.getvalue()


def test_a_step_that_is_not_due_does_nothing_but_look_at_the_clock(monkeypatch):
    console = Console(None, stream=io.StringIO())
    console.start(Progress(0, 10**9, total_epochs=1))
    console.advance(1, 1)
    ticks = []
    monkeypatch.setattr(console, "_tick", lambda *place: ticks.append(place))
    calls = []
    sys.setprofile(
        lambda frame, event, what: calls.append(what.__name__ if event == "c_call" else frame.f_code.co_name)
    )
    console.advance(2, 1)
    sys.setprofile(None)
    assert set(calls) - {"setprofile"} == {"advance", "perf_counter"}
    assert not ticks
    monkeypatch.setattr(console, "_due", 0.0)
    console.advance(3, 1)
    assert ticks == [(3, 1)]
    console.stop()


@pytest.mark.parametrize("columns", [1, 2, 5, 11, 30])
def test_a_narrow_terminal_still_shows_everything_without_an_error(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = FakeTerminal()
    console = Console(None, stream=stream)
    _everything(console)
    assert "warning: compile=true has no effect" in " ".join(clean(stream.getvalue()).split())
    assert console._terminal is not None


def test_a_terminal_breaks_lines_between_metrics_and_words_and_keeps_commands_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "40")
    stream, command = FakeTerminal(), "python -m runner train model=small_cnn epochs=100"
    console = Console(tmp_path / "run.log", stream=stream)
    console.metrics("test", {"weights_step": 80.0, "loss": 0.05588, "accuracy": 0.9833}, 160, 8)
    console.warn(f"a sentence with more words than a line of it has room for\n{command}")
    console.table("", ["varied", "value"], [["model=small_cnn optimizer.weight_decay=0.01", "0.5"], ["seed=0", "0.25"]])
    assert [line.rstrip() for line in clean(stream.getvalue()).splitlines()] == [
        "epoch 8  step 160  [test]",
        "  weights of step 80  loss 0.05588",
        "  accuracy 0.9833",
        "warning: a sentence with more words than",
        "a line of it has room for",
        command,
        "varied                             value",
        "─" * 40,
        "model=small_cnn                      0.5",
        "optimizer.weight_decay=0.01",
        "seed=0                              0.25",
    ]
    assert "step 160  [test]  weights of step 80  loss 0.05588  accuracy 0.9833\n" in (tmp_path / "run.log").read_text()


def test_prints_of_others_appear_above_the_bar_and_stdout_is_given_back_also_by_a_terminal_that_breaks(monkeypatch):
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(None)
    console.start(Progress(0, 10, total_epochs=1))
    print("a print of someone else")
    console.stop()
    assert sys.stdout is stream
    assert "\x1b[2Ka print of someone else\n" in stream.getvalue()
    broken = Broken(True, None)
    monkeypatch.setattr(sys, "stdout", broken)
    console = Console(None)
    console.start(Progress(0, 10, total_epochs=1))
    broken.error = BrokenPipeError()
    console.line("x")
    assert sys.stdout is broken
    console.stop()


def test_a_real_terminal_is_recognised_and_a_dumb_one_gets_plain_lines(monkeypatch):
    for term, coloured in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        master, slave = pty.openpty()
        with open(slave, "w", encoding="utf-8") as stream:  # noqa: PTH123
            Console(None, stream=stream).warn("careful")
            text = os.read(master, 1000).decode()
        os.close(master)
        assert "warning: careful" in text
        assert (ESCAPE in text) is coloured


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_that_is_not_utf8_gets_what_it_can_express(terminal, encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    stream.isatty = lambda: terminal
    console = Console(None, stream=stream)
    console.line("Zürich 犬")
    _everything(console)
    stream.flush()
    assert ("Zürich ?" if encoding == "latin-1" else "Z?rich ?").encode(encoding) in raw.getvalue()
    assert (console._terminal is not None) is terminal


class Broken(FakeTerminal):
    def __init__(self, terminal, error):
        super().__init__()
        self.terminal, self.error, self.calls = terminal, error, 0

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.calls += 1
        if self.error:
            raise self.error


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "gone"), ValueError("closed file")])
def test_a_broken_stream_ends_the_display_but_not_the_run_log(tmp_path, terminal, error):
    stream = Broken(terminal, error)
    _everything(Console(tmp_path / "run.log", stream=stream))
    assert 1 <= stream.calls <= 10
    log = (tmp_path / "run.log").read_text()
    assert "[val]" in log
    assert log.endswith("  done\n")


def test_a_terminal_that_cannot_be_drawn_on_falls_back_to_plain_lines(monkeypatch):
    stream = FakeTerminal()
    console = Console(None, stream=stream)
    monkeypatch.setattr(console._terminal, "lines", lambda *_, **__: 1 / 0)
    console.line("still here")
    assert stream.getvalue() == "still here\n"


def test_a_process_whose_reader_goes_away_goes_on_and_ends_without_complaint(tmp_path):
    code = """
import sys
from pathlib import Path
from runner.tracking.console import Console
console = Console(Path("run.log"))
sys.stdin.readline()
for i in range(100):
    console.line(f"line {i}")
print("a print of someone else", flush=True)
print("and one for the last flush")
"""
    command = [sys.executable, "-c", code]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        process.stdout.close()
        process.stdin.write(b"go\n")
        process.stdin.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (0, b"")
    assert (tmp_path / "run.log").read_text().splitlines()[-1].endswith("line 99")


def test_a_log_file_that_cannot_be_opened_or_written_is_warned_about_once(tmp_path):
    stream = io.StringIO()
    Console(tmp_path / "none" / "run.log", stream=stream).line("on")
    assert stream.getvalue().count("warning") == 1

    (tmp_path / "run.log").write_text("before\n")
    stream = io.StringIO()
    console = Console(tmp_path / "run.log", stream=stream)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        console.line("on")
        console.line("and on")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stream.getvalue().count("warning") == 1
    assert (tmp_path / "run.log").stat().st_size == 10
    assert (tmp_path / "run.log").read_text().startswith("before\n")
    assert stream.getvalue().endswith("on\nand on\n")


@pytest.mark.parametrize("columns", [40, 80])
def test_a_header_and_a_bar_fit_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = FakeTerminal()
    console = Console(None, stream=stream)
    reason = "auto: AdamW has one kernel for the whole update on cpu, and others have not"
    console.header("run", [("update", "fused", reason), ("device", "cpu", "as set")])
    text = re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", stream.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    assert f"update  fused ({reason}) device  cpu (as set)".split() == text.split()[1:]
    with console.counting("check", 4) as begin:
        for name in ("build", "labels"):
            begin(name)
    assert "1/4  labels" in stream.getvalue()
    console.start(Progress(0, 100, total_epochs=2))
    console.metrics("train", {"lr": 0.0031, "loss": 0.412, "grad_norm": 1.0, "accuracy": 0.4}, 50, 1)
    console.advance(50, 1)
    console.stop()
    last = stream.getvalue().rpartition("epoch 1/2")[2]
    assert "loss 0.412" in last
    assert max(map(len, re.split("[\x1b\n\r]", last))) <= columns


def test_counting_without_a_terminal_says_more_and_more_rarely_how_far_it_is(clock):
    stream = io.StringIO()
    with Console(None, stream=stream).counting("find-lr", 300) as begin:
        begin("first")
        assert not stream.getvalue()
        for clock[0] in range(1, 300):
            begin()
    lines = [line.split("  ", 1) for line in stream.getvalue().splitlines()]
    assert lines[:3] == [
        ["find-lr", f"{at}/300{left}"] for at, left in ((5, ""), (15, "  eta 4:45"), (35, "  eta 4:25"))
    ]
    assert [line[1].split("/")[0] for line in lines[3:]] == ["75", "135", "195", "255"]


def test_the_time_left_of_parts_of_different_length_follows_their_costs(clock):
    stream = FakeTerminal()
    with Console(None, stream=stream).counting("check", 3, [1, 1, 8]) as begin:
        for clock[0], name in enumerate(("build", "labels", "overfit")):
            begin(name)
    shown = [line for line in re.split("[\x1b\n\r]", stream.getvalue()) if "eta" in line]
    assert sorted({line.split("eta ")[1].strip() for line in shown}) == ["0:08", "0:09"]
