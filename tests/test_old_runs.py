"""Runs that an earlier version wrote and that were killed: they are continued and used, and removed settings are ignored.

`tests/fixtures/8baf830f` was written at the commit that it is named after, the other folders by
`tests/support/write_old_runs.py` at the releases that they are named after, see CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from write_old_runs import RATES, public_names

from runner.checkpoint import file
from runner.config import keys
from runner.config.gone import GONE, Gone, drop, warning, words_without
from runner.config.schema import VERBS
from runner.sweeps.ledger import Ledger
from runner.sweeps.plan import identity
from runner.tracking.environment import environment

FIXTURES = Path(__file__).parent / "fixtures"
OLDEST = "8baf830f"
EXPECTED = {path.parent.name: json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*/expected.json"))}
RELEASES = [version for version in EXPECTED if version != OLDEST]
RUNS = [(version, name) for version in EXPECTED for name in EXPECTED[version]["weights_sha256"] if "/" not in name]
INSTEAD = "use new.key"


@pytest.fixture(autouse=True)
def old(request: pytest.FixtureRequest, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The version whose files are in the folder of the test, and keys and values that are gone."""
    version: str = getattr(request, "param", OLDEST)
    shutil.copytree(FIXTURES / version, workdir, dirs_exist_ok=True)
    monkeypatch.setenv("RUNNER_TRUST", "old_parts")
    monkeypatch.syspath_prepend(workdir)
    monkeypatch.setitem(GONE, "old.key", Gone(INSTEAD))
    monkeypatch.setitem(GONE, "old.usual", Gone(INSTEAD, default=1))
    monkeypatch.setitem(GONE, "older.*", Gone(INSTEAD, default=False))
    monkeypatch.setitem(GONE, "accumulate", Gone(INSTEAD, values={"fewer": 1, float: ...}))
    monkeypatch.setitem(GONE, "optimizer", Gone(INSTEAD, values={"ancient": "adamw"}))
    monkeypatch.setitem(GONE, "position.old", Gone(""))
    return version


AGED = {"old": {"key": 3, "usual": 1}, "older": {"one": False, "two": False}}
NAMED = {f"old.key=3 (instead: {INSTEAD})", f"accumulate=fewer (instead: {INSTEAD})"}


def make_older(folder: Path) -> None:
    """Add keys and values that are gone to the files of a run."""
    for path in folder.glob("checkpoints/*"):
        contents = file.read(path)
        aged = yaml.safe_load(contents["config"]) | AGED | {"accumulate": "fewer"}
        position = contents["position"] | {"old": 1}
        file.write(path, contents | {"config": yaml.safe_dump(aged), "position": position})
    config = yaml.safe_load((folder / "config.yaml").read_text()) | AGED | {"accumulate": "fewer"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    words = [*words_of(folder), "old.key=3", "older.one=true", "accumulate=fewer"]
    (folder / "overrides.yaml").write_text(yaml.safe_dump(words))


def warned(text: str) -> list[tuple[str, set[str]]]:
    """What each warning of settings of an earlier version is about, and the settings that it names."""
    lines = [line.partition(": settings of an earlier version have no effect: ") for line in text.splitlines()]
    return [(where.removeprefix("warning: "), set(named.split(", "))) for where, said, named in lines if said]


def words_of(folder: Path) -> list[str]:
    return yaml.safe_load((folder / "overrides.yaml").read_text())


def assert_expected(directory: Path, name: str, version: str = OLDEST) -> None:
    """Compare a run with the uninterrupted one of the earlier version: exactly on the same kind of machine."""
    saved = load_file(directory / "checkpoints" / "last.safetensors")
    tensors = load_file(FIXTURES / version / f"{name.split('/')[0]}.safetensors")
    compared = [key for key in tensors if key.startswith(f"{name}:")]
    assert compared
    for key in compared:
        torch.testing.assert_close(saved[key.partition(":")[2]], tensors[key], rtol=0, atol=1e-5)
    build, cpu = environment()["torch"], environment()["cpu"]["model"]
    machine = {"torch": build["version"], "capability": build["cpu_capability"], "cpu": cpu}
    exact = machine == EXPECTED[version]["machine"]
    print(f"{version}/{name}: compared {'bit by bit' if exact else 'within 1e-5, as torch or the CPU is another one'}")
    if exact:
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["weights_sha256"] == EXPECTED[version]["weights_sha256"][name]


@pytest.mark.parametrize(("old", "name"), RUNS, indirect=["old"])
def test_a_killed_run_is_resumed_evaluated_predicted_and_reported(
    accepted: Callable[..., Any], old: str, name: str
) -> None:
    best = json.loads((Path(name) / "summary.json").read_text())["best"]
    found = json.loads(accepted("eval", f"ckpt_path={name}", "split=val", "json=true").out)["metrics"]
    assert found[best["metric"].rpartition("/")[2].removeprefix("ema_")] == pytest.approx(best["value"], abs=1e-5)
    assert accepted("predict", f"ckpt_path={name}", "input=val", "output=rows.csv").status == 0
    assert len(Path("rows.csv").read_text().splitlines()) > 1
    result = accepted("train", f"ckpt_path={name}")
    assert_expected(result.directory, name, old)
    assert len(warned(result.err + result.out)) <= 1
    accepted("report", name, str(result.directory), "json=report.json")
    rows = json.loads(Path("report.json").read_text())["runs"]
    assert [row["status"] for row in rows] == ["died", "finished"]


@pytest.mark.parametrize(
    ("old", "older"), [(OLDEST, True), *((version, False) for version in EXPECTED)], indirect=["old"]
)
def test_a_sweep_half_done_is_continued_by_its_command(
    accepted: Callable[..., Any], compose: Callable[..., Any], old: str, older: bool
) -> None:
    words = words_of(Path("sweep/0"))
    base = [word for word in words if not word.startswith("optimizer.lr=")]
    ledger = Path("sweep/sweep.jsonl")
    if older:
        text = ledger.read_text().replace('"base": {', '"base": {"old.key": 3, "old.usual": 1, ')
        text = text.replace('"accumulate": 1', '"accumulate": "fewer"').replace('"epochs=3"', '"epochs=3", "old.key=3"')
        for rate in RATES:  # as a version with these keys knew the jobs
            job = [word if not word.startswith("optimizer.lr=") else f"optimizer.lr={rate}" for word in words]
            values = compose(*job).values | Ledger.read(Path("sweep")).was
            before = identity(values, job, ["optimizer.lr"])
            assert before in text
            text = text.replace(before, identity(values | AGED | {"accumulate": "fewer"}, job, ["optimizer.lr"]))
        ledger.write_text(text.replace('"base": {', '"base": {"older.one": false, "older.two": false, '))
    command = ("train", "--multirun", *base, f"optimizer.lr={','.join(RATES)}", "sweep.dir=sweep")
    result = accepted(*command)
    assert "1 of 3 jobs have finished already" in result.out
    assert warned(result.err + result.out) == ([("sweep", NAMED)] if older else [])
    started = [json.loads(line)["folder"] for line in ledger.read_text().splitlines() if '"started"' in line]
    assert started == ["0", "1", "1", "2"]
    for job in range(3):
        assert_expected(Path("sweep", str(job)), f"sweep/{job}", old)
    assert accepted("sweep", "sweep").out.count("finished") >= 3
    assert "3 of 3 jobs have finished already" in accepted(*command).out


@pytest.mark.parametrize(
    "words", [("train",), ("eval", "split=val"), ("predict", "input=val"), ("export", "format=torchscript")]
)
def test_what_is_gone_is_dropped_from_a_checkpoint_with_one_warning(accepted: Callable[..., Any], words: Any) -> None:
    make_older(Path("plain"))
    result = accepted(*words, "ckpt_path=plain")
    assert [named for _, named in warned(result.err + result.out)] == [NAMED]
    assert "older" not in result.out
    if words == ("train",):
        assert_expected(result.directory, "plain")
        assert not {"old", "older"} & set(yaml.safe_load((result.directory / "config.yaml").read_text()))


@pytest.mark.parametrize("lost", ["nothing", "config.yaml"])
def test_the_same_command_without_what_is_gone_continues_an_older_run(accepted: Callable[..., Any], lost: str) -> None:
    words = [word for word in words_of(Path("plain")) if not word.startswith("hydra")]
    make_older(Path("plain"))
    (Path("plain") / lost).unlink(missing_ok=True)
    folder = Path(shutil.move("plain", "outputs/digits/run"))
    result = accepted("train", *words, "resume=auto", *(["accumulate=1"] if lost == "config.yaml" else []))
    assert result.directory == folder
    assert_expected(folder, "plain")


def test_a_report_shows_older_runs_without_what_is_gone(accepted: Callable[..., Any]) -> None:
    for name in ("plain", "shards"):
        make_older(Path(name))
    with Path("shards/overrides.yaml").open("a") as words:
        words.write("- accumulate={[\n")  # from somebody else
    accepted("report", "plain", "shards", "json=report.json")
    found = json.loads(Path("report.json").read_text())
    assert warned("\n".join(found["notes"])) == [("plain, shards", NAMED)]
    assert "older" not in json.dumps(found["runs"])


def test_values_that_are_gone_are_read_as_the_default() -> None:
    words = ["lr=auto", "lr=0.1", "search.warm_start=a", "search.trials=3", "on_nonfinite=rollback", "on_oom=split"]
    assert words_without(words) == ["lr=0.1", "search.trials=3", "on_nonfinite=skip"]
    values = {"lr": "auto", "search": {"warm_start": None, "trials": 3}}
    assert warning("a", drop(values)) == [
        "a: settings of an earlier version have no effect: lr=auto (instead: run find-lr, and set the number that it prints)"
    ]
    assert values == {"search": {"trials": 3}}


def test_an_argument_of_a_users_class_is_kept_whatever_it_is_called() -> None:
    stored = {
        target: {"data": {"dataset": {"_target_": target, "mirror": "a"}, "mirror": "b"}}
        for target in ("mine.Data", "runner.data.sources.torchvision_sets.mnist")
    }
    assert [[*drop(values)] for values in stored.values()] == [["data.mirror"], ["data.dataset.mirror", "data.mirror"]]
    assert stored["mine.Data"] == {"data": {"dataset": {"_target_": "mine.Data", "mirror": "a"}}}


@pytest.mark.parametrize("target", ["mine.Data", "runner.data.sources.torchvision_sets.mnist"])
def test_a_ledger_keeps_such_an_argument_too(tmp_path: Path, target: str) -> None:
    word, kept, ledger = "+data.dataset.mirror=a", target == "mine.Data", Ledger(tmp_path)
    base = {"data.dataset._target_": target, "data.dataset.mirror": "b"}
    ledger.append("launch", swept=[], base=base, jobs={"0": [word]}, retry="failed")
    ledger.append("started", job="0", folder="0", overrides=[word])
    found = Ledger.read(tmp_path)
    assert ("data.dataset.mirror" in found.last.base, found.was == {}) == (kept, kept)
    assert found.planned["0"] == found.jobs["0"].overrides == ([word] if kept else [])
    assert words_without([word, f"data.dataset._target_={target}"])[:-1] == ([word] if kept else [])


def test_checkpointing_of_some_blocks_is_read_as_that_of_all() -> None:
    words = [f"activation_checkpointing={value}" for value in ("2", "0.5", "false", "layer1")]
    assert [word.partition("=")[2] for word in words_without(words)] == ["true", "true", "false", "layer1"]


CONFIG = "# @package _global_\n# x\n# train\nold:\n  key: 1\n"


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (("old.key=1",), "old.key", "no longer exists"),
        (("+old.key=1",), "old.key", "no longer exists"),
        (("~old.key",), "old.key", "no longer exists"),
        (("older.one=1",), "older.one", "no longer exists"),
        (("--multirun", "old.key=1,2"), "old.key", "no longer exists"),
        (("--cfg=job", "old.key=1"), "old.key", "no longer exists"),
        (("ckpt_path=plain", "old.key=1"), "old.key", "no longer exists"),
        (("--config-dir=own", "experiment=old"), "old.key", "no longer exists"),
        (("--config-dir=own", "+experiment=old", "--multirun", "seed=1,2"), "old.key", "no longer exists"),
        (("accumulate=fewer",), "accumulate", "can no longer be fewer"),
        (("accumulate=0.5",), "accumulate", "can no longer be 0.5"),
        (("--multirun", "accumulate=1,fewer"), "accumulate", "can no longer be fewer"),
        (("ckpt_path=plain", "accumulate=fewer"), "accumulate", "can no longer be fewer"),
        (("fsdp.lazy_init=true",), "fsdp.lazy_init", "no longer exists"),
        (("data=shards", "data.dataset.cache_gb=1"), "data.dataset.cache_gb", "no longer exists"),
        (("on_nonfinite=rollback",), "on_nonfinite", "can no longer be rollback"),
        (("on_oom=split",), "on_oom", "no longer exists"),
        (("optimizer=ancient",), "optimizer", "can no longer be ancient"),
        (("experiment=detection_rtdetr",), "experiment", "can no longer be detection_rtdetr"),
        (("data.mirror=http://a",), "data.mirror", "no longer exists"),
        (("data=mnist", "data.dataset.mirror=[http://a]"), "data.dataset.mirror", "no longer exists"),
        (("data.identity=full",), "data.identity", "can no longer be full"),
        (("lr=auto",), "lr", "can no longer be auto"),
        (("--multirun", "lr=0.1,auto"), "lr", "can no longer be auto"),
        (
            ("sweep=optuna", "search.seed={choice: [0, 1]}", "search.warm_start=old"),
            "search.warm_start",
            "no longer exists",
        ),
    ],
)
def test_what_is_gone_is_a_mistake_on_a_command_line(
    rejected: Callable[..., Any], words: Any, key: str, message: str
) -> None:
    Path("own/experiment").mkdir(parents=True)
    Path("own/experiment/old.yaml").write_text(CONFIG)
    said = rejected("train", *words).err
    assert f"{key}: {message}\n" in said
    assert f"allowed: {GONE[key if key in GONE else 'older.*'].instead}\n" in said
    if "--config-dir=own" in words and "--multirun" not in words:
        assert "old.yaml:5" in said


def test_no_key_that_is_gone_exists() -> None:
    for key, entry in {**GONE}.items():
        found = {verb: keys.find(schema, key.removesuffix(".*")) for verb, schema in VERBS.items()}
        assert entry.values is not None or set(found.values()) <= {None, Any}, key


@pytest.mark.parametrize("version", RELEASES)
def test_no_public_name_of_a_release_is_missing(version: str) -> None:
    before, now = json.loads((FIXTURES / version / "names.json").read_text()), public_names()
    for kind in ("verbs", "python", "options"):
        assert set(before[kind]) <= set(now[kind])
    gone = {key.removesuffix(".*") for key, entry in GONE.items() if entry.values is None}
    for verb, of_verb in before["keys"].items():
        assert set(of_verb) <= gone | set(now["keys"][verb])
    for target in before["targets"]:
        assert callable(pkgutil.resolve_name(target))
