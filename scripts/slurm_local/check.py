"""Check on a real SLURM, of one node on this machine, what the documentation promises about jobs of SLURM.

    apt-get install slurm-wlm munge
    python scripts/slurm_local/check.py                     # all of it, about 20 minutes
    python scripts/slurm_local/check.py array ranks         # parts of it
    python scripts/slurm_local/check.py preempted --preemptions 3

Each part prints a line for every promise, with what was found; the exit status is 1 if one was broken. The cluster is
started first and stopped at the end, with all its files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slurm_local.cluster import cluster

RUNNER = (sys.executable, "-m", "runner", "train")
TINY = (
    "threads=1", "device=cpu", "log.progress=false", "log.curves=false", "model=small_cnn", "model.width=4",
    "data=synthetic", "data.image_size=8", "evaluate.test=false",
)  # fmt: skip
SWEEP = (*TINY, "data.dataset.samples=32", "epochs=1", "logger=none", "--multirun")
LONG = (
    *TINY, "data.dataset.samples=512", "data.num_workers=2", "data.placement=disk", "epochs=60",
    "checkpoint.min_seconds=0",
)  # fmt: skip
LAUNCHER = ("hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1")
_PATIENCE_S = 600.0


class Check:
    """A folder to work in, the cluster, and what was found."""

    def __init__(self, folder: Path, environment: dict[str, str], draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
        self.lines: list[tuple[str, bool]] = []

    def promise(self, text: str, kept: bool) -> None:
        """Note and print a line."""
        self.lines.append((text, kept))
        print(f"{'ok    ' if kept else 'BROKEN'}  {text}", flush=True)

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder."""
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the folder."""
        with (self.folder / "begun.out").open("a") as output:
            return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=output, stderr=output)

    def wait(self, until: Callable[[], bool], what: str, said: Callable[[], str] = str) -> None:
        """Wait for something; without success this fails with what was `said`."""
        deadline = time.monotonic() + _PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, f"{what}: waited in vain\n{said()}"
            time.sleep(0.1)

    def submit(self, name: str, *commands: str, options: tuple[str, ...] = ()) -> Job:
        """Submit a script of these commands."""
        script = self.folder / f"{name}.sh"
        output = self.folder / f"{name}.out"
        lines = ["#!/bin/bash", "#SBATCH --requeue --open-mode=append", f"#SBATCH --output={output}", *commands]
        script.write_text("\n".join(lines) + "\n")
        done = self.call("sbatch", "--parsable", *options, str(script))
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), output, self.folder / name)


class Job:
    """A job of SLURM that runs the program with a folder of outputs of its own."""

    def __init__(self, check: Check, number: str, output: Path, root: Path) -> None:
        self._check, self.number, self.output, self.root = check, number, output, root

    def shown(self, name: str) -> str:
        """A field of `scontrol show job`."""
        text = self._check.call("scontrol", "show", "job", "--oneliner", self.number).stdout
        found = re.search(rf"\b{name}=(\S+)", text)
        return found[1] if found else ""

    @property
    def restarts(self) -> int:
        """How often SLURM started the job again, or will."""
        return int(self.shown("Restarts") or 0)

    @property
    def runs(self) -> list[Path]:
        """The run directories."""
        return sorted(path.parent for path in self.root.glob("*/*/summary.json"))

    def steps(self) -> int:
        """The number of steps logged so far."""
        return sum(len(path.read_text().splitlines()) for path in self.root.glob("*/*/metrics.jsonl"))

    def summary(self) -> dict[str, object]:
        """The summary of the newest run."""
        try:
            return dict(json.loads((self.runs[-1] / "summary.json").read_text()))
        except (IndexError, OSError, ValueError):
            return {}

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Wait for something."""
        self._check.wait(until, what, self.said)

    def wait_for_end(self) -> str:
        """Wait until the job has ended; returns its state."""
        self.wait(lambda: self.shown("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), "the end")
        return self.shown("JobState")

    def said(self) -> str:
        """The end of the job's output."""
        return self.output.read_text()[-3000:] if self.output.exists() else ""


def train(*words: str, root: Path, by: tuple[str, ...] = ("srun",)) -> str:
    """The line of a script that trains into a folder."""
    return shlex.join([*by, *RUNNER, *words, f"output_root={root}"])


def hashes(check: Check, root: str) -> list[str]:
    """The SHA-256 of the jobs of the only sweep below a folder."""
    paths = sorted(check.folder.glob(f"{root}/*/sweeps/*/*/summary.json"))
    return [str(json.loads(path.read_text()).get("weights_sha256")) for path in paths]


def events(check: Check, root: str) -> dict[str, int]:
    """How often each event is in the ledger of the only sweep below a folder."""
    [ledger] = check.folder.glob(f"{root}/*/sweeps/*/sweep.jsonl")
    return dict(Counter(json.loads(line)["event"] for line in ledger.read_text().splitlines()))


def elements(check: Check) -> list[str]:
    """All elements of arrays that the cluster knows, such as 7_0."""
    shown = check.call("squeue", "--noheader", "--array", "--states=all", "--format=%F_%K").stdout.split()
    return sorted(name for name in shown if not name.endswith("N/A"))


def array(check: Check) -> None:
    """A sweep of four jobs as an array, two of which fail."""
    words = (*SWEEP, *LAUNCHER, "model.width=4,0", "seed=1,2", "sweep.retry=never", "output_root=array")
    before = elements(check)
    first = check.call(*RUNNER, *words)
    new = [name for name in elements(check) if name not in before]
    one = len({name.partition("_")[0] for name in new}) == 1
    check.promise(f"4 jobs were the elements {', '.join(new)} of one array", one and len(new) == 4)
    told = "model.width=0 seed=1: failed: model.width: " in first.stdout + first.stderr
    check.promise(f"2 of them fail, and the reason is shown: status {first.returncode}", first.returncode == 1 and told)
    again = check.call(*RUNNER, *words)
    found = events(check, "array")
    kept = again.returncode == 1 and (found["started"], found["finished"], found["failed"]) == (4, 2, 2)
    check.promise(f"the same command again starts none of them: {found}", kept)
    check.call(*RUNNER, *(word for word in SWEEP if word != "--multirun"), "seed=2", "output_root=alone")
    [alone] = [json.loads(path.read_text())["weights_sha256"] for path in check.folder.glob("alone/*/*/summary.json")]
    check.promise("a job has the bits of the same run alone", hashes(check, "array")[1] == alone)


def sweep_killed(check: Check) -> None:
    """A sweep whose process is killed between the submission of its jobs and its next line, and stopped by Ctrl-C."""
    alone = (*LONG, "epochs=150", "--multirun", "seed=1,2")  # they have to run still when squeue is asked
    words = (*alone, *LAUNCHER)
    tools, environment = check.folder / "tools", check.environment
    tools.mkdir()
    (tools / "sbatch").write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@"\nsleep 60\n')
    (tools / "sbatch").chmod(0o755)
    plain = check.call(*RUNNER, *alone, "output_root=calm")
    before = elements(check)
    check.environment = {**environment, "PATH": f"{tools}:{environment['PATH']}"}
    process = check.begin(*RUNNER, *words, "output_root=killed")
    check.wait(lambda: len(elements(check)) == len(before) + 2, "the jobs")
    process.kill()
    process.wait()
    check.environment = environment
    process = check.begin(*RUNNER, *words, "output_root=killed")
    check.wait(lambda: events(check, "killed").get("launch") == 2, "the second launch")  # before, Ctrl-C ends with 130
    check.wait(lambda: len([*check.folder.glob("killed/*/sweeps/*/*/metrics.jsonl")]) == 2, "progress")
    process.send_signal(signal.SIGINT)
    status = process.wait(timeout=_PATIENCE_S)
    check.promise(f"Ctrl-C ends the sweep with status {status}", status == 75)
    states = check.call("squeue", "--noheader", "--array", "--format=%T").stdout.split()
    check.promise(f"and its jobs are {' and '.join(states)}", states == ["RUNNING"] * 2)
    last = check.call(*RUNNER, *words, "output_root=killed")
    new = [name for name in elements(check) if name not in before]
    check.promise(f"3 launches of the sweep submitted 2 jobs: {', '.join(new)}", len(new) == 2)
    kept = (plain.returncode, last.returncode) == (0, 0) and hashes(check, "killed") == hashes(check, "calm")
    check.promise(f"status {last.returncode}, and the SHA-256 of the sweep without SLURM", kept)
    found = events(check, "killed")
    check.promise(f"each job finished once: {found}", found["finished"] == 2)


def preempted(check: Check, times: int = 20) -> None:
    """One run that is preempted again and again: by a more urgent job, and by the signals of a warning."""
    words = (*LONG, f"epochs={15 * times}")
    whole = check.submit("whole", train(*words, root=check.folder / "whole"))
    assert whole.wait_for_end() == "COMPLETED", whole.said()
    job = check.submit("preempted", train(*words, root=check.folder / "preempted"))
    kinds = ["urgent", "USR1", "USR2"]
    began = time.monotonic()
    for number in range(times):
        before = job.steps()
        job.wait(lambda before=before: job.shown("JobState") == "RUNNING" and job.steps() > before, "progress")
        time.sleep(check.draw.uniform(0, 1))
        if kinds[number % 3] == "urgent":  # SIGTERM, 20 s of grace, SIGKILL, requeued
            check.call("sbatch", "--partition=urgent", "--ntasks=4", "--output=/dev/null", "--wrap=sleep 1")
        else:
            check.call("scancel", f"--signal={kinds[number % 3]}", job.number)
        job.wait(lambda number=number: job.restarts == number + 1, f"requeue {number + 1}")
    state = job.wait_for_end()
    said = job.output.read_text()
    lasted = time.monotonic() - began
    check.promise(
        f"{times} preemptions in {lasted:.0f} s: {state}, restarts {job.restarts}",
        (state, job.restarts) == ("COMPLETED", times),
    )
    count = len(re.findall(r"SLURM job \S+ is requeued", said))
    check.promise(f"the run itself asked for {count} requeues: one for each", count == times)
    check.promise(f"{len(job.runs)} run directory", len(job.runs) == 1)
    logged = len(list(job.root.rglob("tensorboard")))
    check.promise(f"{logged} folder of TensorBoard", logged == 1)
    hashes = [str(each.summary().get("weights_sha256"))[:16] for each in (whole, job)]
    check.promise(f"SHA-256 {hashes[0]} undisturbed, {hashes[1]} preempted", len({*hashes}) == 1)
    steps = [sum(1 for _ in (each.runs[0] / "metrics.jsonl").open()) for each in (whole, job)]
    check.promise(f"{steps[0]} and {steps[1]} lines of metrics", steps[0] == steps[1])


def other_ends(check: Check) -> None:
    """What requeues, and what does not."""
    root = check.folder / "unsaved"
    job = check.submit("unsaved", train(*LONG, root=root))
    job.wait(lambda: job.steps() > 2, "progress")
    checkpoints = job.runs[0] / "checkpoints"
    checkpoints.rename(checkpoints.with_name("moved"))
    checkpoints.touch()  # a file: nothing can be saved there
    check.call("scancel", "--signal=USR1", job.number)
    job.wait(lambda: job.restarts == 1, "a requeue")
    checkpoints.unlink()
    checkpoints.with_name("moved").rename(checkpoints)
    check.promise("a run that cannot save is requeued too", True)
    job.wait(lambda: job.shown("JobState") == "RUNNING", "the next start")
    steps = job.steps()
    job.wait(lambda: job.steps() != steps, "progress")
    check.call("scancel", job.number)
    state = job.wait_for_end()
    kept = (state, job.restarts, len(job.runs)) == ("CANCELLED", 1, 1)
    check.promise(f"scancel ends it: {state}, restarts {job.restarts}, {len(job.runs)} run directory", kept)
    check.promise(f"after it has saved: {job.summary().get('status')}", job.summary().get("status") == "preempted")

    job = check.submit("stays", train(*LONG, "slurm.requeue=false", root=check.folder / "stays"))
    job.wait(lambda: job.steps() > 2, "progress")
    check.call("scancel", "--signal=USR1", job.number)
    state = job.wait_for_end()
    check.promise(f"slurm.requeue=false only saves and ends: {state}", (state, job.restarts) == ("FAILED", 0))


def ranks(check: Check) -> None:
    """Runs of two processes: started by srun, by `devices=2`, by torchrun, and one that is preempted."""
    words = (*LONG, "epochs=15", "data.num_workers=0")
    alone = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "runner", "train")
    kinds = {
        "by_srun": train(*words, root=check.folder / "by_srun", by=("srun", "--ntasks=2")),
        "by_devices": train(*words, "devices=2", root=check.folder / "by_devices", by=("srun", "--ntasks=1")),
        "by_torchrun": shlex.join([*alone, *words, f"output_root={check.folder / 'by_torchrun'}"]),
    }
    hashes = set()
    for name, line in kinds.items():
        job = check.submit(name, line, options=("--ntasks=2",))
        state = job.wait_for_end()
        summary = job.summary()
        hashes.add(summary.get("weights_sha256"))
        count = len(job.runs)
        check.promise(f"2 ranks {name}: {state}, {count} run directory", (state, count) == ("COMPLETED", 1))
    check.promise("the same SHA-256 for all three", len(hashes) == 1 and None not in hashes)
    stopped = {"srun_warned": (("srun", "--ntasks=2"), ()), "devices_warned": (("srun", "--ntasks=1"), ("devices=2",))}
    for name, (by, more) in stopped.items():
        job = check.submit(name, train(*words, *more, root=check.folder / name, by=by), options=("--ntasks=2",))
        job.wait(lambda job=job: job.steps() > 2, "progress")
        check.call("scancel", "--signal=USR2", job.number)
        job.wait(lambda job=job: job.restarts == 1, "a requeue")
        state = job.wait_for_end()
        asked = len(re.findall(r"SLURM job \S+ is requeued", job.output.read_text()))
        kept = (state, job.restarts, asked, len(job.runs)) == ("COMPLETED", 1, 1, 1)
        check.promise(f"{name} once: {state}, {asked} requeue, {len(job.runs)} run directory", kept)
        check.promise("and the same SHA-256", job.summary().get("weights_sha256") in hashes)


def sweep_of_ranks(check: Check) -> None:
    """An array whose jobs are two tasks each."""
    words = (*LONG, "epochs=3", "data.num_workers=0", "--multirun", "seed=1,2")
    plain = check.call(*RUNNER, *words, "devices=2", "output_root=devices")
    tasks = (*words, *LAUNCHER, "hydra.launcher.tasks_per_node=2", "output_root=tasks")
    first, again = check.call(*RUNNER, *tasks), check.call(*RUNNER, *tasks)
    check.promise(f"2 jobs of 2 tasks: status {first.returncode}", (first.returncode, plain.returncode) == (0, 0))
    same = hashes(check, "tasks") == hashes(check, "devices")
    check.promise("the same SHA-256 as with devices=2", same and len(hashes(check, "tasks")) == 2)
    found = events(check, "tasks")
    kept = again.returncode == 0 and (found["started"], found["finished"]) == (2, 2)
    check.promise(f"each job started once, also after the same command again: {found}", kept)


def sweep_warned(check: Check, tasks: int = 1) -> None:
    """An array whose jobs are warned: each saves, has itself requeued, and continues."""
    words = (*LONG, "epochs=20", "--multirun", "seed=1,2", *LAUNCHER, f"hydra.launcher.tasks_per_node={tasks}")
    plain = check.call(*RUNNER, *words, "output_root=calm")
    process = check.begin(*RUNNER, *words, "output_root=warned")
    check.wait(lambda: len([*check.folder.glob("warned/*/sweeps/*/*/metrics.jsonl")]) == 2, "progress")
    for name in check.call("squeue", "--noheader", "--format=%i", "--array").stdout.split():
        check.call("scancel", "--signal=USR2", name)
    status = process.wait(timeout=_PATIENCE_S)
    asked = sum("is requeued" in path.read_text() for path in check.folder.glob("warned/*/sweeps/*/logs/*.log"))
    check.promise(
        f"2 jobs of {tasks} tasks, warned by USR2: status {status}, {asked} requeued", (status, asked) == (0, 2)
    )
    same = hashes(check, "calm") == hashes(check, "warned") and len(hashes(check, "calm")) == 2
    check.promise("the same SHA-256 as without", same and plain.returncode == 0)
    found = events(check, "warned")
    check.promise(f"each job started and finished once: {found}", (found["started"], found["finished"]) == (2, 2))


def ranks_warned(check: Check) -> None:
    """The same with two tasks for each job."""
    sweep_warned(check, tasks=2)


PARTS: dict[str, Callable[[Check], None]] = {
    part.__name__: part  # type: ignore[attr-defined]
    for part in (array, sweep_killed, preempted, other_ends, ranks, sweep_of_ranks, sweep_warned, ranks_warned)
}


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is given")
    parser.add_argument("--preemptions", type=int, default=20, help="how often one run is preempted (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    broken = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        with cluster(Path(scratch) / "cluster") as environment:
            for name in options.parts or PARTS:
                print(f"{name}: {PARTS[name].__doc__}", flush=True)
                (folder / name).mkdir(parents=True, exist_ok=True)
                check = Check(folder / name, environment, random.Random(f"{options.seed} {name}"))
                preempted(check, options.preemptions) if name == "preempted" else PARTS[name](check)
                broken += sum(not kept for _, kept in check.lines)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
