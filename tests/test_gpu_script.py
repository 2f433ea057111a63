"""`scripts/gpu.py`: without a GPU it lists its parts, each of them runs on the CPU with small sizes, and failures are rows."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
from peers.processes import MeasurementFailed


def test_without_a_gpu_it_lists_its_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "table", None)
    assert gpu.main(["steps"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("there is no CUDA device")
    assert all(f"scripts/gpu.py {part}: " in printed for part in gpu.PARTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rows"),
    [
        *(
            pytest.param(words, rows, marks=pytest.mark.extended, id=words[0])
            for words, rows in (
                (("jpeg",), 1),
                (("bits",), 6), (("recipe",), 2), (("steps", "--only", "mlp", "resnet50", "vit_tiny"), 3), (("compile",), 2),
                (("steps", "--only", "faster_rcnn", "deeplab"), 2), (("cifar10",), 2), (("tests",), 1),
            )
        ),
    ],
)  # fmt: skip
def test_a_part_runs_on_the_cpu(words: tuple[str, ...], rows: int, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "rows.json"
    status = gpu.main([*words, "--small", "--json", str(file)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    found = json.loads(file.read_text())
    assert (found["part"], found["card"], len(found["rows"])) == (words[0], "CPU", rows)
    assert found["packages"]["torch"]
    assert all(f"| {next(iter(row.values()))} | " in printed or len(row) == 1 for row in found["rows"])
    if words[0] == "bits":
        assert {row["killed and resumed"] for row in found["rows"]} == {"same bits"}


def asked(folder: Path) -> gpu.Asked:
    return gpu.Asked(small=True, device="cpu", folder=folder, deadline=time.monotonic() + 300)


@pytest.mark.parametrize(
    "case", [(part, name) for part, (_, cases) in gpu.PARTS.items() for name in cases], ids="-".join
)
def test_the_first_command_of_every_case_is_valid_on_a_gpu(
    case: tuple[str, str], problems: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = list[str]()

    def called(command: Any, *_: Any) -> None:
        given.extend(() if given else command)
        raise MeasurementFailed("not run")

    monkeypatch.setattr(gpu, "run", lambda command, *_: called(command[3:] if command[1:3] == ["-m", "runner"] else []))
    monkeypatch.setattr(gpu, "turns", called)
    monkeypatch.setattr(gpu.Asked, "images", lambda *_: tmp_path)
    monkeypatch.setattr(gpu, "measure", called)
    monkeypatch.setattr(gpu, "installed", lambda _: None)
    large = gpu.Asked(False, "cuda", tmp_path, time.monotonic() + 60, cifar=tmp_path)
    with contextlib.suppress(MeasurementFailed):
        gpu.PARTS[case[0]][1][case[1]](large)
    assert bool(given) == (case[1] not in {"lightning", "cifar10", "tests"})
    if given:
        assert problems(*given[1:], verb=given[0]) == {}


def test_what_fails_is_a_row_with_the_reason_and_the_others_are_measured(tmp_path: Path, capsys: Any) -> None:
    def fails(_: gpu.Asked) -> list[gpu.Row]:
        raise MeasurementFailed("status 1: Traceback\nValueError: no such thing | here\n\n")

    saved: list[int] = []
    cases: gpu.Cases = {
        "one": fails,
        "two": lambda _: [{"a": "b", "c": 1234.5}],
        "three": lambda _: [{"a": "d", "c": 0.25}],
        "four": lambda _: [{"a": "e", "c": 1 / 0}],
    }
    rows = gpu.table(asked(tmp_path), cases, 1, lambda rows: saved.append(len(rows)))
    assert rows[0] == {"one": "not measured", "why": "ValueError: no such thing | here"}
    assert rows[3]["why"].startswith("ZeroDivisionError(")  # type: ignore[union-attr]
    assert saved == [1, 2, 3, 4]
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[2:7] == [
        "| not measured | ValueError: no such thing / here |",
        "| a | c |",
        "|---|---|",
        "| b | 1,234 |",
        "| d | 0.250 |",
    ]


def test_a_command_that_fails_or_takes_too_long_is_a_failed_measurement(tmp_path: Path) -> None:
    assert asked(tmp_path).call("-c", "print(1)").strip() == "1"
    with pytest.raises(MeasurementFailed, match="status 3: so it is"):
        asked(tmp_path).call("-c", "print('so it is'); raise SystemExit(3)")
    for deadline, said in ((time.monotonic() + 1, "not finished in 1 s"), (0.0, "before the time was over")):
        late = gpu.Asked(small=True, device="cpu", folder=tmp_path, deadline=deadline)
        with pytest.raises(MeasurementFailed, match=said):
            late.call("-c", "import time; time.sleep(60)", allowed=(0, -9))


def test_sides_alternate_and_turns_before_a_failure_are_kept() -> None:
    seen: list[str] = []

    def seconds(name: str) -> float:
        seen.append(name)
        if len(seen) == 6:
            raise MeasurementFailed("it is late")
        return float(len(seen))

    found, late = gpu.alternately(4, ("a", "b"), seconds)
    assert found == [{"a": 1.0, "b": 2.0}, {"b": 3.0, "a": 4.0}]
    assert late == [{"not measured": "turn 3 of 4", "why": "it is late"}]
    assert seen == [*"abbaab"]
    seen[:] = [""] * 5
    with pytest.raises(MeasurementFailed, match="it is late"):
        gpu.alternately(4, ("a", "b"), seconds)


@pytest.mark.parametrize(
    ("shas", "found"),
    [
        (["a", "a", "a"], [("same bits", "same bits")]),
        (["a", "a", "b", "c", "c", "d"], [("same bits", "differs, not deterministic"), ("same bits", "OTHER BITS")]),
        (["a", "b", "a", "c", "c", "c"], [("not deterministic", "cannot be told"), ("same bits", "same bits")]),
        (["a", "b", "a", "c", "d", "c"], [("not deterministic", "cannot be told"), ("OTHER BITS", "cannot be told")]),
    ],
)
def test_bits_of_repeated_and_of_killed_runs_are_compared(
    shas: list[str], found: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = iter(shas)
    monkeypatch.setattr(gpu, "weights_of", lambda *_: next(given))
    assert [(row["repeated"], row["killed and resumed"]) for row in gpu.bits(asked(tmp_path), "amp=bf16")] == found


def test_workers_that_change_the_bits_are_labelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = iter("aaaaba")  # three runs with no workers, and three with two
    monkeypatch.setattr(gpu.Asked, "images", lambda *_: tmp_path)
    monkeypatch.setattr(gpu, "weights_of", lambda *_: next(given))
    assert [row["as without workers"] for row in gpu.bits_of_workers(asked(tmp_path))] == ["same bits", "same bits"]
    given = iter("aaabbb")
    assert [row["as without workers"] for row in gpu.bits_of_workers(asked(tmp_path))] == ["same bits", "OTHER BITS"]


@pytest.mark.parametrize(("steps", "fails"), [("0 17 15 ", False), ("0 17 0 ", True), ("0 0 ", True)])
def test_a_resume_from_elsewhere_than_a_checkpoint_before_the_kill_fails(
    steps: str, fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(_: gpu.Asked, *words: str, allowed: int = 0) -> None:
        run = Path(words[-1].split("=")[1])
        run.mkdir(exist_ok=True)
        (run / "summary.json").write_text('{"weights_sha256": "a"}')
        (run.parent / "steps").write_text(steps)

    monkeypatch.setattr(gpu.Asked, "train", train)
    with (
        pytest.raises(MeasurementFailed, match="start, kill after step 17 and resume: at 0")
        if fails
        else contextlib.nullcontext()
    ):
        assert gpu.weights_of(asked(tmp_path), (), 17) == "a"


def test_the_last_line_of_pytest_and_the_failed_tests_are_a_row() -> None:
    printed = "..F\nFAILED tests/test_gpu.py::test_one - AssertionError\n=== 1 failed, 2 passed in 3.00s ===\r\n"
    row = {"tests with `-m gpu`": "1 failed, 2 passed in 3.00s", "failed": "FAILED tests/test_gpu.py::test_one"}
    assert gpu.of_tests(printed) == [row]


def test_launches_kernels_gaps_and_waits_are_those_of_the_steps() -> None:
    def event(
        name: str, ts: float, dur: float = 1.0, cat: str = "cuda_runtime", correlation: int = 0
    ) -> dict[str, Any]:
        return {"name": name, "ts": ts, "dur": dur, "cat": cat, "args": {"correlation": correlation}}

    steps = [event("step", 10, 500, "user_annotation"), event("step", 2000, 500, "user_annotation")]
    calls = [
        event("cudaLaunchKernel", 20, correlation=1), event("cudaLaunchKernel", 2010, correlation=2),
        event("cudaLaunchKernel", 2020, correlation=3), event("cudaGraphLaunch", 2030, correlation=4),
        event("cudaLaunchKernel", 900, correlation=5), event("cudaMemcpyAsync", 40, correlation=6),
        event(gpu.SYNC[0], 12), event(gpu.SYNC[1], 3000),
    ]  # fmt: skip
    # The second and the third overlap by half, and those of the graph have the correlation of its launch
    kernels = [(100, 1000, 1), (3000, 1000, 2), (3500, 1000, 3), (6000, 250, 4), (6250, 250, 4), (900, 5, 5)]
    traced = [event("kernel", ts, dur, "kernel", correlation) for ts, dur, correlation in kernels]
    copied = event("copy", 1200, 400, "gpu_memcpy", 6)
    found = gpu.of_trace([*steps, *calls, *traced, copied])
    times = {"busy, ms (traced)": 1.7, "idle, ms (traced)": 1.5}
    assert found == {"launches": 2, "kernels": 2.5, **times, "host waits": 0.5}
    assert gpu.of_trace(calls) == {"why": "the trace has no steps"}


@pytest.mark.extended
def test_both_trainings_of_cifar10_are_read(tmp_path: Path) -> None:
    lines = [
        "|  run     |  epoch  |  train_acc  |  val_acc  |  tta_val_acc  |  time_seconds  |",
        "|  warmup  |      1  |     0.8000  |   0.7000  |               |        0.3000  |",
        "|          |   eval  |     0.9300  |   0.9290  |       0.9390  |        9.1234  |",
        "|       0  |      1  |     0.8000  |   0.7000  |               |        0.3000  |",
        "|          |      2  |     0.8500  |   0.8000  |               |        0.6000  |",
        "|          |   eval  |     0.9400  |   0.9310  |       0.9405  |        2.6000  |",
    ]
    file = tmp_path / "airbench.py"
    text = "\n".join(lines)
    file.write_text(f"import os, time\nassert os.path.isdir('cifar10/there')\nprint({text!r})\ntime.sleep(60)")
    (tmp_path / "data" / "there").mkdir(parents=True)
    run = gpu.Training(epochs=2, steps=50, seconds=0.6, warm=0.6, accuracy=0.9405)
    assert gpu.airbench(file, tmp_path / "data", 1, 60.0) == [run], "without the run that warms up, and its evaluation"
    assert gpu.airbench(file, tmp_path / "data", 2, 2.0) == [run], "those that it finished"
    file.write_text(
        "import torch, time\nfor name in ('train', 'test'): torch.load(f'cifar10/{name}.pt')\n" + "time.sleep(60)"
    )
    with pytest.raises(MeasurementFailed, match="finished none of 1 runs in 4 s"):
        gpu.airbench(file, None, 1, 4.0)
    logged = [{"global_step": 6, "samples_per_s": 100.0}, {"global_step": 60, "samples_per_s": 500.0}]
    assert gpu.seconds_of(logged, 100) == pytest.approx((6 * 1.0 + 54 * 0.2, 60 * 0.2))


def test_runs_of_the_recipe_are_kept_where_airbench_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise MeasurementFailed("finished none")

    monkeypatch.setattr(gpu, "airbench", fails)
    monkeypatch.setattr(gpu, "recipe_run", lambda _, seed: gpu.Training(10, 500, 5.0 - seed, 3.0, 0.94))
    ours, theirs = gpu.recipes(replace(asked(tmp_path), airbench=Path("airbench.py"), cifar=tmp_path))
    assert theirs == {"training": "`airbench.py`", "why": "finished none"}
    assert (ours["runs"], ours["from"], ours["to"], ours["warm, ms per 1,000 images"]) == (2, 4.0, 5.0, 6.0)
    assert gpu.recipes(asked(tmp_path))[0]["accuracy, mean"] == "", "none of images that stand for CIFAR-10"
