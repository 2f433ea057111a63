"""Searches with Optuna: what each key does, trials that stop early, the same command again, and mistakes in the search space."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from forked import ForkedProgram
from optuna.storages.journal import JournalFileBackend, JournalStorage

from runner.config.space import Range, ranges_of, text_of, with_space
from runner.sweeps.ledger import Ledger
from runner.sweeps.pruning import Pruning
from runner.sweeps.study import JOURNAL, State, Study, pruner_of, sampler_of

LR = "search.optimizer.lr={log: [1e-4, 1e-1]}"
SEARCH = ("sweep=optuna", LR, "search.pruner=none")
HALVING = ("search.pruner=halving", "search.reduction=2", "checkpoint.monitor=val/loss")
SPACE = {
    "a": Range("float", 1e-4, 1e-1, log=True),
    "b": Range("choice", choices=("x", "y")),
    "c": Range("int", 1, 9, 2),
}


@pytest.fixture
def search(run, tiny):
    """Search over tiny runs; gives the result and the folder."""

    def call(*words: str):
        result = run("train", *tiny, *words)
        return result, Path((result.out.strip().splitlines() or ["."])[-1])

    return call


def study_of(folder: Path) -> Any:
    return optuna.load_study(study_name="search", storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))))


def trials_of(folder: Path) -> list[tuple[str, dict, list[float] | None]]:
    return [(trial.state.name, trial.params, trial.values) for trial in study_of(folder).get_trials()]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the weights that each job ended with, by its folder."""
    return {
        path.parent.name: json.loads(path.read_text())["weights_sha256"]
        for path in sorted(folder.glob("*/summary.json"))
    }


def test_a_search_ends_with_its_best_trial_as_a_preset_and_the_same_command_asks_for_more(search, run, tiny, workdir):
    words = ("search.model={choice: [mlp, small_cnn]}", "~model.width", "search.trials=3")
    result, folder = search(*SEARCH, *words)
    assert result.status == 0, result.err
    found = trials_of(folder)
    assert [state for state, *_ in found] == ["COMPLETE"] * 3
    for number, (_, params, values) in enumerate(found):
        assert 1e-4 <= params["optimizer.lr"] <= 1e-1
        config = yaml.safe_load((folder / str(number) / "config.yaml").read_text())
        assert config["optimizer"]["lr"] == params["optimizer.lr"]
        assert ("MLP" in config["model"]["_target_"]) == (params["model"] == "mlp")
        assert values == [json.loads((folder / str(number) / "summary.json").read_text())["best"]["value"]]
    best = study_of(folder).best_trial
    head = (folder / "best.yaml").read_text().splitlines()[1:3]
    assert f"trial {best.number + 1}, the best of 3" in head[0]
    assert head[1].startswith("# python -m runner train ")
    assert head[1].endswith(f"optimizer.lr={best.params['optimizer.lr']} model={best.params['model']}")
    assert head[1][2:] in result.out
    (workdir / "mine" / "experiment").mkdir(parents=True)
    (workdir / "mine" / "experiment" / "best.yaml").write_text((folder / "best.yaml").read_text())
    again = run("train", "--config-dir", "mine", *tiny, "~model.width", "experiment=best")
    assert again.summary["weights_sha256"] == digests(folder)[str(best.number)]

    result, same = search(*SEARCH, *words)
    assert (result.status, same) == (0, folder)
    assert "3 of 3 trials have ended already; search.trials= asks for more" in result.out
    result, same = search(*SEARCH, *words[:-1], "search.trials=4")
    assert (result.status, same) == (0, folder)
    assert trials_of(folder)[:3] == found
    assert len(trials_of(folder)) == 4
    _, other = search(*SEARCH, *words[:-1], "search.trials=4", "sweep.new=true")
    assert other != folder
    assert trials_of(other) == trials_of(folder)
    assert digests(other) == digests(folder)


def test_a_pruned_trial_stops_at_an_evaluation_with_a_checkpoint_and_is_not_run_again(search, run, tiny):
    words = ("sweep=optuna", LR, *HALVING, "search.trials=4", "epochs=4", "evaluate.test=true")
    result, folder = search(*words)
    assert result.status == 0, result.err
    stopped = [trial for trial in study_of(folder).get_trials() if trial.state.name == "PRUNED"]
    assert stopped
    for trial in stopped:
        summary = json.loads((folder / str(trial.number) / "summary.json").read_text())
        assert summary["status"] == "pruned"
        assert summary["global_step"] == max(trial.intermediate_values) < 4
        assert "test" not in summary
        assert f"trial {trial.number + 1}: pruned after evaluation {summary['global_step']}" in result.out
    assert f", {len(stopped)} pruned" in result.out
    lr = f"optimizer.lr={stopped[0].params['optimizer.lr']}"
    whole = run("train", *tiny, "epochs=4", lr).summary["weights_sha256"]
    on = run("train", *tiny, "epochs=4", f"ckpt_path={folder / str(stopped[0].number)}", "hydra.run.dir=on")
    assert on.status == 0, on.err
    assert on.summary["weights_sha256"] == whole  # no bit of a pruned trial differs
    before = digests(folder)
    assert search(*words)[0].status == 0
    assert digests(folder) == before


def test_seeds_inside_a_trial_are_jobs_whose_mean_is_the_objective(search):
    result, folder = search(*SEARCH, "search.seeds=[3, 4]", "search.trials=2")
    assert result.status == 0, result.err
    values = [json.loads((folder / job / "summary.json").read_text())["best"]["value"] for job in "0123"]
    assert [trial[2] for trial in trials_of(folder)] == [[sum(values[:2]) / 2], [sum(values[2:]) / 2]]
    seeds = [yaml.safe_load((folder / job / "config.yaml").read_text())["seed"] for job in "0123"]
    assert seeds == [3, 4, 3, 4]


def test_several_objectives_are_those_at_the_best_evaluation(search):
    words = ("search.objectives={val/accuracy: max, val/loss: min}", "search.trials=2")
    result, folder = search(*SEARCH, *words)
    assert result.status == 0, result.err
    for trial in study_of(folder).get_trials():
        records = [json.loads(line) for line in (folder / str(trial.number) / "metrics.jsonl").read_text().splitlines()]
        [evaluated] = [record for record in records if record["split"] == "val"]
        assert trial.values == [evaluated["accuracy"], evaluated["loss"]]
    assert not (folder / "best.yaml").exists()


def test_an_objective_that_no_run_has_ends_the_search_after_its_first_job(search):
    result, _ = search(*SEARCH, "search.objectives={val/acuracy: max}", "search.trials=3")
    assert result.status == 2, result.err
    assert "job 2" not in result.out
    assert "search.objectives: names val/acuracy, which no run has; did you mean 'val/accuracy'?" in result.err


def test_a_failed_job_is_a_failed_trial_and_fail_fast_asks_for_no_other(search):
    words = ("sweep=optuna", "search.model.width={choice: [0, 4]}", "search.pruner=none", "search.sampler=random")
    result, folder = search(*words, "search.trials=3")
    assert result.status == 1
    states = [(state, params["model.width"]) for state, params, _ in trials_of(folder)]
    assert len(states) == 3
    assert all((state == "FAIL") == (width == 0) for state, width in states)
    assert "width must be at least 1" in result.out
    result, other = search(*words, "search.trials=9", "sweep.fail_fast=true", "sweep.new=true")
    assert result.status == 1
    assert [state for state, *_ in trials_of(other)][-1] == "FAIL"
    assert len(trials_of(other)) == 1 + states.index(("FAIL", 0))


def test_a_warm_start_knows_earlier_jobs_within_the_space(search, made_once):
    _, earlier = made_once("--multirun", "seed=0,1", "optimizer.lr=0.1,0.01")
    words = ("search.trials=1", f"search.warm_start={earlier}")
    result, folder = search("sweep=optuna", "search.optimizer.lr={log: [1e-3, 0.05]}", "search.pruner=none", *words)
    assert result.status == 0, result.err
    assert "warm start: 2 of 4 jobs of " in result.out
    warm, own = study_of(folder).get_trials()[:2], study_of(folder).get_trials()[2:]
    assert [trial.params for trial in warm] == [{"optimizer.lr": 0.01}] * 2
    assert [Path(trial.user_attrs["warm_start"]).parent for trial in warm] == [earlier] * 2
    assert [trial.state.name for trial in own] == ["COMPLETE"]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "logs"]


def test_trials_side_by_side_end_with_the_bits_of_trials_one_after_the_other(search, tiny):
    words = ("search.sampler=random", "search.trials=3")  # whose values do not depend on other trials
    _, alone = search(*SEARCH, *words)
    program = ForkedProgram(["train", *tiny, *SEARCH, *words, "search.jobs=2", "sweep.new=true"])
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err + out
    folder = Path(out.strip().splitlines()[-1])
    assert folder != alone
    assert sorted(map(str, trials_of(folder))) == sorted(map(str, trials_of(alone)))
    assert digests(folder) == digests(alone)


CALLBACKS = """
import atexit, os, signal
from pathlib import Path

class DiesAfterItsEnd:
    def on_end(self, loop):
        atexit.register(os._exit, 3)

class IsStoppedOnce:
    def on_start(self, loop):
        if not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("callback", "status", "states", "told"),
    [
        ("DiesAfterItsEnd", 0, ["COMPLETE"] * 2, "job 1 of 2: "),
        ("IsStoppedOnce", 75, ["RUNNING", "COMPLETE"], "preempted: stopped by SIGTERM"),
    ],
)
def test_a_search_ends_with_status_0_once_all_trials_have_ended_and_else_says_why(
    search, workdir, monkeypatch, callback, status, states, told
):
    (workdir / "ending.py").write_text(CALLBACKS)
    monkeypatch.syspath_prepend(workdir)
    words = ("search.trials=2", "search.jobs=1", "hydra/launcher=pool", f"+callbacks.mine._target_=ending.{callback}")
    result, folder = search(*SEARCH, *words)
    assert (result.status, [state for state, *_ in trials_of(folder)]) == (status, states), result.out
    assert told in result.out
    assert ("1 of 2 trials have not ended" in result.out) == (status == 75)


def test_a_trial_without_a_finite_objective_is_a_failure_of_the_search(search):
    words = ("search.objectives={val/loss: min, val/accuracy: max}", "search.optimizer.lr={log: [1e30, 1e35]}")
    result, _ = search(*SEARCH, *words, "optimizer=sgd", "search.trials=1")
    assert "trial 1: failed: an objective is not finite" in result.out
    assert result.status == 1


def test_fail_fast_leaves_trials_that_were_begun_before(search):
    words = ("sweep=optuna", "search.model.width={choice: [0]}", "search.pruner=none", "sweep.fail_fast=true")
    _, folder = search(*words, "search.trials=1")
    [failed] = study_of(folder).get_trials()
    for _ in range(2):
        study_of(folder).add_trial(
            optuna.trial.create_trial(state=State.RUNNING, params=failed.params, distributions=failed.distributions)
        )
    result, _ = search(*words, "search.trials=3")
    assert (result.status, [state for state, *_ in trials_of(folder)]) == (1, ["FAIL", "FAIL", "RUNNING"])
    assert "1 of 3 trials have not ended; the same command continues" in result.out


def test_trials_side_by_side_get_one_gpu_each_and_settings_of_another_are_refused(run, tiny, workdir, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = run("train", *tiny, *SEARCH, "search.jobs=2", "device=auto", "devices=2")
    assert result.status == 2, result.out
    assert "devices: is 2, and each of several jobs at a time gets one GPU" in result.err


def test_a_search_that_is_killed_anywhere_and_repeated_ends_with_the_same_trials(search, tiny, workdir):
    words = ("sweep=optuna", LR, *HALVING, "search.trials=5", "epochs=3")
    expected_in = search(*words)[1].rename(workdir / "undisturbed")
    expected = trials_of(expected_in), digests(expected_in)
    assert {state for state, *_ in expected[0]} == {"COMPLETE", "PRUNED"}
    draw, kills = random.Random(0), 0
    for _ in range(30):
        program = ForkedProgram(["train", *tiny, *words])
        before, deadline = len(list(workdir.glob("outputs/*/sweeps/*/*/summary.json"))), time.monotonic() + 60
        while program.poll() is None and kills < 5:
            assert time.monotonic() < deadline
            if len(list(workdir.glob("outputs/*/sweeps/*/*/summary.json"))) > before:
                break
            time.sleep(0.005)
        if kills < 5:
            time.sleep(draw.random() * 0.3)
            program.kill()
            kills += 1
        out, err = program.communicate(timeout=60)
        if program.returncode == 0:
            break
        assert program.returncode == -signal.SIGKILL, err + out
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert (trials_of(folder), digests(folder)) == expected
    records = [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]
    ended = Counter(record["folder"] for record in records if record["event"] in ("finished", "pruned"))
    assert ended == dict.fromkeys("01234", 1)


def test_a_killed_trial_in_a_pool_begins_no_other_with_fail_fast_and_the_same_command_continues_it(
    search, tiny, workdir
):
    words = (*SEARCH, "search.trials=2", "epochs=20")
    _, alone = search(*words, "output_root=alone")
    program = ForkedProgram(["train", *tiny, *words, "search.jobs=1", "hydra/launcher=pool", "sweep.fail_fast=true"])
    deadline = time.monotonic() + 60
    while not (found := [path for path in workdir.glob("outputs/*/sweeps/*/0/metrics.jsonl") if path.stat().st_size]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(int((found[0].parent / ".lock").read_text().split()[1]), signal.SIGKILL)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 1, err + out
    assert "failed: killed by SIGKILL: perhaps out of memory" in out
    assert "job 2 of 2" not in out
    result, folder = search(*words, "search.jobs=1", "hydra/launcher=pool")
    assert result.status == 0, result.err
    assert folder.resolve() == found[0].parents[1]
    assert (trials_of(folder), digests(folder)) == (trials_of(alone), digests(alone))


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (("search.optimizer.lrr={log: [1e-4, 1e-1]}",), "search.optimizer.lrr", "did you mean 'lr'"),
        (("search.epoch={int: [1, 3]}",), "search.epoch", "did you mean 'epochs'"),
        (("search.trails=3", LR), "search.trails", "did you mean 'search.trials'"),
        (("search.optimizer.lr={log: [0, 1]}",), "search.optimizer.lr", "begins above 0"),
        (("search.optimizer.lr={log: [1, 0.1]}",), "search.optimizer.lr", "has to be smaller"),
        (("search.optimizer.lr={loq: [0.1, 1]}",), "search.optimizer.lr", "has no kind"),
        (("search.optimizer.lr={log: [0.1, 1], uniform: [0, 1]}",), "search.optimizer.lr", "but only one is allowed"),
        (("search.model.width={int: [1.5, 3]}",), "search.model.width", "whole numbers"),
        (("search.model.width={choice: []}",), "search.model.width", "a list of values"),
        (("search.optimizer.lr=0.1",), "search.optimizer.lr", "cannot be 0.1"),
        (("search.model={choice: [mlp, cnn]}",), "search.model", "has no option 'cnn'"),
        (("search.model={int: [1, 2]}",), "search.model", "is a group of options"),
        (("search.epochs={int: [0, 2]}",), "search.epochs", "cannot be 0"),
        (("search.name={choice: [a, b]}",), "search.name", "cannot vary"),
        ((), "search", "names no key"),
        ((LR, "seed=0,1"), "seed", "search.seeds"),
        ((LR, "search.trials=0"), "search.trials", "cannot be 0"),
        ((LR, "search.sampler=tpf"), "search.sampler", "did you mean 'tpe'"),
        ((LR, "search.storage=sqlite:///nowhere/study.db"), "search.storage", "there is no folder nowhere"),
        ((LR, "search.objectives={val/loss: min, val/accuracy: max}"), "search.pruner", "one objective"),
        ((LR, "search.warm_start=nowhere"), "search.warm_start", "is not a sweep's folder"),
        ((LR, "checkpoint.monitor=val/mine"), "checkpoint.mode", "a search has to know"),
    ],
)
def test_mistakes_are_told_before_the_first_trial(run, tiny, workdir, words, key, reason):
    result = run("train", *tiny, "sweep=optuna", *words)
    assert result.status == 2, result.out
    assert f"{key}: " in result.err
    assert reason in result.err
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [((LR,), "sweep=optuna too"), (("sweep=seeds", LR), "sweep=optuna too")],
    ids=["one run", "another sweep"],
)
def test_keys_of_a_search_without_one_are_refused(run, tiny, words, reason):
    result = run("train", *tiny, *words)
    assert result.status == 2
    assert reason in result.err


def test_without_optuna_it_says_what_to_install(run, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in ("search", "study"):
        monkeypatch.delitem(sys.modules, f"runner.sweeps.{name}", raising=False)
    result = run("train", *tiny, *SEARCH)
    assert result.status == 2
    assert "pip install 'runner[optuna]'" in result.err


def test_the_space_is_read_from_nested_and_dotted_keys():
    nested = {
        "optimizer": {"lr": {"log": [1, 2]}, "lr_mult.head": {"uniform": [0, 1]}},
        "model": {"choice": ["a"], "width": {"int": [1, 3]}},
    }
    found = with_space({"trials": 3, "space": {"seed": {"choice": [1, [2, "x"]]}}, **nested})
    assert found["trials"] == 3
    assert list(found["space"]) == ["seed", "optimizer.lr", "optimizer.lr_mult.head", "model", "model.width"]
    space, problems = ranges_of(found["space"])
    assert not problems
    assert space["seed"].choices == (1, "[2,x]")
    assert space["optimizer.lr"] == Range("float", 1.0, 2.0, log=True)
    assert space["model.width"] == Range("int", 1, 3, 1)
    assert text_of({"a": [None, True, "b c"]}) == '{a:[null,true,"b c"]}'


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes"])
def test_what_is_drawn_depends_on_seed_and_number_alone_also_after_a_kill(tmp_path, sampler):
    def drawn(name: str, seed: int = 0, kills: bool = False) -> list[dict]:
        study = Study(str(tmp_path / name), "search", ["max"], SPACE)
        for index in range(12):
            trial = study.ask(sampler_of(sampler, f"{seed} {index}", False), pruner_of("none", 0, 2))
            study.tell(trial.number, State.COMPLETE, [trial.params["a"]], [])
            if kills:
                with (tmp_path / name).open("a") as file:
                    file.write('{"op_code": ')
                study = Study(str(tmp_path / name), "search", ["max"], SPACE)
        return [trial.params for trial in study.trials()]

    expected = drawn("a")
    assert drawn("b", kills=True) == expected
    assert drawn("c", seed=1) != expected
    assert len({str(params) for params in expected}) > 6


@pytest.mark.parametrize("pruner", ["median", "halving", "hyperband"])
def test_trials_decide_as_optuna_does_and_again_after_a_kill(tmp_path, pruner):
    settings, draw, stopped = {"pruner": pruner, "warmup": 0, "reduction": 2}, random.Random(0), list[int]()
    study = optuna.create_study(study_name="search", direction="maximize", pruner=pruner_of(**settings))
    for number in range(20):
        trial, folder, best, prunes = study.ask(), tmp_path / str(number), 0.0, False
        folder.mkdir()
        for evaluation in range(1, 10):
            trial.report(value := draw.random(), evaluation)
            prunes, best = trial.should_prune(), max(value, best)
            for _ in range(2):  # the second process repeats what the first one did before it was killed
                own = Pruning({"number": number, "mode": "max", "pruner": settings}, folder, lambda asked: asked())
                assert own._stops(evaluation, value) == prunes
            if prunes:
                stopped.append(evaluation)
                break
        study.tell(trial, None if prunes else best, state=State.PRUNED if prunes else State.COMPLETE)
        result = {"status": "pruned" if prunes else "finished", "best": {"metric": "val/loss", "value": best}}
        (folder / "summary.json").write_text(json.dumps(result))
    assert len({*stopped}) > 1


@pytest.mark.parametrize("storage", ["mine.jsonl", "sqlite:///study.db"])
def test_a_study_lies_where_storage_says(search, workdir, storage):
    result, folder = search(*SEARCH, "search.trials=1", f"search.storage={storage}")
    assert result.status == 0, result.err
    assert (workdir / storage.removeprefix("sqlite:///")).is_file()
    assert not (folder / JOURNAL).exists()
    assert "1 of 1 trials have ended already" in search(*SEARCH, "search.trials=1", f"search.storage={storage}")[0].out
    assert len(Ledger(folder).read().jobs) == 1


def _into_the_middle(lines: int):
    def damage(file: Path) -> None:
        first, *rest = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join([first, b'{"mine": 1}\n' * lines, *rest]))

    return damage


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def _pages(file: Path) -> None:
    optuna.create_study(storage=f"sqlite:///{file}", study_name="mine")
    file.write_bytes(file.read_bytes()[:4096] + os.urandom(file.stat().st_size - 4096))


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 20)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, ""),
        (_cut, ""),
        (_into_the_middle(1), "a line is not Optuna's"),
        (_into_the_middle(200_000), "a line is not Optuna's"),
        (lambda file: file.write_bytes(os.urandom(5000)), "a line is not Optuna's"),
        (_folder, "it is not a regular file"),
        (_fifo, "it is not a regular file"),
    ],
    ids=["deleted", "cut", "a line", "200000 lines", "bytes", "folder", "fifo"],
)
def test_a_damaged_journal_is_moved_aside_and_finished_jobs_keep_their_results(
    run, tiny, workdir, made_once, damage, said
):
    words = ("sweep=optuna", LR, *HALVING, "search.trials=4", "epochs=3")
    folder = shutil.copytree(made_once(*words)[1], workdir / "mine")
    expected, ledger = (
        [(each.params, each.values, each.intermediate_values) for each in study_of(folder).trials],
        Ledger(folder),
    )
    before = ledger.read().jobs
    damage(folder / JOURNAL)
    result = run("train", *tiny, *words, "sweep.dir=mine")
    assert result.status == 0, result.err
    line = f"mine/{JOURNAL} is damaged ({said}) and was renamed to {JOURNAL}.damaged; finished jobs keep their results"
    assert (line in result.out) == os.path.lexists(folder / f"{JOURNAL}.damaged") == bool(said)
    assert [(each.params, each.values, each.intermediate_values) for each in study_of(folder).trials] == expected
    assert ": started" not in result.out
    assert ledger.read().jobs == before


@pytest.mark.parametrize(
    ("storage", "damage", "reason"),
    [
        ("mine.jsonl", lambda file: file.write_text("mine\n\n"), "a line is not Optuna's"),
        ("mine.jsonl", Path.mkdir, "it is not a regular file"),
        ("mine.jsonl", _fifo, "it is not a regular file"),
        ("sqlite:///mine.db", _pages, "malformed"),
        ("sqlite:///mine.db", lambda file: file.write_bytes(os.urandom(9000)), "not a database"),
        ("sqlite:///mine.db", Path.mkdir, "it is not a regular file"),
        ("sqlite:///mine.db", _fifo, "it is not a regular file"),
        ("nowhere/mine.jsonl", lambda file: None, "there is no folder nowhere"),
    ],
)
def test_a_storage_that_cannot_be_used_is_an_error_before_the_first_trial(run, tiny, workdir, storage, damage, reason):
    damage(workdir / Path(storage).name)
    result = run("train", *tiny, *SEARCH, f"search.storage={storage}")
    assert result.status == 2, result.out
    assert f"search.storage: {storage} cannot be used: " in result.err
    assert reason in result.err
    assert "allowed: the same command once that is mended, or another file" in result.err
    assert not (workdir / "outputs").exists()


def test_trials_with_the_values_of_one_that_runs_wait_for_its_result(search):
    words = ("search.seed={choice: [0, 1]}", "search.sampler=random", "search.trials=6", "search.jobs=3", "epochs=3")
    result, folder = search(
        "sweep=optuna", *words, "search.pruner=none", "hydra/launcher=pool", "hydra.launcher.per_device=2"
    )
    assert result.status == 0, result.err
    assert "search.jobs is 3 and hydra/launcher=pool has 2 slots: 2 trials at a time" in result.out
    assert len(digests(folder)) == 2
    by_seed = {(params["seed"], *values) for _, params, values in trials_of(folder)}
    assert (len(trials_of(folder)), len(by_seed)) == (6, 2)


MINE = """
import os, signal, subprocess, time
from pathlib import Path
from runner.launch.jobs import Ended

class Stops:
    def on_start(self, loop):
        if Path("stops").exists():
            os.kill(os.getpid(), signal.SIGTERM)

class Commands:
    slots, survives = None, False

    def __init__(self, values):
        self.running = {}

    def start(self, jobs):
        for job in jobs:
            environment = {**os.environ, **job.environment}
            self.running[job.number] = subprocess.Popen(job.command, env=environment, stdout=subprocess.DEVNULL)
        return ["somewhere" for _ in jobs]

    def wait(self, timeout_s):
        time.sleep(0.1)
        ended = [number for number, process in self.running.items() if process.poll() is not None]
        return [Ended(number) for number in ended if self.running.pop(number)]

    def stop(self, kill):
        pass

    def close(self):
        pass
"""


@pytest.fixture
def mine(workdir, monkeypatch) -> Path:
    (workdir / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(workdir)
    return workdir / "mine.py"


def test_results_that_the_study_has_stay_when_code_changes_and_other_trials_run_with_the_new_code(search, mine):
    words = (*SEARCH, "search.sampler=random", "+callbacks.mine._target_=mine.Stops")
    assert search(*words, "search.trials=1")[0].status == 0
    mine.with_name("stops").touch()
    result, folder = search(*words, "search.trials=2")
    assert (result.status, [state for state, *_ in trials_of(folder)]) == (75, ["COMPLETE", "RUNNING"])
    mine.with_name("stops").unlink()
    mine.write_text(MINE + "\n# another version\n")
    result, folder = search(*words, "search.trials=2")
    assert (result.status, [state for state, *_ in trials_of(folder)]) == (0, ["COMPLETE"] * 2)
    assert "started, again, as mine changed since job 1 ran" in result.out
    assert {path.parent.name for path in folder.glob("*/summary.json")} == {"0", "1", "2"}


def test_a_search_works_with_a_launcher_that_starts_commands(search, workdir, mine, monkeypatch):
    (workdir / "conf" / "hydra" / "launcher").mkdir(parents=True)
    (workdir / "conf" / "hydra" / "launcher" / "mine.yaml").write_text("_target_: mine.Commands\n")
    monkeypatch.setenv("PYTHONPATH", f"{workdir}:{os.environ['PYTHONPATH']}")
    words = ("sweep=optuna", LR, "search.sampler=random", "search.trials=2", "epochs=2")
    _, alone = search(*words)
    result, folder = search(*words, "--config-dir=conf", "hydra/launcher=mine", "sweep.new=true")
    assert result.status == 0, result.err
    assert "hydra/launcher=mine has any number of slots: 8 trials at a time" in result.out
    assert sorted(map(str, trials_of(folder))) == sorted(map(str, trials_of(alone)))
    assert digests(folder) == digests(alone)
    assert len(list(folder.glob("*/pruning.json"))) == 2
