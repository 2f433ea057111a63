import csv
import io
import json

from stored_sweeps import make_job

from runner.sweeps.table import print_table, summarise
from runner.tracking.console import Console


def _shown(rows):
    stream = io.StringIO()
    failed = print_table(rows, Console(None, stream=stream))
    return failed, stream.getvalue()


def test_a_sweep_shows_what_varied_and_marks_the_best(tmp_path):
    for job, (lr, value) in enumerate([(0.1, 0.9), (0.01, 0.99), (0.001, 0.95)]):
        overrides = ["epochs=3", f"optimizer.lr={lr}"]
        make_job(tmp_path / str(job), overrides, value)
    (tmp_path / ".hidden").mkdir()
    rows = summarise(tmp_path)
    assert [row.varied for row in rows] == [("optimizer.lr=0.1",), ("optimizer.lr=0.01",), ("optimizer.lr=0.001",)]
    assert [row.best for row in rows] == [False, True, False]
    failed, text = _shown(rows)
    assert not failed
    (line,) = [line for line in text.splitlines() if "best" in line]
    assert line.split() == ["1", "optimizer.lr=0.01", "finished", "0.99", "1:01", "<-", "best"]
    assert "val/accuracy" in text
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert stored["best"] == ["1"]
    assert [job["value"] for job in stored["jobs"]] == [0.9, 0.99, 0.95]


def test_the_best_is_the_smallest_where_smaller_is_better_and_neither_nan_nor_a_failed_job(tmp_path):
    for job, value in enumerate([None, 0.5, 0.25]):
        make_job(tmp_path / str(job), [f"seed={job}"], value, "min")
    make_job(tmp_path / "3", ["seed=3"], 0.125, "min", status="failed", error="it broke")
    assert [row.best for row in summarise(tmp_path)] == [False, False, True, False]


def test_jobs_are_in_the_order_of_their_numbers_without_a_spread_where_nothing_repeats(tmp_path):
    failed, text = _shown(summarise(tmp_path / "none"))
    assert (failed, "0 of 0 jobs finished" in text) == (False, True)
    for job in (10, 9, 0):
        more = {} if job else {"status": "preempted", "best": None}
        make_job(tmp_path / str(job), [f"optimizer.lr=0.{job}", f"seed={job}"], **more)
    rows = summarise(tmp_path)
    assert [(row.job, row.status) for row in rows] == [("0", "preempted"), ("9", "finished"), ("10", "finished")]
    failed, text = _shown(rows)
    assert (failed, "spread" in text) == (False, False)


def test_repetitions_are_summed_up_by_their_mean_and_spread(tmp_path):
    jobs = [
        (f"optimizer.lr={lr}", f"data.split.fold={fold}", 0.5 + lr + 0.1 * fold)
        for lr in (0.1, 0.2)
        for fold in range(3)
    ]
    for job, (lr, fold, value) in enumerate(jobs):
        make_job(tmp_path / str(job), ["epochs=3", lr, fold], value)
    make_job(tmp_path / "6", ["epochs=3", "optimizer.lr=0.2", "data.split.fold=3"], 9, status="failed", error="x")
    _, text = _shown(summarise(tmp_path))
    lines = text.splitlines()
    start = lines.index("spread of val/accuracy")
    assert lines[start + 1].split() == ["settings", "over", "jobs", "mean", "std", "min", "max"]
    assert [line.split() for line in lines[start + 3 : start + 5]] == [
        ["optimizer.lr=0.2", "data.split.fold", "3", "0.8", "0.1", "0.7", "0.9"],
        ["optimizer.lr=0.1", "data.split.fold", "3", "0.7", "0.1", "0.6", "0.8"],
    ]
    stored = json.loads((tmp_path / "sweep.json").read_text())["spreads"]
    assert [spread["jobs"] for spread in stored] == [3, 3]


def test_files_have_all_digits_of_a_number_and_people_see_four(tmp_path):
    values = (0.8123456789012345, 0.1 + 0.2, 1e-300)
    for job, value in enumerate(values):
        make_job(tmp_path / str(job), [f"seed={job}"], value)
    _, text = _shown(summarise(tmp_path))
    head, line = csv.reader((tmp_path / "sweep.csv").read_text().splitlines())
    stored = json.loads((tmp_path / "sweep.json").read_text())
    mean = sum(values) / 3
    for found in (dict(zip(head, line, strict=True)), stored["table"][0]):
        assert (float(found["min"]), float(found["max"])) == (1e-300, 0.8123456789012345)
        assert abs(float(found["mean"]) - mean) < 1e-16
        assert found["mean"] != f"{mean:.4g}"
    assert [job["value"] for job in stored["jobs"]] == list(values)
    assert stored["spreads"][0]["mean"] == stored["table"][0]["mean"]
    assert "0.8123 " in text
    assert "| 3 | 0.3708 | " in (tmp_path / "sweep.md").read_text()
