import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lock_holder import held_elsewhere

from runner.base.errors import UserError
from runner.base.reading import read_overrides, read_summary
from runner.config import stored
from runner.config.composition import Composition
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.config.sources import Sources
from runner.run import setup
from runner.run.directory import Occupied, claim, hold, works
from runner.run.run_directory import RunDirectory
from runner.tracking.run_files import copy_until
from runner.verbs.predict.rows import open_table


def opened(path, *words):
    """The directory of a job of a sweep, which has it before anything else."""
    directory = RunDirectory(Composition(Train, "train", Sources(), overrides=[*words], job_dir=path))
    directory.reserve()
    return directory


def test_processes_that_claim_at_the_same_time_never_share_a_directory(tmp_path):
    parent = tmp_path / "new" / "parent"
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from runner.run.directory import claim\n"
        "time.strftime = lambda _: '2026-11-20_10-31-07'\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        f"for _ in range(25): print(claim(Path({str(parent)!r})).name)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    names = [name for process in processes for name in process.communicate(timeout=120)[0].split()]
    expected = ["2026-11-20_10-31-07", *(f"2026-11-20_10-31-07_{count}" for count in range(1, 100))]
    assert sorted(names) == sorted(path.name for path in parent.iterdir()) == sorted(expected)


def test_a_parent_that_is_a_file_is_told_in_a_sentence(tmp_path):
    (tmp_path / "outputs").touch()
    for make in (claim, opened):
        with pytest.raises(UserError, match=r"cannot write .*outputs"):
            make(tmp_path / "outputs")


def test_a_run_directory_has_its_folders_and_reads_back_what_it_wrote(tmp_path):
    run = opened(tmp_path / "run", "optimizer.lr=0.1", "name='a: b'", "seed=1")
    assert run.checkpoints.is_dir()
    assert run.plots.is_dir()
    for text in (None, "", "{", "[1]"):
        if text is not None:
            (run.path / "summary.json").write_text(text)
        assert read_summary(run.path) is None
    run.write_summary({"status": "finished", "best": {"value": float("nan")}})
    assert yaml.safe_load((run.path / "overrides.yaml").read_text()) == ["optimizer.lr=0.1", "name='a: b'", "seed=1"]
    assert read_summary(run.path) == {"status": "finished", "best": {"value": None}}
    run.close()
    assert yaml.safe_load((opened(tmp_path / "other").path / "overrides.yaml").read_text()) == []


@pytest.mark.parametrize(
    "name", [".lock", "run.log", "metrics.jsonl", "summary.json", "metrics_val.csv", "checkpoints", "nonfinite"]
)
def test_nothing_is_written_through_a_link_to_elsewhere(name, tmp_path):
    run, precious = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    (run / name).symlink_to(precious)
    with pytest.raises(UserError, match=f"{re.escape(str(run / name))} is a link"):
        opened(run)
    assert not precious.exists()


def test_what_a_killed_process_has_left_is_removed_by_the_next_one_that_has_the_lock(tmp_path):
    folders = [tmp_path, *(tmp_path / name for name in ("plots", "checkpoints", "samples", "pictures"))]
    left = [folder / ".summary.json.0a1b.tmp" for folder in folders]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with held_elsewhere(tmp_path), pytest.raises(Occupied):
        opened(tmp_path)
    assert all(path.exists() for path in left), "the other process may be at work on them"
    opened(tmp_path).close()
    assert not any(path.exists() for path in left)


def test_metrics_taken_over_are_those_up_to_the_step_and_none_that_is_no_metric(tmp_path):
    source, own = tmp_path / "other.jsonl", tmp_path / "metrics.jsonl"
    copy_until(source, own, 0)
    lines = [json.dumps({"global_step": step, "epoch": 1, "split": split}) for step in (1, 2, 3) for split in "tv"]
    odd = ["[" * 100_000, '{"global_step": 1, "a": ' + "[" * 5000 + "]" * 5000 + "}", "", "{}"]
    source.write_text("\n".join([*lines[:1], *odd, *lines[1:]]) + "\n" + "x" * 2**21)
    copy_until(source, own, 3)
    with own.open("a") as file:
        file.write('{"global_step": 1, "ep')
    for step, count in ((2, 4), (-1, 0)):
        copy_until(own, own, step)  # from itself
        assert own.read_text().splitlines() == lines[:count]


WORDS = ["seed=1", "resume=auto"]


def same(folder):
    try:
        return read_overrides(folder) == WORDS
    except OSError as error:
        raise ValueError(f"overrides.yaml: {error}") from error


def begin_run(runs, name, started=None, words=WORDS, status="preempted"):
    run = opened(runs / name, *words)
    run.summary |= {"status": status} | ({"started": started} if started else {})
    run.close()
    return run.path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("overrides.yaml", text) for text in ("- 2024-99-99", "[" * 50_000, "- " + "x" * 2**21, "\0")),
        *((name, None) for name in ("overrides.yaml", "summary.json", "run.log", ".lock", "checkpoints")),
    ],
    ids=range(9),
)
def test_a_neighbour_with_odd_overrides_or_a_named_pipe_does_not_stop_the_search(name, text, tmp_path):
    good, bad = begin_run(tmp_path, "2026-01-01_00-00-00"), begin_run(tmp_path, "2026-09-09_00-00-00")
    if text is None:
        (bad / name).rmdir() if (bad / name).is_dir() else (bad / name).unlink(missing_ok=True)
        os.mkfifo(bad / name)
    else:
        (bad / name).write_text(text)
    found, warnings = setup.unfinished(tmp_path, same)
    assert found == good
    assert len(warnings) == (text != "- 2024-99-99")
    assert all(warning.startswith(f"resume=auto skips {bad}: ") for warning in warnings)
    assert all(text or name in warning for warning in warnings)


def test_the_newest_run_is_the_one_that_started_last_whatever_its_name_says(tmp_path):
    begin_run(tmp_path, "2026-09-09_12-00-00", "2026-09-09T12:00:00+00:00")
    newer = begin_run(tmp_path, "2026-09-09_10-00-00", "2026-09-09T12:00:00.000001+00:00")
    assert setup.unfinished(tmp_path, same)[0] == newer
    begin_run(tmp_path, "2026-01-01_00-00-00", "2026-09-09T12:00:00.000002+00:00", status="finished")
    assert setup.unfinished(tmp_path, same) == (None, [])


def test_the_command_is_resolved_once_for_all_earlier_runs(tmp_path, compose, monkeypatch):
    composition, resolved = compose("resume=auto", f"output_root={tmp_path}"), []
    for seed in (1, 2, 3):
        run = begin_run(composition.runs, f"run_{seed}")
        (run / "config.yaml").write_text(stored.dump(composition.values | {"seed": seed}))
    monkeypatch.setattr(setup, "resolve_config", lambda *known: resolved.append(1) or resolve_config(*known))
    assert setup.to_continue(composition) == (None, [])
    assert len(resolved) == 1
    (run / "config.yaml").write_text(stored.dump(composition.values))
    assert setup.to_continue(composition) == (run, [])


def test_of_runs_without_a_start_time_the_newest_was_written_last(tmp_path):
    for count, name in enumerate(["2026-09-09_12-00-00", "2026-09-09_10-00-00", "2026-09-09_10-00-00_1"]):
        summary = begin_run(tmp_path, name) / "summary.json"
        os.utime(summary, (1000 + min(count, 1), 1000 + min(count, 1)))
    assert setup.unfinished(tmp_path, same)[0].name == "2026-09-09_10-00-00_1"


def test_a_run_that_starts_again_begins_with_empty_logs(tmp_path, compose):
    left = [tmp_path / name for name in ("run.log", "metrics.jsonl", "metrics_val.csv", "tensorboard/events")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("of the killed run\n")
    directory = RunDirectory(compose())
    directory.config, directory.again = resolve_config(directory.composition, Train), tmp_path
    directory.open()
    directory.close()
    assert not any(path.exists() and path.read_text() for path in left)


def test_a_folder_is_at_work_as_long_as_another_process_holds_it_whatever_number_that_has(tmp_path):
    assert not works(tmp_path)
    with held_elsewhere(tmp_path) as process:
        assert works(tmp_path)
        with pytest.raises(Occupied, match=f"being written by process {process.pid} on"):
            hold(tmp_path)
        process.kill()
        process.wait()
        assert not works(tmp_path)
        # The number is in use again
        (tmp_path / ".lock").write_text(f"process {os.getppid()} on {socket.gethostname()}")
        assert not works(tmp_path)
    (tmp_path / ".lock").write_text("process 1 on elsewhere")
    assert works(tmp_path)
    (tmp_path / ".lock").write_text("")
    assert not works(tmp_path)


def test_a_directory_that_cannot_be_used_is_not_locked(tmp_path):
    (tmp_path / "plots").touch()
    with pytest.raises(UserError, match="plots"):
        opened(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_a_process_that_asks_about_its_own_folder_keeps_the_lock(tmp_path):
    held = hold(tmp_path)
    assert not works(tmp_path)
    code = f"from pathlib import Path; from runner.run.directory import works; print(works(Path({str(tmp_path)!r})))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"
    os.close(held)
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
    (tmp_path / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    assert not works(tmp_path)


def test_looking_at_a_folder_does_not_keep_others_from_it(tmp_path):
    os.close(hold(tmp_path))
    code = (
        "from pathlib import Path\n"
        "from runner.run.directory import works\n"
        "print('ready', flush=True)\n"
        f"while True: works(Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as watcher:
        try:
            watcher.stdout.readline()
            for _ in range(3000):
                os.close(hold(tmp_path))
        finally:
            watcher.kill()


def test_a_full_disk_is_reported_when_the_lock_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match="no space left"):
        hold(tmp_path)


def test_a_full_disk_is_reported_when_a_table_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "open", lambda *_: io.BufferedWriter(io.FileIO("/dev/full", "w")))
    with pytest.raises(UserError, match="no space left"), open_table(tmp_path / "rows.csv", {}) as write:
        write([{"path": "a.png"}])
