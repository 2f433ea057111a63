"""What a tracker costs a run, whatever its server does, and whether it has every point once after kills.

    python scripts/benchmark_trackers.py cost
    python scripts/benchmark_trackers.py call
    python scripts/benchmark_trackers.py kills --server http://localhost:5000

`cost` trains a small MLP with `logger=mlflow`, whose thread shares Python's lock with the steps of 0.3 ms. In each quarter of a
second in which that thread computes, the steps that are missing, compared with the quarters around it in which it does not, are
time that the run lost. The case `none` has no tracker. The server is a small one in this process that refuses, hangs, answers
500, dies in the middle, or is slow; a full disk is a tmpfs of 300 kB, which needs root, that holds the database.

`kills` trains with TensorBoard, MLflow and W&B (offline) together, ends the process with SIGKILL and resumes it five times, and
reads everything back with the clients of the three.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "support"))

import psutil  # noqa: E402
from fake_mlflow import FakeMLflow, fake_mlflow  # noqa: E402

WORDS = ["model=mlp", "threads=1", "data.batch_size=64", "epochs=null", "max_steps=100_000_000", "log.every_steps=50"]
QUIET = ["log.progress=false", "log.curves=false", "evaluate.test=false", "evaluate.every_epochs=100000"]
CASES = ("none", "answers", "refuses", "hangs", "500", "dies", "slow", "disk full", "database")
WINDOW_S, NEAR = 0.25, 40  # a window, and the windows on each side that it is compared with


class Probe:
    """A callback that counts steps, and the CPU time of the tracker's thread, in each quarter of a second.

    Args:
        seconds: when to stop.
        path: where to write (seconds, steps, CPU time) of the windows.
    """

    def __init__(self, seconds: float, path: str) -> None:
        self.seconds, self.path = seconds, path
        self.windows: list[tuple[float, int, float]] = []
        self.began = 0.0

    def on_step(self, loop: Any) -> None:
        """Count a step."""
        now = time.perf_counter()
        if not self.began:
            self.began, self.since, self.steps, self.used = now, now, 0, self._cpu_time()
        self.steps += 1
        if now - self.since >= WINDOW_S:
            used = self._cpu_time()
            self.windows.append((now - self.since, self.steps, used - self.used))
            self.since, self.steps, self.used = time.perf_counter(), 0, used
            if now - self.began >= self.seconds:
                Path(self.path).write_text(json.dumps(self.windows))
                loop.request_stop("measured")

    def _cpu_time(self) -> float:
        ids = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("runner-")}
        return sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id in ids)


def cost(cases: list[str], seconds: float, share: float) -> None:
    """Print a Markdown table, a row per case."""
    print("| server | training | CPU time of the thread | training lost | warnings | end of the run |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        with tempfile.TemporaryDirectory() as name, _server(case, Path(name)) as uri:
            _measure(case, uri, Path(name), seconds=seconds, share=share)


def _measure(case: str, uri: str, folder: Path, *, seconds: float, share: float) -> None:
    settings = [f"logger.mlflow.{key}={value}" for key, value in (("tracking_uri", uri), ("max_share", share))]
    logger = ["logger=none"] if case == "none" else ["logger=mlflow", *settings]
    probe = {"_target_": "benchmark_trackers.Probe", "seconds": seconds, "path": str(folder / "windows.json")}
    words = [sys.executable, "-m", "runner", "train", *WORDS, *QUIET, *logger, "trust=[benchmark_trackers]"]
    words += [f"+callbacks.probe.{key}={value}" for key, value in probe.items()]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": path})
    ended = time.time()
    assert done.returncode == 0, done.stdout + done.stderr
    windows = json.loads((folder / "windows.json").read_text())
    lost = sum(_missing(windows, at) for at, (_, _, used) in enumerate(windows) if used)
    used, trained = sum(used for _, _, used in windows), sum(length for length, _, _ in windows)
    warnings, end = done.stdout.count("mlflow: "), ended - (folder / "windows.json").stat().st_mtime
    shares = f"{used:.2f} s, {used / trained:.2%} | {lost:.2f} s, {lost / trained:.2%}"
    print(f"| {case} | {trained:.0f} s | {shares} | {warnings} | {end:.1f} s |", flush=True)


def _missing(windows: list[tuple[float, int, float]], at: int) -> float:
    """Seconds of a window in which its steps do not take place: the machine is as busy as in the windows beside it."""
    beside = [(length, steps) for length, steps, used in windows[max(0, at - NEAR) : at + NEAR + 1] if not used]
    length, steps, _ = windows[at]
    return length - steps * sum(length for length, _ in beside) / max(1, sum(steps for _, steps in beside))


@contextlib.contextmanager
def _server(case: str, folder: Path) -> Iterator[str]:
    if case == "database":
        yield f"sqlite:///{folder}/mlflow.db"
        return
    if case == "disk full":
        (disk := folder / "disk").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], check=True)
        try:
            yield f"sqlite:///{disk}/mlflow.db"
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
        return
    server: FakeMLflow
    with fake_mlflow(folder / "artifacts") as server:
        if case == "refuses":
            server.stop()
        server.failure = {"hangs": "hang", "500": "500", "dies": "die", "slow": "slow"}.get(case, "")
        if case == "dies":
            server.script = [""] * 8
        yield server.uri


def call(calls: int) -> None:
    """Print what a logged line costs the run's own thread: CPU time of `log` while the server refuses connections."""
    from runner.tracking.trackers.loggers import MLflow

    with tempfile.TemporaryDirectory() as folder:
        logger = MLflow(tracking_uri="http://127.0.0.1:9")
        logger.load(Path(folder))
        samples = []
        for number in range(20):
            began = time.process_time()
            for step in range(calls // 20):
                logger.log("train", {"loss": 1.0}, number * calls + step, 1)
            samples.append((time.process_time() - began) / (calls // 20))
        print(f"log: {statistics.median(samples) * 1e6:.2f} us a line (median of 20)")


def kills(server: str, count: int, seed: int) -> None:
    """Kill and resume a run, and compare what three trackers have with `metrics.jsonl`."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "runner",
            "train",
            "epochs=8",
            "threads=1",
            "log.every_steps=1",
            "log.curves=false",
        ]
        words += [
            "logger=[tensorboard,mlflow,wandb]",
            f"logger.mlflow.tracking_uri={server}",
            "logger.wandb.mode=offline",
        ]
        words += ["checkpoint.every_steps=7", "resume=auto", "log.progress=false", "callbacks=none"]
        words += [
            "logger.mlflow.max_share=1",
            "logger.mlflow.wait_s=60",
            "logger.wandb.wait_s=60",
            f"logger.mlflow.experiment=kills-{time.time():.0f}",
        ]
        for attempt in range(count + 1):
            process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
            goal = 25 * (attempt + 1) + draw.randrange(20)
            while process.poll() is None and (attempt == count or _lines(Path(folder)) < goal):
                time.sleep(0.01)
            if attempt < count:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                print(f"killed after {_lines(Path(folder))} lines", flush=True)
        [run] = Path(folder).glob("outputs/digits/*/metrics.jsonl")
        lines = [json.loads(line) for line in run.read_text().splitlines()]
        for split in ("train", "val", "test"):
            expected = [line["global_step"] for line in lines if line["split"] == split]
            assert len(set(expected)) == len(expected) > 0
            for name, found in _read_back(run.parent, server, split).items():
                verdict = "complete and unique" if found == expected else f"DIFFERS: {found} against {expected}"
                print(f"{name:<12} {split:<6} {len(found):>4} points: {verdict}", flush=True)


def _lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("outputs/digits/*/metrics.jsonl"))


def _read_back(run: Path, server: str, split: str) -> dict[str, list[int]]:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb_files import history

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    client = MlflowClient(tracking_uri=server)
    uid = json.loads((run / "trackers/mlflow.json").read_text())["uid"]
    experiments = [each.experiment_id for each in client.search_experiments()]
    [found] = client.search_runs(experiments, f"tags.`runner.uid` = '{uid}'")
    rows = [row for row in history(run) if f"{split}/loss" in row]
    return {
        "TensorBoard": [event.step for event in events.Scalars(f"loss/{split}")],
        "MLflow": sorted(point.step for point in client.get_metric_history(found.info.run_id, f"{split}/loss")),
        "W&B offline": [row["global_step"] for row in rows],
    }


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("cost")
    one.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    one.add_argument("--seconds", type=float, default=60.0, help="how long to train")
    one.add_argument("--share", type=float, default=0.005, help="logger.mlflow.max_share")
    three = verbs.add_parser("call")
    three.add_argument("--calls", type=int, default=100_000)
    two = verbs.add_parser("kills")
    two.add_argument("--server", default="sqlite:////tmp/kills.db", help="address of a real MLflow server")
    two.add_argument("--count", type=int, default=5)
    two.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.verb == "cost":
        cost(given.cases, given.seconds, given.share)
    elif given.verb == "call":
        call(given.calls)
    else:
        kills(given.server, given.count, given.seed)


if __name__ == "__main__":
    main()
