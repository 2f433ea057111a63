"""The table of a report: found runs, keys that differ, folded repetitions, files, failures and differences."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import runner
from runner.base.errors import UserError
from runner.lab.report.reading import Run
from runner.tracking.formats import csv_text


@pytest.mark.parametrize(
    ("config", "step_ms"),
    [({"data.batch_size": 64, "accumulate": 2, "devices": 2}, 200), ({"accumulate": 2}, None), ({}, None)],
    ids=["batches divided among two processes", "no batch size", "no config"],
)
def test_the_time_of_a_step_is_that_of_its_samples_or_unknown(config: Any, step_ms: Any, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"global_step": 1, "epoch": 1, "split": "train", "samples_per_s": 640.0}\n'
    )
    run = Run(tmp_path, "finished", config=config)
    assert run.value("samples_per_s") == 640
    assert run.value("step_ms") == step_ms


def test_200_runs_take_less_than_2_seconds_and_no_torch(many: Any) -> None:
    code = (
        "import sys, time\nfrom runner.cli import main\n"
        f"status = main(['report', {str(many(200))!r}])\n"
        "print('torch' in sys.modules, time.process_time())\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch, seconds = done.stdout.splitlines()[-1].split()
    assert torch == "False"
    assert float(seconds) < 2
    assert "192 of 200 runs finished" in done.stdout


def test_the_table_is_that_of_an_independent_computation(many: Any, tmp_path: Path) -> None:
    import pandas

    rows = []
    for folder in many(200).iterdir():
        summary = json.loads((folder / "summary.json").read_text())
        words = [line.removeprefix("- ") for line in (folder / "overrides.yaml").read_text().splitlines()]
        settings = dict(word.split("=") for word in words)
        resumed = Path(summary["resumed_from"]).parents[1].name if summary["resumed_from"] else None
        score = (summary["best"] or {}).get("value") if summary["status"] == "finished" else None
        rows.append(
            settings | {"folder": folder.name, "resumed": resumed, "value": score, "test": (summary.get("test") or {})}
        )
    frame = pandas.DataFrame(rows)
    frame = frame[~frame["folder"].isin(frame["resumed"].dropna())]
    frame["test"] = [each.get("accuracy") for each in frame["test"]]
    keys = ["optimizer.lr", "model.width", "amp"]
    expected = frame.astype({"optimizer.lr": float, "model.width": int}).groupby(keys).agg(
        runs=("folder", "count"), value=("value", "mean"), std=("value", "std"), test=("test", "mean")
    )  # fmt: skip
    expected = expected.sort_values("value", ascending=False).reset_index()

    found = runner.report(many(200), csv=tmp_path / "table.csv")
    table = found.to_pandas()
    assert list(table["runs"]) == list(expected["runs"])
    columns = {"value": "val/accuracy", "std": "val/accuracy std", "test": "test/accuracy"}
    for name in (*keys[:2], *columns):
        assert list(table[columns.get(name, name)]) == pytest.approx(list(expected[name]), rel=1e-12), name
    read = pandas.read_csv(tmp_path / "table.csv")
    assert list(read["val/accuracy"]) == pytest.approx(list(expected["value"]), rel=1e-12)
    each = runner.runs(many(200)).to_pandas()
    assert len(each) == 200
    assert each["test/accuracy"].mean() == pytest.approx(frame["test"].mean(), rel=0.01)


def test_only_keys_that_differ_are_shown_the_best_first_and_seeds_folded(many: Any) -> None:
    table = runner.report(many(20)).table
    assert table.keys == ("optimizer.lr",)
    assert table.metrics == ("val/accuracy", "test/accuracy")
    assert [len(row.runs) for row in table.rows] == [5, 5, 5, 5]
    means = [row.values["val/accuracy"].mean for row in table.rows]
    assert means == sorted(means, reverse=True)
    each = runner.report(many(20), seeds="each", columns=["seed", "test/loss", "step_ms"], sort="test/loss").table
    assert (each.keys, each.metrics, len(each.rows)) == (("seed",), ("test/loss", "step_ms"), 20)
    losses = [row.values["test/loss"].mean for row in each.rows]
    assert losses == sorted(losses)
    some = runner.runs(f"{many(20)}/1*").to_pandas().query("`optimizer.lr` >= 0.01 and `val/accuracy` > 0.5")
    assert {run.path.name for run in runner.report(*some["run"]).runs} == {str(number) for number in range(10, 20)}


def test_files_have_the_table(many: Any, accepted: Any, workdir: Path) -> None:
    done = accepted("report", str(many(40)), "csv=t.csv", "md=t.md", "json=t.json")
    content = json.loads(Path("t.json").read_text())
    assert len(content["runs"]) == 40
    assert content["metric"] == "val/accuracy"
    assert set(content["rows"][0]["val/accuracy"]) == {"mean", "std", "count"}
    [failed] = [each for each in content["runs"] if each["status"] == "failed"]
    assert "diverged" in failed["error"]
    assert failed["again"] == "python -m runner train seed=4 optimizer.lr=0.03 model.width=32 amp=false"
    assert failed["again"] in Path("t.md").read_text()
    assert failed["again"] in done.out
    assert Path("t.csv").read_text().startswith("runs,optimizer.lr,model.width,val/accuracy,val/accuracy std,")


def test_texts_of_a_run_are_shown_as_texts(many: Any, accepted: Any, workdir: Path) -> None:
    """Neither a terminal, a browser nor a spreadsheet takes what a config says for a command of its own."""
    shutil.copytree(many(6), "runs")
    strange = Path(shutil.copytree("runs/0", "runs/strange"))
    words = yaml.safe_load((strange / "overrides.yaml").read_text())
    words += [
        "\x1b]0;title\x07\x1b[31mkey=1",
        "notes==1+1",
        "tags=<script>[a](javascript:b)|c</script>",
        "optimizer.eps=-1e-8",
    ]
    (strange / "overrides.yaml").write_text(yaml.safe_dump(words))
    config = (strange / "config.yaml").read_text()
    kept = [line for line in config.splitlines(True) if not line.startswith(("notes", "tags"))]
    (strange / "config.yaml").write_text("".join(kept))
    shown = "columns=\x1b]0;title\x07\x1b[31mkey,notes,tags,optimizer.eps"
    done = accepted("report", "runs", shown, "seeds=each", "md=t.md", "csv=t.csv", "html=t.html", "diff=false")
    assert Path("t.html").read_text().count("</script>") == 2
    assert "<script>" not in "".join(each._repr_html_() for each in runner.runs("runs"))
    page, table = Path("t.md").read_text(), Path("t.csv").read_text()
    for text in (done.out, page, table):
        assert "\x1b" not in text
    assert "&lt;script>[a]\\(javascript:b)\\|c&lt;/script>" in page
    [row] = [row for row in csv.DictReader(table.splitlines()) if row["run"].endswith("strange")]
    assert row["notes"] == "'=1+1"
    assert (row["tags"], row["key"], float(row["optimizer.eps"])) == ("<script>[a](javascript:b)|c</script>", "1", 1e-8)
    head, cells = ["a", "b", "c"], ["-1", "-", "@x"]
    assert csv_text(head, [cells, [-1, None, "+1.5"]]) == "a,b,c\n-1,-,'@x\n-1,,+1.5\n"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "notes: " + "[" * 3000 + "]" * 3000 + "\n"),
        ("config.yaml", "notes: " + "[" * 200_000 + "]" * 200_000 + "\n"),
        ("config.yaml", "notes:\n" + "- " * 900 + "a\n"),
        ("config.yaml", "".join(" " * depth + "a:\n" for depth in range(1200))),
        (
            "summary.json",
            '{"status": "finished", "best": {"metric": ["a"], "value": [[1]], "loss": {}}, "wall_s": "x"}',
        ),
        ("summary.json", '{"status": "finished", "notes": ' + "[" * 900 + "]" * 900 + "}"),
        ("environment.json", '{"a": ' * 900 + "1" + "}" * 900),
    ],
    ids=range(7),
)
def test_a_strange_run_does_not_end_the_report_of_the_others(
    file: str, text: str, many: Any, accepted: Any, workdir: Path
) -> None:
    shutil.copytree(many(6), "runs")
    shutil.copytree("runs/0", "runs/strange")
    (Path("runs/strange") / file).write_text(text)
    for words in (
        ("runs", "md=t.md", "csv=t.csv", "json=t.json", "html=t.html"),
        ("runs/1", "runs/strange", "diff=true"),
    ):
        done = accepted("report", *words, "seeds=each")
        assert "strange" in done.out
    assert [run.path.name for run in runner.runs("runs")][-1] == "strange"


def test_a_name_that_is_too_long_for_a_file_is_a_sentence(run: Any, workdir: Path) -> None:
    name = "x" * 300
    for words in (("report", name), ("train", f"name={name}"), ("train", f"ckpt_path={name}"), ("watch", name)):
        done = run(*words)
        assert done.status != 0
        assert "name is too long for" in done.err or "file name too long" in done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("chosen", [False, True])
def test_a_narrow_terminal_skips_settings_before_metrics_and_says_so(
    many: Any, run: Any, monkeypatch: pytest.MonkeyPatch, width: int, chosen: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    settings = "optimizer.lr,model.width,amp,scheduler,optimizer.weight_decay,data.batch_size,transform.train"
    words = [f"columns={settings},val/accuracy,test/accuracy,test/loss"] if chosen else []
    lines = run("report", str(many(200)), *words).out.splitlines()
    table = [line for line in lines if line[:4].strip() and not line.startswith(("error", "no room", "    "))]
    assert max(len(line.rstrip()) for line in table) <= width
    metrics = ["val/accuracy", "test/accuracy", "test/loss"][: {60: 1, 80: 2, 120: 2 + chosen}[width]]
    assert lines[1].split()[: 2 + len(metrics)] == ["run", "status", *metrics]
    assert ("optimizer.lr" in lines[1]) == (width == 120)
    skipped = [line for line in lines if line.startswith("no room for ")]
    assert len(skipped) == (chosen or width < 120)


def test_a_run_that_is_written_a_damaged_one_and_a_sweep_are_reported(many: Any, workdir: Path) -> None:
    sweep = workdir / "sweep"
    shutil.copytree(many(20) / "0", sweep / "0")
    shutil.copytree(many(20) / "1", sweep / "1")
    (sweep / "0" / "config.yaml").write_text("a: &x [1]\nb: [*x, *x]\n{")
    (sweep / "0" / "metrics.jsonl").write_bytes(b"\xff\x00 not json\n[1]\n")
    (sweep / "1" / "summary.json").unlink()
    (sweep / "1" / ".lock").write_text("process 1 on elsewhere")
    line = {"event": "launch", "time": 1.0, "swept": [], "base": {}, "flags": ["--config-dir=mine"], "retry": "failed"}
    (sweep / "sweep.jsonl").write_text(json.dumps(line | {"jobs": {"a": ["seed=7"]}}) + "\n")
    found = runner.runs(sweep)
    assert [run.status for run in found] == ["finished", "running"]
    assert found.notes == (
        f"{sweep}: 1 of 1 jobs have not started",
        f"{sweep / '0'}: config.yaml is missing or damaged, so the report lacks what it holds",
    )
    assert found[0].config == {}
    assert found[0].speed == {}
    assert runner.report(sweep).table.rows


def test_two_runs_are_compared_and_the_command_for_their_weights_works(run: Any, accepted: Any, train: Any) -> None:
    words = ("model=mlp", "model.hidden=[8]", "epochs=1", "amp=false", "limit.train_batches=3")
    first, second = (train(*words, f"optimizer.lr={rate}").directory for rate in (0.01, 0.02))
    result = runner.report(first, second)
    found = result.difference
    assert found is not None
    assert [name for name, *_ in found.config] == ["optimizer.lr"]
    assert found.environment == []
    assert found.sha256[0] != found.sha256[1]
    done = accepted("report", str(first), str(second))
    assert str(found.sha256[0]) in done.out
    [command] = [line for line in done.out.splitlines() if line.startswith("tensor by tensor: ")]
    audited = run(*shlex.split(command.partition("runner ")[2]))
    assert audited.status == 1, audited.err
    assert "first difference: model" in audited.out
    assert runner.report(first, second, diff=False).difference is None
    same = runner.report(first, first, diff=None)
    assert same.difference is None


def test_python_takes_runs_lists_and_columns_as_text(many: Any, tmp_path: Path) -> None:
    found = runner.runs([many(20)])
    assert len(runner.runs(found)) == len(runner.runs([found[0]], found[1:])) == 20
    odd = tmp_path / "lr[0.1]"
    shutil.copytree(many(20) / "0", odd)
    assert [run.path for run in runner.runs(odd)] == [odd]
    table = runner.report(many(20), columns="optimizer.lr, started,seed,status,time_s").table
    assert table.keys == ("optimizer.lr", "started", "seed")
    assert isinstance(table.rows[0].values["seed"], list)
    head = table.plain()[0]
    assert len(head) == len(set(head))


def test_a_notebook_shows_runs_and_tables(many: Any) -> None:
    found = runner.runs(many(40))
    assert "optimizer.lr" in found._repr_html_()
    assert "<th>val/accuracy</th>" in runner.report(many(40))._repr_html_()
    assert "diverged" in found[39]._repr_html_()
    assert "startup (s)" in found[0]._repr_html_()
    assert found[:2].table(seeds="each").folded is False
    assert repr(found) == "<40 runs>"


def test_to_pandas_says_what_is_missing(many: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install 'pandas'"):
        runner.runs(many(20)).to_pandas()
