"""Everything that needs a GPU, in one command of less than ten minutes: tests, and benchmarks as one Markdown table.

    python scripts/gpu.py
    python scripts/gpu.py --list
    python scripts/gpu.py --only tests compile
    python scripts/gpu.py --only cifar10 --airbench path/to/airbench94_muon.py --cifar path/to/data

Each entry is a command with its own time limit. A failure, a limit or a missing package becomes a row with the reason. Every
ratio is the median of several, taken side by side in turns by `runner bench`, `benchmark_loop.py` or `benchmark_peers.py`.
Where there is no GPU, this lists what it would run, with exit status 0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 590.0
SYNC = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

Row = tuple[str, str, str, str]
"""What was measured, against what, the result, and a note."""


@dataclass(frozen=True)
class Entry:
    """One command."""

    name: str
    command: tuple[str, ...]  # after `python`; {device} and {folder} are filled in
    limit_s: float
    rows: Callable[[str, Path], list[Row]]  # reads what it printed, or wrote into the folder
    also: tuple[int, ...] = ()  # exit statuses, besides 0, with which there is something to read

    def words(self, device: str, folder: str) -> list[str]:
        """The command without its placeholders."""
        return [word.replace("{device}", device).replace("{folder}", folder) for word in self.command]


def of_tests(printed: str, folder: Path) -> list[Row]:
    """Pytest's last line, and the tests that failed."""
    lines = printed.strip().splitlines()
    summary = next(
        (line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error|skipped)", line)), "nothing ran"
    )
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [("tests with `-m gpu`", "", summary.strip("= "), "; ".join(failed))]


def of_bench(printed: str, folder: Path) -> list[Row]:
    """A row for each candidate of `runner bench`: speed, and peak memory, as ratios to the baseline."""
    record = json.loads(printed[printed.index("{") :])
    base, rows = record["baseline"]["peak_memory_bytes"], []
    for each in record["candidates"]:
        speed, peak = each["ratio"], each["peak_memory_bytes"]
        result = f"{speed['median']:.2f} times as fast ({speed['low']:.2f} to {speed['high']:.2f})"
        note = f"peak memory {peak / base:.2f} times ({peak / 2**20:,.0f} MiB)" if base else ""
        rows.append(
            (f"`{' '.join(each['overrides'])}`", "as configured", result, f"{note}; {each['verdict'] or 'pays'}")
        )
    return rows + [(f"`{each['what']}`", "as configured", "not measured", each["why"]) for each in record["left_out"]]


def of_loops(printed: str, folder: Path) -> list[Row]:
    """How long `runner` takes in terms of the other loops, by `benchmark_loop.py`."""
    rows = []
    for title, (name, *cells) in _contenders(printed):
        if len(cells) == 3 and cells[1]:
            rows.append(
                (f"`runner`, {title}", name, cells[1], f"each process: {cells[2]}; {name} takes {cells[0]} a step")
            )
    return rows


def of_peers(printed: str, folder: Path) -> list[Row]:
    """How long the others take in terms of `runner`, by `benchmark_peers.py`."""
    rows = []
    for title, (name, *cells) in _contenders(printed):
        if len(cells) < 4:
            rows.append((f"{name}, {title}", "`runner`", "not measured", cells[0]))
        elif name != "`runner`":
            rows.append(
                (f"{name}, {title}", "`runner`", f"{cells[2]} times as long ({cells[3]})", f"{cells[0]} a step")
            )
    return rows


def _contenders(printed: str) -> Iterator[tuple[str, list[str]]]:
    """Title and cells of the rows of Markdown tables that begin with a name."""
    title = ""
    for line in printed.splitlines():
        title = line.removeprefix("### ") if line.startswith("### ") else title
        if line.startswith("| `"):
            yield title, [cell.strip() for cell in line.removeprefix("|").rstrip("| ").split("|")]


def of_syncs(printed: str, folder: Path) -> list[Row]:
    """Times that the host waits for the GPU within the traced steps, by the profiler's trace."""
    (trace,) = folder.rglob("trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [event for event in events if event.get("name") == "step" and event.get("cat") == "user_annotation"]
    inside = [
        event["name"]
        for event in events
        if event.get("name") in SYNC and any(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for step in steps)
    ]
    which = ", ".join(f"{name} {inside.count(name)}" for name in SYNC if name in inside)
    return [("host waits for the GPU", "", f"{len(inside)} in {len(steps)} steps", which)]


def of_airbench(printed: str, folder: Path) -> list[Row]:
    """Seconds and accuracy of `airbench_gpu.py`."""
    lines = [line for line in printed.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return [(name, "", f"{seconds} s, accuracy {accuracy}", f"{runs} runs") for name, seconds, accuracy, runs in cells]


def bench(name: str, budget_s: float, limit_s: float, *words: str) -> Entry:
    """An entry that compares settings with `runner bench`."""
    common = ("device={device}", "json=true", f"budget_s={budget_s:g}", "output_root={folder}")
    return Entry(name, ("-m", "runner", "bench", *IMAGES, *common, *words), limit_s, of_bench)


TESTS = tuple(
    sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu\n" in path.read_text()
    )
)
IMAGES = ("data=synthetic", "data.dataset.samples=4096", "data.image_size=32", "data.batch_size=256", "threads=4")
RESNET, VIT = ("model=resnet18_cifar",), ("model=vit_tiny",)
LOOP = ("--contenders", "bare", "hand", "--threads", "4", "--repeats", "3", "--samples", "2560", "--device", "{device}")
PEERS = ("--contenders", "runner", "accelerate", "lightning", "--threads", "4", "--repeats", "3")
PROFILE = (*RESNET, *IMAGES, "device={device}", "trace_steps=5", "steps=10", "budget_s=20", "output={folder}/profile")

ENTRIES = (
    Entry("tests", ("-m", "pytest", "-q", "-n", "4", "-p", "no:benchmark", "-m", "gpu", *TESTS), 100, of_tests, also=(1,)),
    Entry("loop", ("scripts/benchmark_loop.py", "--turns", "6", *LOOP), 90, of_loops),
    Entry("loop of a large model", ("scripts/benchmark_loop.py", "--case", "resnet18", "--turns", "6", *LOOP), 45,
          of_loops),
    Entry("peers", ("scripts/benchmark_peers.py", "--case", "digits", "--epochs", "11", "--device", "{device}", *PEERS),
          90, of_peers, also=(1,)),
    bench("precision and layout", 30, 50, *RESNET, "toggles=[amp,channels_last,cudnn_benchmark,tf32]"),
    bench("fused optimizers", 15, 30, *VIT, "toggles=[optimizer.fused,optimizer.foreach]"),
    bench("compile", 45, 70, *VIT, "toggles=[compile]", "repeats=4"),
    bench("CUDA graphs", 30, 55, *VIT, "toggles=[]", "compile=true", "vary.compiler.mode=[reduce-overhead]", "repeats=4"),
    bench("pinned copies", 15, 30, *RESNET, "toggles=[data.placement]", "data.placement=disk", "data.num_workers=4",
          "vary.data.pin_memory=[false]"),
    bench("peak memory", 15, 30, *RESNET, "toggles=[activation_checkpointing,performance]", "optimizer=adamw"),
    Entry("host waits", ("-m", "runner", "profile", *PROFILE), 35, of_syncs),
)  # fmt: skip


def run(entry: Entry, device: str, limit_s: float) -> list[Row]:
    """The rows of an entry; one with the reason if it fails or takes longer than `limit_s` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *entry.words(device, folder)]
        output = Path(folder) / "printed.txt"
        with output.open("w") as file, (Path(folder) / "errors.txt").open("w") as errors:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=errors, start_new_session=True)
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return [(entry.name, "", "not measured", f"not finished after {limit_s:.0f} s")]
            finally:  # workers and ranks are in the same group
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said = (Path(folder) / "errors.txt").read_text().strip() or output.read_text().strip() or "nothing"
        try:
            rows = entry.rows(output.read_text(), Path(folder)) if status in (0, *entry.also) else []
        except (ValueError, LookupError) as error:
            rows, said = [], f"its output cannot be read: {error}"
        reason = next((line for line in said.splitlines() if "error" in line.lower()), said.splitlines()[-1])
        return rows or [(entry.name, "", "not measured", f"status {status}: {reason.strip()[:300]}")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run or list the entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(entry.name for entry in ENTRIES), "cifar10"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ENTRY", help=", ".join(names))
    parser.add_argument("--device", default="cuda", help="cpu runs the entries without a GPU, to try this script")
    parser.add_argument("--airbench", help="the file that the recipe for CIFAR-10 follows: runs both")
    parser.add_argument("--cifar", help="folder of its data")
    parser.add_argument("--list", action="store_true", help="show the commands, and run nothing")
    asked = parser.parse_args(argv)
    chosen = [entry for entry in ENTRIES if entry.name in asked.only]
    if asked.airbench and asked.cifar:
        command = ("scripts/airbench_gpu.py", asked.airbench, asked.cifar, "--runs", "3", "device={device}")
        chosen.append(Entry("cifar10", command, 500, of_airbench))
    absent = asked.device != "cpu" and not torch.cuda.is_available()
    if absent or asked.list:
        print("there is no CUDA device; on a machine with one, this would run:" if absent else "this would run:")
        for entry in chosen:
            words = shlex.join(["python", *entry.words(asked.device, "FOLDER")])
            print(f"  {entry.name}, at most {entry.limit_s:.0f} s:\n    {words}")
        return 0
    where = torch.cuda.get_device_name() if asked.device != "cpu" else "CPU"
    print(f"{where}, torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    print("| measured | against | result | note |\n|---|---|---|---|", flush=True)
    deadline = time.monotonic() + TOTAL_S
    for entry in chosen:
        left = deadline - time.monotonic()
        rows = run(entry, asked.device, min(entry.limit_s, left)) if left > 1 else []
        for row in rows or [(entry.name, "", "not measured", "the ten minutes are over")]:
            print("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
