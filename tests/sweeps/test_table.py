import csv
import json

from stored_sweeps import make_job, table_text

from runner.sweeps.table import summarise


def test_a_sweep_shows_what_varied_and_marks_the_best(tmp_path):
    for job, (lr, value) in enumerate([(0.1, 0.9), (0.01, 0.99), (0.001, 0.95)]):
        make_job(tmp_path / str(job), ["epochs=3", f"optimizer.lr={lr}"], value)
    (tmp_path / ".hidden").mkdir()
    rows = summarise(tmp_path)
    assert [row.varied for row in rows] == [("optimizer.lr=0.1",), ("optimizer.lr=0.01",), ("optimizer.lr=0.001",)]
    assert [row.best for row in rows] == [False, True, False]
    text = table_text(rows)
    (line,) = [line for line in text.splitlines() if "best" in line]
    assert line.split() == ["1", "optimizer.lr=0.01", "finished", "0.99", "1:01", "<-", "best"]
    assert "val/accuracy" in text
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert (stored["best"], [job["value"] for job in stored["jobs"]]) == (["1"], [0.9, 0.99, 0.95])


def test_jobs_are_in_the_order_of_their_numbers_without_a_spread_where_nothing_repeats(tmp_path):
    assert "0 of 0 jobs finished" in table_text(summarise(tmp_path / "none"))
    for job in (10, 9, 0):
        more = {} if job else {"status": "preempted", "best": None}
        make_job(tmp_path / str(job), [f"optimizer.lr=0.{job}", f"seed={job}"], **more)
    rows = summarise(tmp_path)
    assert [(row.job, row.status) for row in rows] == [("0", "preempted"), ("9", "finished"), ("10", "finished")]
    assert "spread" not in table_text(rows)


def test_repetitions_are_summed_up_by_their_mean_and_spread(tmp_path):
    settings = [(lr, fold) for lr in (0.1, 0.2) for fold in range(3)]
    for job, (lr, fold) in enumerate(settings):
        words = ["epochs=3", f"optimizer.lr={lr}", f"data.split.fold={fold}"]
        make_job(tmp_path / str(job), words, 0.5 + lr + 0.1 * fold)
    make_job(tmp_path / "6", ["epochs=3", "optimizer.lr=0.2", "data.split.fold=3"], 9, status="failed", error="x")
    lines = table_text(summarise(tmp_path)).splitlines()
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
    assert "0.8123 " in table_text(summarise(tmp_path))
    head, line = csv.reader((tmp_path / "sweep.csv").read_text().splitlines())
    stored = json.loads((tmp_path / "sweep.json").read_text())
    for found in (dict(zip(head, line, strict=True)), stored["table"][0]):
        assert (float(found["min"]), float(found["max"])) == (1e-300, 0.8123456789012345)
        assert abs(float(found["mean"]) - sum(values) / 3) < 1e-16
    assert [job["value"] for job in stored["jobs"]] == list(values)
    assert stored["spreads"][0]["mean"] == stored["table"][0]["mean"]
    assert "| 3 | 0.3708 | " in (tmp_path / "sweep.md").read_text()
