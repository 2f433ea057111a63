"""Train the same runs at a commit and in the working tree, and compare all bits: a refactoring changes none.

    python scripts/same_bits.py                  # against HEAD
    python scripts/same_bits.py main --short     # against another commit, a third of the runs

Compares the SHA-256 of the final weights, the results in summary.json, and every number of metrics.jsonl except those of
the clock and of memory. The exit status is 1 if anything differs or fails. A run that the commit refuses as a user error,
because it lacks a key or an option, is new.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there; no thread pool may exist when we fork
sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults.lives import begin, preload, without_clock
from same_bits_runs import COMMON, KILL_AT, KILLED, RUN, RUNS, SHORT

ROOT = Path(__file__).resolve().parents[1]
_GIT = ("git", "-C", str(ROOT))
_USER_ERROR, _LONGEST_ERROR = 2, 300
_NO_ANSWER = (1, "the process that starts the runs has ended")
_RESULTS = ("status", "weights_sha256", "global_step", "best", "last", "test_step", "test")


def folder_of(name: str) -> str:
    """The name of the folder of a run, which occurs in words of commands."""
    return re.sub(r"\W+", "_", name)


def words(command: str, here: Path) -> list[str]:
    """The words of a command whose files belong in the folder `here`."""
    own = "" if "model=" in command or "ckpt_path=" in command else "model.width=4"
    place = "" if ".dir=" in command else RUN
    return f"{COMMON} {own} {command} {place}".replace("{here}", str(here)).split()


def train(name: str, here: Path) -> tuple[int, str]:
    """Run the commands of a run until one fails; returns the exit status and its error, or the last line that it printed."""
    for number, command in enumerate(RUNS[name]):
        life = begin(words(command, here), here / f"{number}.log")
        try:
            if killed := (name == KILLED and number == 0):
                while not life.ended() and not any(here.glob(KILL_AT)):
                    time.sleep(0.002)
                life.kill()
            status = life.wait()
        finally:
            life.kill()  # if this process is interrupted
        if status != (-signal.SIGKILL if killed else 0):
            _, marker, error = life.said().rpartition("error: ")  # of several lines, if it is the program's own
            lines = error.strip().splitlines() or [f"status {status}"]
            return status or 1, " ".join(" ".join(lines if marker else lines[-1:]).split())[:_LONGEST_ERROR]
    return 0, ""


def serve(folder: Path, names: Sequence[str]) -> None:
    """Train runs of the tree that PYTHONPATH leads to, and print what became of each as a line of JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with (folder / "ranks.log").open("wb") as log:  # they print to what was standard output when their server started
        os.dup2(log.fileno(), 1)
    preload(folder / "preload", ["train", *words("max_steps=1", folder / "preload")])
    for name in names:
        print(json.dumps(train(name, folder / folder_of(name))), file=answers)


def contents(folder: Path) -> dict[str, str]:
    """The numbers of all runs below a folder that a repetition gives again, by where they are."""
    found = {}
    for summary in sorted(folder.rglob("summary.json")):
        metrics, results = summary.with_name("metrics.jsonl"), json.loads(summary.read_text())
        for number, line in enumerate(metrics.read_text().splitlines() if metrics.exists() else [], 1):
            for key, value in without_clock(json.loads(line)).items():
                found[f"{metrics.relative_to(folder)}:{number}: {key}"] = json.dumps(value)
        for key in _RESULTS:
            found[f"{summary.relative_to(folder)}: {key}"] = json.dumps(results.get(key))
    return found


def difference(old: Path, new: Path) -> str:
    """The first number that differs between the runs below two folders, or an empty string."""
    before, after = contents(old), contents(new)
    for where in {**before, **after}:
        if before.get(where) != after.get(where):
            return f"{where}: {before.get(where, 'nothing')} became {after.get(where, 'nothing')}"
    return "" if before else "no run has a summary"


def verdict(answers: Sequence[tuple[int, str]], folders: Sequence[Path]) -> str:
    """What became of a run at the commit and in the working tree; `equal` and `new...` are as they should be."""
    (old, said_by_old), (new, said_by_new) = answers
    if new:
        return f"failed: {said_by_new}" if old else f"failed, and did not at the commit: {said_by_new}"
    if old:
        return f"{'new: ' if old == _USER_ERROR else 'failed '}at the commit: {said_by_old}"
    found = difference(*folders)
    return f"DIFFERENT: {found}" if found else "equal"


@contextlib.contextmanager
def checked_out(commit: str, tree: Path) -> Iterator[Path]:
    """Check out a commit in a temporary worktree."""
    subprocess.run([*_GIT, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*_GIT, "worktree", "remove", "--force", str(tree)], check=True)


def server(tree: Path, folder: Path, names: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that trains the runs of a tree one after the other in a folder."""
    from faults.disk import pictures

    sys.path.append(str(ROOT / "tests" / "support"))
    import drawn_masks
    import drawn_objects

    pictures(folder / "pictures")
    drawn_masks.draw(folder / "shapes", train=8, val=4)
    for seed, (split, count) in enumerate({"train": 8, "val": 4}.items()):
        drawn_objects.draw(folder / "objects", split, count, seed)
    command = [sys.executable, __file__, "--serve", str(folder), *(word for name in names for word in ("--run", name))]
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{ROOT / 'tests' / 'support'}"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def compare(commit: str, names: Sequence[str], scratch: Path) -> dict[str, str]:
    """Train runs at a commit and in the working tree at the same time, and print the verdict on each."""
    found, folders = {}, [scratch / "old", scratch / "new"]
    with checked_out(commit, scratch / "tree") as tree, contextlib.ExitStack() as stack:
        trees = zip((tree, ROOT), folders, strict=True)
        servers = [stack.enter_context(server(root, folder, names)) for root, folder in trees]
        for name in names:
            lines = [each.stdout.readline() for each in servers if each.stdout]
            answers = [json.loads(line) if line else _NO_ANSWER for line in lines]
            found[name] = verdict(answers, [folder / folder_of(name) for folder in folders])
            print(f"{name:<34} {found[name]}", flush=True)
    return found


def main() -> int:
    """Compare what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="what to compare the working tree with")
    parser.add_argument("--short", action="store_true", help="a third of the runs")
    parser.add_argument("--run", action="append", choices=RUNS, metavar="NAME", help="only this run; repeatable")
    parser.add_argument("--folder", type=Path, help="keep all runs in this folder; without it they are removed")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.run or list(SHORT if options.short else RUNS)
    if options.serve:
        with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the process that compares is gone
            serve(options.serve, names)
        return 0
    if subprocess.run(
        [*_GIT, "rev-parse", "--quiet", "--verify", f"{options.commit}^{{commit}}"], stdout=subprocess.DEVNULL
    ).returncode:
        parser.error(f"'{options.commit}' is not a commit")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the worktree is removed
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        found = compare(options.commit, names, (options.folder or Path(scratch)).resolve())
    wrong = sum(not each.startswith(("equal", "new")) for each in found.values())
    print(f"{len(found) - wrong} of {len(found)} runs as they should be, {time.perf_counter() - began:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
