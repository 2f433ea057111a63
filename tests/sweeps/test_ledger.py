"""The same sweep again: what has finished is skipped, what was interrupted goes on, what is new runs, nothing is lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from extended import some
from forked import ForkedProgram
from running_sweeps import contents, digests, events, kill_and_repeat, started, until
from stored_sweeps import make_ledger

from runner.base.errors import DiskFull, UserError
from runner.sweeps import table
from runner.sweeps.ledger import NAME, Entry, Ledger
from runner.sweeps.plan import identity

TWO = ("--multirun", "seed=0,1")


@pytest.fixture
def two_jobs(made_once, workdir) -> Path:
    """The folder of a finished sweep of two jobs, where the same command finds it."""
    folder = made_once(*TWO)[1]
    shutil.copytree(folder.parents[2], workdir / "outputs")
    return workdir / "outputs" / folder.relative_to(folder.parents[2])


def test_a_finished_sweep_is_not_repeated_and_its_table_is_shown(sweep, two_jobs):
    before = {path: path.read_bytes() for path in two_jobs.glob("*/*") if path.is_file()}
    result, folder = sweep(*TWO, "log.every_steps=2")  # which changes no result
    assert result.status == 0, result.err
    assert folder.resolve() == two_jobs
    assert "2 of 2 jobs have finished already; sweep.new=true" in result.out
    assert result.out.count(": skipped, ") == 2
    assert "2 of 2 jobs finished" in result.out
    assert {path: path.read_bytes() for path in before} == before
    assert started(folder) == ["0", "1"]


@pytest.mark.parametrize(
    ("words", "new"),
    [(["seed=2,0,1"], ["1", "2"]), (["seed=0", "optimizer.lr=0.02,0.03", "hydra.sweep.dir=FOLDER"], ["2", "3"])],
)
def test_a_larger_grid_and_other_keys_of_a_named_sweep_run_what_is_left_and_new_jobs(sweep, two_jobs, words, new):
    if "1" in new:
        (two_jobs / "1" / "summary.json").unlink()
    before = contents(two_jobs / "0")
    result, folder = sweep("--multirun", *(word.replace("FOLDER", str(two_jobs)) for word in words))
    assert (result.status, folder.resolve()) == (0, two_jobs), result.err
    assert started(folder)[:2] == ["0", "1"]
    assert sorted(started(folder)[2:]) == new
    assert contents(two_jobs / "0") == before
    assert ("seed=2" in (two_jobs / "2" / "overrides.yaml").read_text()) == ("1" in new)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"0", "1", *new, "logs"}


def test_a_run_does_not_write_into_a_sweep(run, tiny, two_jobs):
    before = contents(two_jobs)
    result = run("train", *tiny, f"hydra.run.dir={two_jobs}")
    assert (result.status, f"hydra.run.dir: {two_jobs} holds a sweep" in result.err) == (2, True)
    assert contents(two_jobs) == before


@pytest.mark.parametrize(
    "words",
    some(
        [
            ("seed=0", "sweep.new=true"),
            ("seed=0", "optimizer.lr=0.02"),
            ("seed=0", "dry_run=true"),
            ("seed=0", "data.root=elsewhere"),
            ("optimizer.lr=0.1",),
        ],
        *(0, 1, 3),
    ),
    ids=["asked for", "base", "dry run", "other data", "other keys"],
)
def test_another_sweep_gets_a_folder_of_its_own(sweep, two_jobs, words):
    result, folder = sweep("--multirun", *words)
    assert result.status == 0, result.err
    assert folder.resolve() != two_jobs
    assert (started(folder), started(two_jobs)) == (["0"], ["0", "1"])


def _without(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Replace the ledger by what `make` makes."""
    return lambda ledger: (ledger.unlink(), make(ledger))


NO_LEDGER = "sweep.dir: cannot be FOLDER: it holds runs, and no sweep.jsonl of this sweep"


@pytest.mark.parametrize(
    ("words", "damage", "reason"),
    [
        ((*TWO, "optimizer.lr=0.02"), None, "sweep.dir: is a sweep with another base config: optimizer.lr was "),
        ((*TWO, "sweep.new=true"), None, "sweep.dir: is FOLDER, and sweep.new is given too"),
        ((*TWO, "sweep.dir=FOLDER/0"), None, "sweep.dir: cannot be FOLDER/0: it holds a run"),
        ((*TWO, "sweep.retry=some"), None, "retry: cannot be"),
        ((), None, "sweep.dir: applies to a sweep, and this is a single run"),
        (TWO, Path.unlink, NO_LEDGER),
        (
            (*TWO, "optimizer.lr=0.7"),
            lambda ledger: ledger.write_text(ledger.read_text()[40:]),  # without a launch
            NO_LEDGER,
        ),
        *(
            (TWO, _without(make), "sweep.jsonl is not a regular file\n    allowed: another folder")
            for make in (Path.mkdir, os.mkfifo, lambda ledger: ledger.symlink_to("elsewhere"))
        ),
    ],
)
def test_what_cannot_continue_is_refused_and_leaves_the_sweep_alone(sweep, two_jobs, words, damage, reason):
    if damage is not None:
        damage(two_jobs / "sweep.jsonl")
    before = contents(two_jobs)
    result, _ = sweep(f"sweep.dir={two_jobs}", *(word.replace("FOLDER", str(two_jobs)) for word in words))
    assert result.status == 2
    assert reason.replace("FOLDER", str(two_jobs)) in result.err
    assert contents(two_jobs) == before
    assert not Path("elsewhere").exists()


def test_failed_jobs_are_repeated_or_not_as_retry_says(sweep):
    words = ("--multirun", "model.width=0,4")
    first, folder = sweep(*words)
    assert first.status == 1
    assert started(folder) == ["0", "1"]
    [failed] = events(folder, "failed")
    assert "width must be at least 1" in failed["sentence"]
    again = next(line for line in (first.out + first.err).splitlines() if line.startswith("    again: "))
    assert "python -m runner train " in again
    assert "model.width=0" in again
    assert "multirun" not in again
    for retry, folders in (("never", []), ("failed", ["0"]), ("all", ["2", "3"])):
        before = len(started(folder))
        result, same = sweep(*words, f"sweep.retry={retry}")
        assert (result.status, same) == (1, folder)
        assert started(folder)[before:] == folders
        assert ("sweep.retry=all starts all of them again" in result.out) == (retry == "all")
        assert "1 of 2 jobs finished" in result.out
    assert json.loads((folder / "1" / "summary.json").read_text())["status"] == "finished"


def test_a_job_is_known_by_what_changes_its_result_and_by_what_is_swept():
    values = {"seed": 0, "tags": [], "log": {"curves": True}, "data": {"num_workers": 0}}

    def known(swept=(), words=(), **others):
        return identity(values | others, words, swept)

    assert known() == known(tags=["x"]) == known(log={"curves": False}) == known(data={"num_workers": 2})
    assert known() != known(seed=1)
    # Ledgers of versions before data.decode lack it
    assert known() == known(data={"num_workers": 0, "decode": "auto"})
    assert known() != known(data={"num_workers": 0, "decode": "pillow"})
    swept = ("data.num_workers",)
    assert known(swept) != known(swept, data={"num_workers": 2})
    assert known(("performance",), ["performance=a"]) != known(("performance",), ["performance=b"])


def test_a_torn_last_line_is_skipped_and_the_next_one_is_whole(tmp_path):
    make_ledger(tmp_path, None, [])
    ledger = Ledger.read(tmp_path)
    ledger.append_job("a", Entry("started", folder=tmp_path / "0", overrides=["seed=0"]))
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"event": "launch", "time": 1}\n\x00\n[]\n{"event": "finished", "jo')
    assert Ledger.read(tmp_path).jobs["a"].status == "started"
    ledger.append_job("b", Entry("started", folder=tmp_path / "1", overrides=["seed=1"]))
    assert {name: entry.folder.name for name, entry in Ledger.read(tmp_path).jobs.items()} == {"a": "0", "b": "1"}
    assert Ledger.read(tmp_path) == ledger


def test_a_job_whose_line_is_torn_is_found_by_its_settings(two_jobs, run):
    ledger = two_jobs / "sweep.jsonl"
    *others, started, _ = ledger.read_text().splitlines(keepends=True)
    assert [json.loads(started)[key] for key in ("event", "folder")] == ["started", "1"]
    ledger.write_text("".join(others) + started[:-20])
    records = Ledger.read(two_jobs)
    assert records.torn
    assert [(entry.folder.name, entry.status) for entry in records.jobs.values()] == [
        ("0", "finished"),
        ("1", "started"),
    ]
    assert "2 of 2 jobs finished" in run("sweep", str(two_jobs)).out


@pytest.mark.parametrize(
    "damaged",
    some(
        [
            lambda text: '{"event": "x", "job": "a"}\n' * 200_000 + text,
            lambda text: text[:-20],
            lambda text: text[40:],
        ],
        *(0, 2),
    ),
    ids=["foreign lines", "cut line", "cut launch"],
)
def test_a_damaged_ledger_loses_nothing(sweep, two_jobs, damaged):
    before, ledger = {path: path.read_bytes() for path in two_jobs.glob("*/*.safetensors")}, two_jobs / "sweep.jsonl"
    ledger.write_text(damaged(ledger.read_text()))
    result, folder = sweep(*TWO, f"sweep.dir={two_jobs}")
    assert (result.status, folder) == (0, two_jobs), result.err
    assert "Traceback" not in result.err
    assert result.out.count(": skipped, ") == 2
    assert "2 of 2 jobs finished" in result.out
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1", "logs"]


@pytest.mark.parametrize("place", some(["/FOLDER/elsewhere", "../../elsewhere", "..", "", "a link"], 1, 3, 4))
def test_a_job_lies_inside_its_sweep_whatever_the_ledger_and_links_say(sweep, two_jobs, workdir, place):
    (two_jobs / "1").rename(workdir / "elsewhere")
    (workdir / "elsewhere" / "summary.json").unlink()
    if place == "a link":
        (two_jobs / "1").symlink_to(workdir / "elsewhere")
    else:
        lines = events(two_jobs)
        for line in lines:
            line |= {"folder": place.replace("/FOLDER", str(workdir))} if line.get("folder") == "1" else {}
        (two_jobs / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def outside() -> dict[Path, int]:
        paths = (path for path in workdir.rglob("*") if not path.is_relative_to(two_jobs))
        return {path: path.stat().st_mtime_ns for path in paths if path.is_file()}

    before = outside()
    result, folder = sweep(*TWO, f"sweep.dir={two_jobs}")
    assert result.status == 0, result.err
    assert "2 of 2 jobs finished" in result.out
    assert outside() == before
    assert (folder / ("2" if place == "a link" else "1") / "summary.json").is_file()


def test_two_processes_do_not_run_the_same_sweep(sweep, tiny, workdir):
    program = ForkedProgram(["train", *tiny, *TWO, "epochs=100000"])
    found = until(lambda: list(workdir.rglob("metrics.jsonl")), program)
    shown = subprocess.run(
        [sys.executable, "-c", "import sys; from runner.cli import main; main(['sweep', sys.argv[1]]); "
         "assert not {'torch', 'hydra', 'numpy'} & {*sys.modules}", str(found[0].parents[1])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    second, _ = sweep(*TWO, "epochs=100000")
    program.send_signal(signal.SIGTERM)
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 75
    assert "stopped: the same command continues it" in out
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[:3] for line in shown.stdout.splitlines()[4:6]] == [
        ["0", "seed=0", "running"],
        ["-", "seed=1", "pending"],
    ]
    assert second.status == 2
    assert "sweep.dir: " in second.err
    assert "is being run by process" in second.err
    assert [line["event"] for line in events(found[0].parents[1])] == ["launch", "started", "preempted"]


@pytest.mark.extended
def test_the_same_command_twice_at_once_is_one_sweep(tiny, workdir):
    programs = [ForkedProgram(["train", *tiny, *TWO, "epochs=30"]) for _ in range(2)]
    said = [program.communicate(timeout=60)[1] for program in programs]
    assert sorted(program.returncode for program in programs) == [0, 2], said
    assert "is being run by process" in "".join(said)
    assert len(list(workdir.glob("outputs/*/sweeps/*"))) == 1


@pytest.mark.parametrize(("lock", "done"), [(".lock", 2), ("1/.lock", 1)], ids=["sweep", "job"])
def test_a_folder_that_cannot_be_written_ends_in_a_sentence(sweep, two_jobs, lock, done):
    if lock != ".lock":
        (two_jobs / "1" / "summary.json").unlink()
    (two_jobs / lock).unlink(missing_ok=True)
    (two_jobs / lock).mkdir()  # a read-only file system is not an obstacle to root, who may run the tests
    result, _ = sweep(*TWO)
    assert result.status in (1, 2)
    here = f"{Path.cwd().resolve()}/"
    assert f"cannot write {two_jobs / lock}".replace(here, "") in (result.out + result.err).replace(here, "")
    assert "is being run by" not in result.err
    (two_jobs / lock).rmdir()
    again, _ = sweep(*TWO)
    assert again.status == 0, again.err
    assert again.out.count(": skipped, ") == done


def test_a_line_that_a_full_disk_cut_does_not_count_and_the_next_one_is_whole(tmp_path):
    make_ledger(tmp_path, None, [])
    ledger = Ledger.read(tmp_path)
    limits, size = resource.getrlimit(resource.RLIMIT_FSIZE), (tmp_path / NAME).stat().st_size + 20
    entry = Entry("started", folder=tmp_path / "0", overrides=["seed=0"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*sweep\.jsonl: it would exceed the largest file size"):
            ledger.append_job("a", entry)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / NAME).stat().st_size == size
    assert Ledger.read(tmp_path).jobs == ledger.jobs == {}
    ledger.append_job("a", entry)
    assert Ledger.read(tmp_path).jobs["a"].status == "started"


def test_a_full_disk_ends_the_sweep_and_its_table_is_shown(sweep, monkeypatch):
    def full(*given: object, **named: object) -> None:
        raise DiskFull("no space left")

    monkeypatch.setattr(Ledger, "append_job", full)
    monkeypatch.setattr(table, "write_json", full)
    result, _ = sweep(*TWO)
    assert result.status == 1
    assert result.err.count("error: no space left") == 2
    assert "job 2 of 2" not in result.out
    assert "0 of 2 jobs finished" in result.out


def test_a_job_whose_folder_was_removed_starts_again_and_the_others_are_skipped(sweep, two_jobs):
    before = {*digests(two_jobs).values()}
    shutil.rmtree(two_jobs / "0")
    result, _ = sweep(*TWO)
    assert result.status == 0, result.err
    assert "1 of 2 jobs have finished already; the others follow; missing folders: 0, and" in result.out
    assert "job 1 of 2: seed=0: started; 1 finished\n" in result.out
    assert result.out.count(": skipped, ") == 1
    assert {*digests(two_jobs).values()} == before


@pytest.mark.parametrize(
    ("kills", "words"),
    some([(4, ("--multirun", "seed=0,1", "optimizer.lr=0.1,0.01")), (1, TWO)], 1, several=True),
    ids=["often", "once"],
)
def test_a_sweep_that_is_killed_anywhere_and_repeated_ends_with_the_same_bits(made_once, tiny, workdir, kills, words):
    expected = digests(made_once(*words)[1])
    kill_and_repeat(["train", *tiny, *words], kills, workdir)
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert digests(folder) == expected
    ended = Counter(line["folder"] for line in events(folder, "finished"))
    assert ended == dict.fromkeys(map(str, range(len(expected))), 1)
