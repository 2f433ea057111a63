"""The files of a sweep that come from someone else, or that a crash left: `watch` and `sweep` say what is there, and end."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stored_sweeps
from extended import some
from stored_sweeps import live_text, make_job, table_text

from runner.sweeps.rows import Scan
from runner.sweeps.table import changes, look, progress_line, summarise
from runner.tracking.console import Console

LAUNCH = stored_sweeps.LAUNCH | {"event": "launch", "time": 1.0, "jobs": {"a": ["seed=0"], "b": ["seed=1"]}}
ENTRY: dict[str, Any] = {"event": "finished", "job": "a", "folder": "0", "overrides": ["seed=0"]}


def make_sweep(folder: Path, *lines: dict[str, Any]) -> Path:
    make_job(folder / "0", ["seed=0"])
    (folder / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def shown(verb: str, folder: Path) -> str:
    """What a verb prints about a sweep with one finished job, in a process that must end."""
    command = [sys.executable, "-m", "runner", verb, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  0  seed=0  finished          0.75  1:01" in done.stdout
    return done.stdout


LINE = json.dumps(ENTRY | {"job": "b", "folder": "1"}).encode()


@pytest.mark.parametrize(
    ("damage", "is_ledger"),
    [
        (b'{"x": 1}\n' * 100_000 + b"\xff{\0\n" * 100_000, True),
        (LINE[:-9], True),
        (b"[" * 200_000 + b"\n", True),
        (None, False),
        (Path.mkdir, False),
        (os.mkfifo, False),
        (lambda path: path.symlink_to("nowhere"), False),
    ],
    ids=["foreign lines", "a cut line", "deep nesting", "no ledger", "a folder", "a named pipe", "a link to nowhere"],
)
@pytest.mark.parametrize("verb", some(["sweep", "watch"], 0))
def test_a_damaged_ledger_hides_no_run_and_keeps_nobody_waiting(
    tmp_path: Path, verb: str, damage: Any, is_ledger: bool
) -> None:
    ledger = make_sweep(tmp_path / "sweep", LAUNCH, ENTRY) / "sweep.jsonl"
    if isinstance(damage, bytes):
        ledger.write_bytes(ledger.read_bytes() + damage)
    else:
        ledger.unlink()
        _ = damage and damage(ledger)
    text = shown(verb, ledger.parent)
    assert ("  -  seed=1  pending" in text) == is_ledger
    assert f"1 of {1 + is_ledger} jobs finished" in text


@pytest.mark.parametrize(
    "place", some(["/elsewhere", "../..", "../other/0", "link", "link/0", "0/../../other/0", "", "."], 0, 3, 6)
)
def test_a_job_that_a_ledger_has_elsewhere_is_ignored_with_a_note(tmp_path: Path, place: str) -> None:
    other = tmp_path / "other"
    make_job(other / "0", ["seed=1"], error="not to be seen")
    (other / "0" / "progress.json").write_text("{}")
    elsewhere = ENTRY | {"job": "b", "folder": place.replace("/elsewhere", str(other / "0"))}
    sweep = make_sweep(tmp_path / "sweep", LAUNCH, ENTRY, elsewhere | {"event": "started"}, elsewhere)
    (sweep / "link").symlink_to(other / "0" if place == "link" else other)
    for verb in ("sweep", "watch"):
        text = shown(verb, sweep)
        assert text.startswith(f"warning: {sweep}: ignored 1 job of sweep.jsonl whose folder is a link or not in the")
        assert "  -  seed=1  pending" in text
    assert [(row.job, row.status) for row in summarise(sweep)] == [("0", "finished"), ("-", "pending")]
    # Nor does it hide the runs that are there.
    (scan := Scan()).add(sweep)
    scan.add(other)
    assert [row.folder for row in scan.rows if row.status == "finished"] == [sweep / "0", other / "0"]


WRONG_TYPES: dict[str, list[Any]] = {
    "jobs": [3, ["a"], {"a": 3}, {"a": [3]}],
    "swept": [3, "seed", [[1]]],
    "flags": [3, "abc", [1]],
    "time": ["x", "12", None, [], True, float("nan")],
    "base": [3, ["a"], None],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_TYPES.items() for value in values])
def test_a_launch_with_other_types_is_no_launch(tmp_path: Path, key: str, value: Any) -> None:
    view = look(make_sweep(tmp_path / "sweep", LAUNCH | {key: value}, ENTRY))
    assert [row.status for row in view.rows] == ["finished"]
    assert not view.sweeps


@pytest.mark.parametrize(
    "more",
    [
        {"sentence": {"a": 1}, "event": "failed"},
        {"metric": ["x"], "value": 1, "folder": "gone"},
        {"metric": {"a": 1}, "value": "x", "folder": "gone"},
        *({"folder": value} for value in ("\0", "x" * 5000, "9" * 5000, "\ud800", "a/b/c")),
        *({"overrides": value} for value in ("abc", ["\ud800=1"], [{"a": 1}])),
        {"event": "unheard-of", "folder": "gone"},
    ],
    ids=lambda more: str(more)[:40].encode("ascii", "replace").decode(),
)
@pytest.mark.parametrize("jobs", [LAUNCH["jobs"], None], ids=["planned", "searched"])
def test_an_entry_with_other_types_breaks_no_table(tmp_path: Path, jobs: Any, more: dict[str, Any]) -> None:
    sweep = make_sweep(tmp_path / "sweep", LAUNCH | {"jobs": jobs}, ENTRY | more)
    counts, jobs, _ = table_text(summarise(sweep)).partition(" jobs")
    assert " of " in counts
    assert jobs
    assert json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert live_text(sweep, 80)[0].startswith(counts)
    assert progress_line(look(sweep)).startswith(counts)


BIDIRECTIONAL = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def test_no_bidirectional_character_reaches_terminal_markdown_or_csv(tmp_path: Path) -> None:
    words = [f"notes=a{BIDIRECTIONAL}b", f"tags=\x1b[31m{BIDIRECTIONAL}"]
    best = {"metric": f"val/{BIDIRECTIONAL}", "mode": "max", "value": 0.5}
    sweep = tmp_path / f"sweep{BIDIRECTIONAL}"
    make_job(sweep / "0", words, best=best)
    make_job(sweep / f"1{BIDIRECTIONAL}", ["notes=c"], status="failed", error=f"it {BIDIRECTIONAL}broke")
    (sweep / "2").mkdir()
    view, stream = look(sweep), io.StringIO(table_text(summarise(sweep)) + "\n".join(live_text(sweep, 300)) + "\n")
    stream.seek(0, io.SEEK_END)
    for line in [progress_line(view), *changes(look(sweep / "2"), view)]:
        Console(None, stream=stream).line(line)
    texts = [stream.getvalue(), *((sweep / name).read_text() for name in ("sweep.csv", "sweep.md"))]
    for text in texts:
        assert "notes=ab" in text or "ab" in text
        assert not {*BIDIRECTIONAL, "\x1b"} & {*text}
    assert "it broke" in texts[0]
    assert "it broke" in texts[2]
    assert json.loads((sweep / "sweep.json").read_text())["jobs"][0]["overrides"] == words


def test_markdown_shows_the_command_of_a_failed_job_as_it_is(tmp_path: Path) -> None:
    word = "notes=`<img src=x onerror=alert(1)>`\n# no heading"
    make_job(tmp_path / "0", [word], status="failed", error="<script>alert(1)</script>")
    [row] = summarise(tmp_path)
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    command = next(line for line in lines if "runner train" in line)
    # Markdown takes an indented line for code, and nothing in it for markup.
    assert command.startswith("    again: python -m runner train ")
    assert shlex.split(command.partition("again: ")[2])[-1] == word.replace("\n", " ")
    assert not any("<script" in line or line.startswith("# no") for line in lines)
    assert row.repeat is not None
