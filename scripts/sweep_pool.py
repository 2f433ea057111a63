"""A sweep on `hydra/launcher=pool` against the same sweep one job after the other, also with jobs that fail in three ways.

    python scripts/sweep_pool.py                    # 12 jobs with 2 data workers each, in 2 slots
    python scripts/sweep_pool.py --jobs 4

Checks that all final weights have the same SHA-256, that a job that is killed, one that runs out of memory and one with a
mistake are named and disturb no other, and that the same command skips what has finished and ends with the same weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults.jobs import whole
from faults.lives import Life, fingerprint, live, preload

FAULTS = '''
import os, resource, signal
from pathlib import Path
import torch

class Fault:
    """Fails at the second step, as long as there is a file that says how."""

    def __init__(self, folder, seed):
        self.path = Path(folder) / f"fault_{seed}"

    def on_step(self, loop):
        kind = self.path.read_text() if loop.state.position.global_step == 2 and self.path.exists() else ""
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, -1))
            torch.empty(2**33)
        elif kind == "mistake":
            raise ValueError("a mistake that is found at run time")
'''
NAMED = {
    "killed": "failed: its process was killed by SIGKILL: perhaps out of memory",
    "memory": "failed: ",
    "mistake": "failed: ValueError: a mistake that is found at run time",
}


def check(jobs: int, slots: int, folder: Path) -> list[str]:
    """Run the sweeps in a folder; returns what was not as promised."""
    (folder / "conf" / "callbacks").mkdir(parents=True)
    (folder / "code").mkdir()
    (folder / "code" / "failing.py").write_text(FAULTS)
    option = f"# Fails on demand.\nfault:\n  _target_: failing.Fault\n  folder: {folder}\n  seed: ${{seed}}\n"
    (folder / "conf" / "callbacks" / "fault.yaml").write_text(option)
    words = whole(
        (f"seed=range({jobs})", "callbacks=fault", "epochs=1", "data.placement=disk", "data.num_workers=2",
         "limit.train_batches=6", "checkpoint.every_steps=1")
    )  # fmt: skip
    words = ("--multirun", "--config-dir", str(folder / "conf"), *words)
    pool = ("hydra/launcher=pool", f"hydra.launcher.per_device={slots}")
    expected, first, took = sweep(words, folder / "sequential", jobs)
    print(f"one after the other: status {first.status}, {took:.1f} s")
    found, life, took = sweep((*words, *pool), folder / "pool", jobs)
    print(
        f"in {slots} slots: status {life.status}, {took:.1f} s, {same(found, expected)} of {jobs} with the same SHA-256"
    )
    wrong = [f"status {each.status}: {each.said()[-2000:]}" for each in (first, life) if each.status]
    wrong += [f"{found} instead of {expected}"] if found != expected else []

    failing = dict(zip((jobs // 4, 2 * jobs // 4, 3 * jobs // 4), NAMED, strict=True))
    for seed, kind in failing.items():
        (folder / f"fault_{seed}").write_text(kind)
    found, life, took = sweep((*words, *pool), folder / "failing", jobs)
    good = {job: digest for job, digest in expected.items() if int(job) not in failing}
    kept = same({job: found[job] for job in good}, good)
    print(
        f"with three that fail: status {life.status}, {took:.1f} s, {kept} of {len(good)} others with the same SHA-256"
    )
    wrong += [f"status {life.status} with jobs that fail"] if life.status != 1 else []
    wrong += [f"{found} instead of {good}"] if kept < len(good) else []
    for seed, kind in failing.items():
        said = [line.removeprefix("error: ") for line in life.said().splitlines()]
        lines = [line for line in said if line.startswith(f"job {seed + 1} of {jobs}: seed={seed}: ")]
        told = [line for line in lines if NAMED[kind] in line]
        print(*(f"    {line}" for line in told), sep="\n")
        wrong += [] if told else [f"the job that was to be {kind} is not named: {lines}"]
        (folder / f"fault_{seed}").unlink()

    found, life, took = sweep((*words, *pool), folder / "failing", jobs)
    skipped = life.said().count(": skipped, ")
    print(
        f"again: status {life.status}, {took:.1f} s, {skipped} skipped, {same(found, expected)} with the same SHA-256"
    )
    wrong += [f"{skipped} jobs were skipped"] if skipped != jobs - len(failing) else []
    wrong += [f"{found} instead of {expected}: {life.said()[-2000:]}"] if found != expected or life.status else []
    return wrong


def sweep(words: tuple[str, ...], root: Path, jobs: int) -> tuple[dict[str, str], Life, float]:
    """Run a sweep; returns the SHA-256 of the weights of each job, its process, and the seconds that it took."""
    began = time.perf_counter()
    code = str(root.parent / "code")
    life = live((*words, f"output_root={root}"), root.with_suffix(".log"), lambda: sys.path.insert(0, code))
    folders = list(root.glob("*/sweeps/*"))
    found = {str(job): fingerprint(folders[-1] / str(job)) if folders else "no folder" for job in range(jobs)}
    return found, life, time.perf_counter() - began


def same(found: dict[str, str], expected: dict[str, str]) -> int:
    """How many jobs have the expected weights."""
    return sum(found[job] == expected[job] for job in found)


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=12, help="number of jobs, at least 4")
    parser.add_argument("--slots", type=int, default=2, help="jobs at a time")
    options = parser.parse_args()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as scratch:
        import runner.verbs.train  # noqa: F401  # before anything forks

        preload(Path(scratch), ["train", *whole(("max_steps=1",)), f"hydra.run.dir={scratch}/preload"])
        wrong = check(options.jobs, options.slots, Path(scratch))
    print(*wrong, "all as promised" if not wrong else "NOT as promised", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
