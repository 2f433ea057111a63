"""Searches with Optuna: what each key does, trials that stop early, the same command again, and mistakes in the search space."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from extended import some
from forked import ForkedProgram
from optuna.storages.journal import JournalFileBackend, JournalStorage
from running_sweeps import digests, kill_and_repeat, summaries, until

from runner.base.errors import UserError
from runner.config.space import Range, ranges_of, text_of, with_space
from runner.sweeps.ledger import Ledger
from runner.sweeps.study import JOURNAL, Reports, State, Study, pruner_of, sampler_of, storage_of, using
from runner.tracking.formats import number as shown

LR = "search.optimizer.lr={log: [1e-4, 1e-1]}"
SEARCH = ("sweep=optuna", LR, "search.pruner=none")
HALVING = ("search.pruner=halving", "search.reduction=2", "checkpoint.monitor=val/loss")
SPACE = {"a": Range("float", 1e-4, 0.1, log=True), "b": Range("choice", choices=("x", 2)), "c": Range("int", 1, 9, 2)}


@pytest.fixture
def search(run, tiny):
    """Search over tiny runs; gives what was printed and the folder."""

    def call(*words: str, status: int = 0) -> tuple[str, Path]:
        result = run("train", *tiny, *words)
        assert result.status == status, result.err + result.out
        return result.out + result.err, Path((result.out.strip().splitlines() or ["."])[-1])

    return call


def study_of(folder: Path) -> Any:
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.load_study(study_name="search", storage=storage)


def trials_of(folder: Path) -> list[tuple[str, dict, list[float] | None, dict]]:
    found = study_of(folder).trials
    return [(each.state.name, each.params, each.values, each.intermediate_values) for each in found]


@pytest.mark.extended
def test_a_search_ends_with_its_best_trial_as_a_preset_and_the_same_command_asks_for_more(search, run, tiny, workdir):
    words = (*SEARCH, "search.model={choice: [mlp, small_cnn]}", "~model.width")
    out, folder = search(*words, "search.trials=2")
    found = study_of(folder).trials
    assert [trial.state for trial in found] == [State.COMPLETE] * 2
    for trial in found:
        assert 1e-4 <= trial.params["optimizer.lr"] <= 1e-1
        config = yaml.safe_load((folder / str(trial.number) / "config.yaml").read_text())
        assert config["optimizer"]["lr"] == trial.params["optimizer.lr"]
        assert ("MLP" in config["model"]["_target_"]) == (trial.params["model"] == "mlp")
        assert trial.value == summaries(folder)[str(trial.number)]["best"]["value"]
    best = max(found, key=lambda trial: trial.value)
    title, command = (folder / "best.yaml").read_text().splitlines()[1:3]
    assert f"trial {best.number + 1}, the best of 2" in title
    assert command.startswith("# python -m runner train ")
    assert command.endswith(f"optimizer.lr={best.params['optimizer.lr']} model={best.params['model']}")
    assert command[2:] in out
    (workdir / "mine" / "experiment").mkdir(parents=True)
    shutil.copy(folder / "best.yaml", workdir / "mine" / "experiment")
    again = run("train", "--config-dir", "mine", *tiny, "~model.width", "experiment=best")
    assert again.summary["weights_sha256"] == digests(folder)[str(best.number)]

    out, same = search(*words, "search.trials=2")
    assert same == folder
    assert "2 of 2 trials have ended already; search.trials= asks for more" in out
    before = trials_of(folder)
    assert search(*words, "search.trials=3")[1] == folder
    assert (trials_of(folder)[:2], len(study_of(folder).trials)) == (before, 3)


def test_a_trial_is_not_the_newest_run_and_goes_on_in_its_folder_if_its_line_is_torn(search, rejected):
    words = (*SEARCH, "search.trials=2")
    _, folder = search(*words)
    found = rejected("eval", "ckpt_path=last", f"name={folder.parents[1].name}")
    assert f"the newest, {folder / '1'}, has values of a search" in found.err
    ledger, summary = folder / "sweep.jsonl", folder / "1" / "summary.json"
    lines = ledger.read_text().splitlines(keepends=True)
    of_trial_1 = [line for line in lines if json.loads(line).get("folder") == "1"]
    ledger.write_text("".join(line for line in lines if line not in of_trial_1) + of_trial_1[0][:-20])
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"status": "preempted"}))
    study = (folder / "search.jsonl").read_text().splitlines(keepends=True)
    (folder / "search.jsonl").write_text("".join(study[:4]))  # without the result of the second trial
    out, same = search(*words)
    assert same == folder
    assert "sweep.jsonl: its last line is incomplete" in out
    assert not (folder / "2").exists()
    assert "resumed from" in (folder / "1" / "run.log").read_text()


def test_a_pruned_trial_stops_at_an_evaluation_with_a_checkpoint_and_is_not_run_again(search, run, tiny):
    words = ("sweep=optuna", LR, *HALVING, "search.trials=4", "epochs=4", "evaluate.test=true")
    out, folder = search(*words)
    stopped = [trial for trial in study_of(folder).trials if trial.state == State.PRUNED]
    assert stopped
    for trial in stopped:
        found = summaries(folder)[str(trial.number)]
        assert found["status"] == "pruned"
        assert found["global_step"] == max(trial.intermediate_values) < 4
        assert "test" not in found
        assert f"trial {trial.number + 1}: pruned after evaluation {found['global_step']}" in out
    assert f", {len(stopped)} pruned" in out
    lr = f"optimizer.lr={stopped[0].params['optimizer.lr']}"
    whole = run("train", *tiny, "epochs=4", lr).summary["weights_sha256"]
    on = run("train", *tiny, "epochs=4", f"ckpt_path={folder / str(stopped[0].number)}", "hydra.run.dir=on")
    assert on.summary["weights_sha256"] == whole  # no bit of a pruned trial differs
    before = digests(folder)
    search(*words)
    assert digests(folder) == before


@pytest.mark.extended
def test_a_trial_has_a_job_for_each_seed_and_the_mean_of_their_best_values(search):
    words = ("search.optimizer.amsgrad={choice: [true]}", "checkpoint.monitor=val/loss")
    out, folder = search(*SEARCH, *words, "search.seeds=[3, 4]", "search.trials=2")
    assert [yaml.safe_load((folder / job / "config.yaml").read_text())["seed"] for job in "0123"] == [3, 4, 3, 4]
    best = [summaries(folder)[job]["best"]["value"] for job in "0123"]
    for index, trial in enumerate(study_of(folder).trials):
        mean = sum(best[2 * index : 2 * index + 2]) / 2
        assert trial.values == [mean]
        assert f"trial {index + 1}: val/loss {shown(mean)}" in out


@pytest.mark.extended
def test_a_failed_job_and_one_without_the_monitored_metric_are_failed_trials(search):
    words = ("sweep=optuna", "search.model.width={choice: [0, 4]}", "search.pruner=none", "search.sampler=random")
    out, folder = search(*words, "search.trials=3", status=1)
    for trial in study_of(folder).trials:
        assert trial.state == (State.FAIL if trial.params["model.width"] == 0 else State.COMPLETE)
    assert "width must be at least 1" in out
    out, folder = search(*SEARCH, "evaluate.every_epochs=null", "data.split.val=0", "search.trials=1", status=1)
    assert "trial 1: failed: " in out
    assert [trial.state for trial in study_of(folder).trials] == [State.FAIL]


def test_a_search_of_an_earlier_version_continues_without_trials_that_it_took_from_another_sweep(search):
    words = (*SEARCH, "search.optimizer.lr={log: [1e-3, 0.05]}")
    _, folder = search(*words, "search.trials=1")
    [own] = study_of(folder).trials
    taken = {"params": own.params, "distributions": own.distributions, "user_attrs": {"warm_start": "outputs/0"}}
    study_of(folder).add_trial(optuna.trial.create_trial(values=own.values, **taken))
    ledger = folder / "sweep.jsonl"
    text = ledger.read_text().replace('"search.space": ', '"search.objectives": {}, "search.space": ')
    ledger.write_text(text.replace('"retry": ', '"retries": 2, "fail_fast": true, "retry": '))
    assert ledger.read_text().count('"search.objectives": {}') == ledger.read_text().count('"fail_fast"') == 1
    out, same = search(*words, "search.trials=2")
    assert same == folder
    assert "1 of 2 trials have ended already; 1 are left" in out
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1", "logs"]
    assert "trial" in (folder / "best.yaml").read_text().splitlines()[1]


@pytest.mark.extended
def test_trials_with_the_values_of_one_that_runs_wait_for_its_result(search):
    words = ("search.seed={choice: [0, 1]}", "search.sampler=random", "search.trials=6", "epochs=3")
    pool = ("search.jobs=3", "hydra/launcher=pool", "hydra.launcher.per_device=2")
    out, folder = search("sweep=optuna", *words, "search.pruner=none", *pool)
    assert "search.jobs is 3 and hydra/launcher=pool has 2 slots: 2 trials at a time" in out
    results = {(trial.params["seed"], trial.value) for trial in study_of(folder).trials}
    assert (len(study_of(folder).trials), len(results), len(digests(folder))) == (6, 2, 2)


@pytest.mark.extended
def test_a_search_works_with_a_launcher_that_starts_commands(search, commands_launcher):
    words = ("sweep=optuna", LR, "search.sampler=random", "search.trials=2", "epochs=2")
    _, alone = search(*words)
    out, folder = search(*words, *commands_launcher, "+hydra.launcher.slots=null", "sweep.new=true")
    assert "hydra/launcher=commands has any number of slots: 8 trials at a time" in out
    assert sorted(map(str, trials_of(folder))) == sorted(map(str, trials_of(alone)))
    assert digests(folder) == digests(alone)
    assert all(trial.intermediate_values for trial in study_of(folder).trials)


@pytest.mark.parametrize(
    ("kills", "words"),
    some(
        [
            (5, ("sweep=optuna", *HALVING, "search.trials=5", "epochs=3")),
            (5, (*SEARCH, "search.sampler=random", "search.jobs=2", "search.trials=5", "epochs=3")),
            (1, (*SEARCH, "search.sampler=random", "search.jobs=2", "search.trials=2")),
        ],
        2,
        several=True,
    ),
    ids=["serial", "parallel", "once"],
)
def test_a_search_that_is_killed_anywhere_and_repeated_ends_with_the_same_trials(search, tiny, workdir, kills, words):
    words = (*words, LR)
    _, expected = search(*words, "output_root=undisturbed", "search.jobs=null")
    kill_and_repeat(["train", *tiny, *words], kills, workdir)
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert (trials_of(folder), digests(folder)) == (trials_of(expected), digests(expected))
    assert (folder / "best.yaml").read_text().splitlines()[3:] == (expected / "best.yaml").read_text().splitlines()[3:]
    records = [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]
    ends = sorted(record["folder"] for record in records if record["event"] in ("finished", "pruned"))
    assert ends == sorted(digests(expected))


@pytest.mark.extended
def test_a_trial_whose_process_is_killed_stays_open_and_the_same_command_continues_it(search, tiny, workdir):
    words = (*SEARCH, "search.trials=2", "epochs=20")
    _, alone = search(*words, "output_root=alone")
    program = ForkedProgram(["train", *tiny, *words])
    found = until(
        lambda: [path for path in workdir.glob("outputs/*/*/*/0/metrics.jsonl") if path.stat().st_size], program
    )
    os.kill(int((found[0].parent / ".lock").read_text().split()[1]), signal.SIGKILL)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 1, err + out
    assert "failed: its process was killed by SIGKILL: perhaps out of memory" in out
    assert "1 of 2 trials have not ended; the same command continues" in out
    _, folder = search(*words)
    assert (trials_of(folder), digests(folder)) == (trials_of(alone), digests(alone))


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (("search.optimizer.lrr={log: [1e-4, 1e-1]}",), "search.optimizer.lrr", "did you mean 'lr'"),
        (("search.epoch={int: [1, 3]}",), "search.epoch", "did you mean 'epochs'"),
        (("search.optimizer.lr={log: [0, 1]}",), "search.optimizer.lr", "begins above 0"),
        (("search.optimizer.lr={log: [1, 0.1]}",), "search.optimizer.lr", "has to be smaller"),
        (("search.optimizer.lr={loq: [0.1, 1]}",), "search.optimizer.lr", "has none of log"),
        (("search.optimizer.lr={log: [0.1, 1], uniform: [0, 1]}",), "search.optimizer.lr", "has log and uniform of"),
        (("search.model.width={int: [1.5, 3]}",), "search.model.width", "whole numbers"),
        (("search.model.width={choice: []}",), "search.model.width", "a list of values"),
        (("search.optimizer.lr=0.1",), "search.optimizer.lr", "cannot be 0.1"),
        (("search.model={choice: [mlp, cnn]}",), "search.model", "has no option 'cnn'"),
        (("search.model={int: [1, 2]}",), "search.model", "is a group of options"),
        (("search.epochs={int: [0, 2]}",), "search.epochs", "cannot be 0"),
        (("search.name={choice: [a, b]}",), "search.name", "cannot vary"),
        ((), "search", "names no key"),
        ((LR, "seed=0,1"), "seed", "search.seeds"),
        ((LR, "search.storage=nowhere/mine.jsonl"), "search.storage", "there is no folder nowhere"),
        ((LR, "search.objectives={val/loss: min}"), "search.objectives.val/loss", "no longer exists"),
        ((LR, "checkpoint.monitor=val/mine"), "checkpoint.mode", "a search has to know"),
    ],
)
def test_mistakes_are_told_before_the_first_trial(refused, words, key, reason):
    err = refused("sweep=optuna", *words)
    assert f"{key}: " in err
    assert reason in err


@pytest.mark.parametrize("words", [(), ("sweep=seeds",)], ids=["one run", "another sweep"])
def test_keys_of_a_search_without_one_are_refused(refused, words):
    assert "sweep=optuna too" in refused(LR, *words)


def test_without_optuna_it_says_what_to_install(search, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in ("search", "study"):
        monkeypatch.delitem(sys.modules, f"runner.sweeps.{name}", raising=False)
    assert "pip install 'runner[optuna]'" in search(*SEARCH, status=2)[0]


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


@pytest.mark.parametrize("sampler", some(["tpe", "random", "cmaes"], 0, 1))
def test_what_is_drawn_depends_on_seed_and_number_alone_also_after_a_kill(tmp_path, sampler):
    def drawn(name: str, seed: int = 0, kills: bool = False) -> list[dict]:
        study = Study(str(tmp_path / name), "search", "max", SPACE)
        for index in range(12):
            trial = study.ask(sampler_of(sampler, f"{seed} {index}", False), pruner_of("none", 0, 2))
            study.tell(trial.number, State.COMPLETE, trial.params["a"])
            if kills:
                with (tmp_path / name).open("a") as file:
                    file.write('{"op_code": ')
                study = Study(str(tmp_path / name), "search", "max", SPACE)
        return [trial.params for trial in study.trials()]

    expected = drawn("a")
    assert drawn("b", kills=True) == expected
    assert drawn("c", seed=1) != expected
    assert len({str(params) for params in expected}) > 6


@pytest.mark.parametrize("pruner", ["median", "halving", "hyperband"])
def test_trials_decide_as_optuna_does_and_again_after_a_kill(tmp_path, pruner):
    settings, draw, stopped = {"pruner": pruner, "warmup": 0, "reduction": 2}, random.Random(0), list[int]()
    alone = optuna.create_study(study_name="search", direction="maximize", pruner=pruner_of(**settings))
    study = Study(str(tmp_path / JOURNAL), "search", "max", SPACE)
    for number in range(20):
        trial, best, prunes = alone.ask(), 0.0, False
        study.ask(sampler_of("random", str(number), False), pruner_of(**settings))
        for evaluation in range(1, 10):
            trial.report(value := draw.random(), evaluation)
            prunes, best = trial.should_prune(), max(value, best)
            for _ in range(2):  # the second process repeats what the first one did before it was killed
                own = Reports(study.where, study.name, number, settings)
                assert own.stops(evaluation, value) == prunes
                assert own.stopped_at == (evaluation if prunes else None)
            if prunes:
                stopped.append(evaluation)
                break
        state = State.PRUNED if prunes else State.COMPLETE
        alone.tell(trial, None if prunes else best, state=state)
        study.tell(number, state, None if prunes else best)
    assert len({*stopped}) > 1


@pytest.mark.extended
def test_a_study_lies_where_storage_says(search, workdir):
    words = (*SEARCH, "search.trials=1", "search.storage=sqlite:///study.db")
    _, folder = search(*words)
    assert (workdir / "study.db").is_file()
    assert not (folder / JOURNAL).exists()
    assert "1 of 1 trials have ended already" in search(*words)[0]
    assert len(Ledger.read(folder).jobs) == 1


def _fifo(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def _pages(file: Path) -> None:
    optuna.create_study(storage=f"sqlite:///{file}", study_name="mine")
    file.write_bytes(file.read_bytes()[:4096] + os.urandom(file.stat().st_size - 4096))


@pytest.mark.parametrize(
    ("damage", "said"),
    some(
        [
            (Path.unlink, ""),
            (lambda file: file.with_name(f"{JOURNAL}.lock").touch(), ""),  # as a kill leaves it
            (lambda file: os.truncate(file, file.stat().st_size - 20), ""),
            (lambda file: file.write_bytes(b'{"mine": 1}\n' + file.read_bytes()), "a line is not Optuna's"),
            (_fifo, "it is not a regular file"),
        ],
        3,
        several=True,
    ),
    ids=["deleted", "lock", "cut", "a line", "fifo"],
)
def test_a_damaged_journal_is_moved_aside_and_finished_jobs_keep_their_results(
    search, workdir, made_once, damage, said
):
    words = (*SEARCH, "search.trials=4", "epochs=3")
    folder = shutil.copytree(made_once(*words)[1], workdir / "mine")
    before = trials_of(folder), Ledger.read(folder).jobs
    damage(folder / JOURNAL)
    out, _ = search(*words, "sweep.dir=mine")
    line = f"mine/{JOURNAL} is damaged ({said}) and was renamed to {JOURNAL}.damaged; finished jobs keep their results"
    assert (line in out) == os.path.lexists(folder / f"{JOURNAL}.damaged") == bool(said)
    assert ": started" not in out
    assert (trials_of(folder), Ledger.read(folder).jobs) == before


@pytest.mark.parametrize(
    ("storage", "damage", "reason"),
    [
        ("mine.jsonl", lambda file: file.write_text("mine\n\n"), "a line is not Optuna's"),
        ("mine.jsonl", lambda file: file.write_text('{"mine": 1}\n' * 200_000), "a line is not Optuna's"),
        ("mine.jsonl", lambda file: file.write_bytes(os.urandom(5000)), "a line is not Optuna's"),
        ("mine.jsonl", Path.mkdir, "it is not a regular file"),
        ("mine.jsonl", _fifo, "it is not a regular file"),
        ("sqlite:///mine.db", _pages, ".* malformed"),
        ("sqlite:///mine.db", lambda file: file.write_bytes(os.urandom(9000)), ".* not a database"),
        ("sqlite:///mine.db", Path.mkdir, "it is not a regular file"),
        ("sqlite:///mine.db", _fifo, "it is not a regular file"),
    ],
)
def test_a_storage_that_cannot_be_used_is_an_error(workdir, storage, damage, reason):
    damage(workdir / Path(storage).name)
    told = f"^search.storage: {storage} cannot be used: {reason}\n.*allowed: the same command once that is fixed, or another"
    with pytest.raises(UserError, match=told), using(storage):
        storage_of(storage)
