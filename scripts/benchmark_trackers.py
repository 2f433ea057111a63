"""What a tracker costs a run, whatever its server does, and whether it has every point once after kills.

    python scripts/benchmark_trackers.py cost
    python scripts/benchmark_trackers.py call
    python scripts/benchmark_trackers.py kills --server http://localhost:5000

`cost` trains with `logger=mlflow` and reads from the kernel for how long another process had the core that the run was ready to
use: on one core, which the run must share with its feeder (the process that sends the points), and on two. The case `none` has
no feeder. Times of steps would show the load of the machine instead. The server is a small one in this process that refuses,
hangs, answers 500, or dies in the middle; a full disk is a tmpfs of 300 kB, which needs root, that holds the database.

`kills` trains with TensorBoard, MLflow and W&B (offline) together, ends the process with SIGKILL and resumes it five times,
sometimes with the processes that feed the trackers, and reads everything back with the clients of the three.
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "support"))

import psutil  # noqa: E402
from fake_mlflow import FakeMLflow, fake_mlflow  # noqa: E402

WORDS = ["model=mlp", "threads=1", "data.batch_size=64", "epochs=null", "log.every_steps=50"]
QUIET = ["log.progress=false", "log.curves=false", "evaluate.test=false", "evaluate.every_epochs=1000"]
CASES = ("none", "answers", "refuses", "hangs", "500", "dies", "disk full")


def cost(cases: list[str], steps: int) -> None:
    """Print a Markdown table, a row per case."""
    print("| server | waited, one core | waited, two cores | CPU of the feeder | warnings | end of the run |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        one, two = (_measured(case, steps, cores) for cores in ("0", "0,1"))
        print(
            f"| {case} | {one.waited:.1%} | {two.waited:.1%} | {two.feeder_cpu:.1f} s of {two.seconds:.0f} s "
            f"| {max(one.warnings, two.warnings)} | {two.end:.1f} s |",
            flush=True,
        )


class Cost(NamedTuple):
    """What was measured in a run."""

    waited: float  # share of the time of training in which another process had the core
    seconds: float  # from the first line of metrics to the last one
    feeder_cpu: float  # seconds, until then
    end: float  # seconds from the last line of metrics to the end of the process
    warnings: int  # of the tracker


def _measured(case: str, steps: int, cores: str) -> Cost:
    """Run on some cores, with the feeder."""
    with tempfile.TemporaryDirectory() as name, _server(case, folder := Path(name)) as uri:
        logger = ["logger=mlflow", f"logger.mlflow.tracking_uri={uri}"] if case != "none" else ["logger=none"]
        words = ["taskset", "-c", cores, sys.executable, "-m", "runner", "train", *WORDS, *QUIET, *logger]
        words += [f"max_steps={steps}", f"output_root={folder}/outputs"]
        environment = os.environ | {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
        feeder_cpu, began = 0.0, 0.0
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, cwd=folder, env=environment)
            while process.poll() is None:
                found = _lines(folder)
                began = began or (time.time() if found else 0.0)
                if found < steps // 50:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        feeder_cpu = sum(sum(psutil.Process(each).cpu_times()[:2]) for each in _feeders(process.pid))
                time.sleep(0.2)
        ended = time.time()
        text = (folder / "out").read_text()
        assert process.returncode == 0, text
        metrics = folder / text.split()[-1] / "metrics.jsonl"
        waited = json.loads(metrics.with_name("summary.json").read_text())["cpu_wait"]
        last = metrics.stat().st_mtime
        return Cost(waited, last - began, feeder_cpu, ended - last, text.count("mlflow: "))


@contextlib.contextmanager
def _server(case: str, folder: Path) -> Iterator[str]:
    if case == "disk full":
        (disk := folder / "disk").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], check=True)
        try:
            yield f"sqlite:///{disk}/mlflow.db"
        finally:
            time.sleep(1)
            subprocess.run(["umount", "-l", str(disk)], check=True)
        return
    server: FakeMLflow
    with fake_mlflow(folder / "artifacts") as server:
        if case == "refuses":
            server.stop()
        server.failure = {"hangs": "hang", "500": "500", "dies": "die"}.get(case, "")
        if case == "dies":
            server.script = [""] * 8
        yield server.uri


def call(calls: int) -> None:
    """Print what a logged line costs the run's own thread: CPU time of `log` while the server refuses connections."""
    from runner.tracking.trackers.loggers import MLflow, close_feeders

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text("name: mine\n")
        logger = MLflow("http://127.0.0.1:9", wait_s=0)
        began = time.process_time()
        logger.open(Path(folder), None)
        opened = time.process_time() - began
        samples = []
        for _ in range(20):
            began = time.process_time()
            for step in range(calls // 20):
                logger.log("train", {"loss": 1.0}, step, 1)
            samples.append((time.process_time() - began) / (calls // 20))
        print(f"open: {opened * 1e3:.1f} ms; log: {statistics.median(samples) * 1e6:.2f} us a line (median of 20)")
        close_feeders(30)


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
                feeders = _feeders(process.pid) if draw.random() < 0.5 else []
                for number in (process.pid, *feeders):
                    os.kill(number, signal.SIGKILL)
                process.wait()
                print(f"killed after {_lines(Path(folder))} lines, and {len(feeders)} feeders", flush=True)
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


def _feeders(pid: int) -> list[int]:
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children]


def _read_back(run: Path, server: str, split: str) -> dict[str, list[int]]:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb_files import history

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    client = MlflowClient(tracking_uri=server)
    state = json.loads((run / "trackers/mlflow/state.json").read_text())
    rows = [row for row in history(run) if f"{split}/loss" in row]
    return {
        "TensorBoard": [event.step for event in events.Scalars(f"loss/{split}")],
        "MLflow": sorted(point.step for point in client.get_metric_history(state["id"], f"{split}/loss")),
        "W&B offline": [row["global_step"] for row in rows],
    }


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("cost")
    one.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    one.add_argument("--steps", type=int, default=200_000, help="a step takes 0.2 ms or more")
    three = verbs.add_parser("call")
    three.add_argument("--calls", type=int, default=100_000)
    two = verbs.add_parser("kills")
    two.add_argument("--server", default="sqlite:////tmp/kills.db", help="address of a real MLflow server")
    two.add_argument("--count", type=int, default=5)
    two.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.verb == "cost":
        cost(given.cases, given.steps)
    elif given.verb == "call":
        call(given.calls)
    else:
        kills(given.server, given.count, given.seed)


if __name__ == "__main__":
    main()
