"""Sweeps: a directory for each job, a job that fails stops no other, and a table of what became of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from running_sweeps import digests, summaries

from runner.config import keys
from runner.config.schema import Train
from runner.sweeps.plan import TOGGLES, toggles_off


@pytest.fixture
def four_jobs(made_once) -> tuple[str, Path]:
    """What a sweep printed, and its folder; to be read only."""
    return made_once("--multirun", "seed=0,1", "optimizer.lr=0.1,0.01")


def test_a_job_of_a_sweep_is_the_same_run_as_one_by_itself(four_jobs, run, tiny):
    alone = run("train", *tiny, "seed=1", "optimizer.lr=0.01")
    assert summaries(four_jobs[1])["3"]["weights_sha256"] == alone.summary["weights_sha256"]


def test_another_command_does_not_go_on_in_the_folder_of_a_job(four_jobs, rejected, tiny):
    job = four_jobs[1] / "0"
    before = (job / "summary.json").read_bytes()
    err = rejected("train", *tiny, "seed=7", "resume=auto", f"hydra.run.dir={job}").err
    assert "holds a run of other settings" in err
    assert (job / "summary.json").read_bytes() == before


def test_every_job_has_a_complete_directory_of_its_own(four_jobs):
    _, folder = four_jobs
    assert folder.parts[-4:-1] == ("outputs", "synthetic", "sweeps")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1", "2", "3", "logs"]
    seen = set()
    for job in "0123":
        assert (folder / job / "checkpoints" / "last.safetensors").is_file()
        config = yaml.safe_load((folder / job / "config.yaml").read_text())
        seen.add((config["seed"], config["optimizer"]["lr"]))
        recorded = yaml.safe_load((folder / job / "overrides.yaml").read_text())
        assert f"seed={config['seed']}" in recorded
        assert f"optimizer.lr={config['optimizer']['lr']}" in recorded
    assert seen == {(0, 0.1), (0, 0.01), (1, 0.1), (1, 0.01)}
    found = summaries(folder)
    assert {summary["status"] for summary in found.values()} == {"finished"}
    assert len({summary["weights_sha256"] for summary in found.values()}) == 4


def test_a_job_that_fails_stops_no_other(sweep, workdir, monkeypatch):
    text = "import torch\n\n\ndef net(num_classes, **_):\n    raise RuntimeError('broken inside')\n"
    (workdir / "breaking_sweep_package.py").write_text(text)
    monkeypatch.syspath_prepend(workdir)
    models = "model._target_=breaking_sweep_package.net,runner.models.small_cnn.SmallCNN"
    result, folder = sweep("--multirun", models)
    assert result.status == 1
    assert "Traceback" not in result.err
    found, said = summaries(folder), result.out + result.err
    assert [found[job]["status"] for job in "01"] == ["failed", "finished"]
    assert found["0"]["error"] == "RuntimeError: broken inside"
    assert "RuntimeError: broken inside" in (folder / "0" / "run.log").read_text()
    assert "1 of 2 jobs finished" in result.out
    assert "error: job 0 failed: RuntimeError: broken inside" in said
    told = r"job 1 of 2: .*: failed: .*\n    log: .*/0/run.log\n.*\n    again: python -m runner train .*package.net"
    assert re.search(told, said)
    assert re.search(r"^ +0 .*package.net.* failed ", result.out, re.MULTILINE)


PAIR, POOL = ("seed=0,1",), ("seed=0,1", "hydra/launcher=pool", "hydra.launcher.per_device=2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("deterministic=false,true", "cudnn_benchmark=true"), ["  cudnn_benchmark: ", "job 2 of 2: deterministic=True\n"]),
        ((*PAIR, "optimizer.lr=0.1,x"), ["  optimizer.lr: ", "from: job 2 of 4: seed=0 optimizer.lr=x, and 1 more\n"]),
        ((*PAIR, "epochs=0"), ["1 problem in", "  epochs: ", "from: the override epochs=0\n"]),
        ((*PAIR, "optimizer=adam,adma", "sede=1"), ["2 problems"]),
        (("optimizer.lr=interval(0.0001,0.1)",), ["  optimizer.lr: cannot be an interval"]),
        (("hydra/sweeper=optuna", "optimizer.lr=interval(0.0001,0.1)"), ["  hydra/sweeper: there is no 'optuna'"]),
        (("hydra/launcher=basics",), ["  hydra/launcher: there is no 'basics'"]),
        (("experiment=glob(zzz*)",), ["  experiment: has no option of that pattern"]),
        ((*PAIR, "hydra.sweep.subdir=both"), ["hydra.sweep.subdir: has no effect"]),
        ((*PAIR, "+hydra.callbacks.mine={_target_: a.B}"), ["hydra.callbacks.mine: has no effect"]),
        ((*PAIR, "hydra.job.chdir=true"), ["hydra.job.chdir: has no effect"]),
        ((*POOL, "hydra.launcher.per_device=0"), ["hydra.launcher.per_device: cannot be 0"]),
        ((*POOL, "hydra.launcher.threads=some"), ["hydra.launcher.threads: cannot be some"]),
        ((*POOL, "hydra.launcher.devices=gpu"), ["hydra.launcher.devices: cannot be gpu"]),
        ((*POOL, "hydra.launcher.devices=[0,0]"), ["hydra.launcher.devices: cannot be [0, 0]"]),
        ((*POOL, "hydra.launcher.devices=[1000]"), ["hydra.launcher.devices: ", "GPUs that can be seen"]),
        ((*POOL, "hydra.launcher.threeds=1"), ["hydra.launcher.threeds: is not a key"]),
        ((*PAIR, "sweep.retries=2"), ["sweep.retries: no longer exists"]),
        (("sweep=ablate", "sweep.ablate=[emma]", "ema=0.9"), ["sweep.ablate: ", "did you mean 'ema'"]),
        (("sweep=ablate", "sweep.ablate=[ema]"), ["sweep.ablate: ", "is off already"]),
        (("sweep=ablate", "sweep.ablate=[name]"), ["sweep.ablate: ", "cannot be switched off"]),
        (("sweep=ablate", "sweep.ablate=[epochs]"), ["epochs"]),
        (("sweep=ablate", "data.shift=0", "optimizer.weight_decay=0", "transform=none", "model.dropout=0"),
         ["sweep.ablate: finds no toggle that is on"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_the_first_job(refused, words, said):
    err = refused("--multirun", *words)
    for part in said:
        assert part in err


def test_each_job_says_its_number_what_it_varies_and_how_far_the_sweep_is_and_the_table_marks_the_best(four_jobs):
    out, folder = four_jobs
    varied = [(str(job), f"seed={job // 2} optimizer.lr={rate}") for job, rate in enumerate((0.1, 0.01) * 2)]
    heads = re.findall(r"^job (\d) of 4: (.*?): started(?:; (\d) finished, about .* left)?$", out, re.MULTILINE)
    assert heads == [(str(int(job) + 1), words, job.strip("0")) for job, words in varied]
    rows = re.findall(r"^ +(\d) +(seed=.*?)  +finished .*?(<- best)?$", out, re.MULTILINE)
    assert [row[:2] for row in rows] == varied
    assert json.loads((folder / "sweep.json").read_text())["best"] == [job for job, _, mark in rows if mark]


def test_settings_of_one_job_do_not_leak_into_the_next(sweep, run, tiny):
    _, folder = sweep("--multirun", "deterministic=true,false", "detect_anomaly=true")
    assert not torch.are_deterministic_algorithms_enabled()
    alone = run("train", *tiny)
    assert {*digests(folder).values()} == {alone.summary["weights_sha256"]}


def test_a_preset_starts_a_sweep_without_the_flag(sweep):
    result, folder = sweep("sweep=seeds", "limit.train_batches=1", "limit.eval_batches=1")
    assert result.status == 0, result.err
    assert len(summaries(folder)) == 5
    assert "5 of 5 jobs finished" in result.out
    seeds = [yaml.safe_load((folder / job / "config.yaml").read_text())["seed"] for job in "01234"]
    assert seeds == [0, 1, 2, 3, 4]


def test_the_folder_of_a_sweep_can_be_chosen_and_has_no_files_of_hydra(sweep, workdir):
    result, folder = sweep("--multirun", "++hydra.sweep.dir=chosen", "seed=0")
    assert result.status == 0, result.err
    assert not [each for each in yaml.safe_load((folder / "0" / "overrides.yaml").read_text()) if "hydra" in each]
    assert folder == workdir / "chosen"
    assert list(summaries(folder)) == ["0"]
    assert "[HYDRA]" not in result.out + result.err
    assert [path.name for path in workdir.iterdir()] == ["chosen"]
    assert sorted(path.name for path in folder.rglob("*.log")) == ["0.log", "run.log"]
    assert not [*folder.rglob(".hydra"), *folder.rglob("multirun.yaml")]


def test_the_newest_run_of_a_name_is_found_in_sweeps_too(four_jobs, run, tiny, workdir):
    _, folder = four_jobs
    shutil.copytree(folder.parents[2], workdir / "outputs")
    result = run("train", *tiny, "ckpt_path=last", "epochs=2")
    assert result.status == 0, result.err
    assert result.summary["resumed_from"].endswith(str(Path(folder.name) / "3" / "checkpoints" / "last.safetensors"))


def test_a_run_by_itself_leaves_nothing_but_its_directory(run, tiny, workdir):
    assert run("train", *tiny).status == 0
    assert [path.name for path in workdir.iterdir()] == ["outputs"]
    assert [path.name for path in workdir.rglob("*.log")] == ["run.log"]


def test_an_option_hidden_by_a_shipped_one_is_a_warning(workdir, run, tiny):
    hidden = workdir / "mine" / "model" / "mlp.yaml"
    hidden.parent.mkdir(parents=True)
    hidden.write_text("# Mine.\n_target_: nowhere.Net\n")
    result = run("train", *tiny, "--config-dir", "mine", "debug=smoke")
    assert result.status == 0
    assert f"{hidden} is not read" in result.err


@pytest.mark.extended
def test_a_pattern_of_options_makes_a_job_of_each(sweep):
    result, folder = sweep("--multirun", "model=glob([m*,small*])", "~model.width")
    assert result.status == 0, result.err
    words = [yaml.safe_load((folder / job / "overrides.yaml").read_text()) for job in "01"]
    assert ["model=mlp" in words[0], "model=small_cnn" in words[1]] == [True, True]


@pytest.mark.parametrize("swept", [("sweep=folds",), ("--multirun", "data.split.folds=5", "seed=0,1")])
def test_folds_of_images_that_have_a_validation_split_are_refused_before_the_first_job(run, workdir, swept):
    for split in ("train", "val"):
        (workdir / "photos" / split / "cats").mkdir(parents=True)
    result = run("train", *swept, "data=image_folder", "data.root=photos")
    assert result.status == 2
    assert "data.split.folds: is 5, but the folder of images has its own validation split" in result.err
    assert not (workdir / "outputs").exists()


@pytest.mark.extended
def test_each_toggle_that_is_on_is_off_in_one_job(run, tiny):
    words = ("sweep=ablate", "ema=0.9", "data.shift=0", "model.dropout=0.1", "optimizer.weight_decay=0")
    words += ("transform=none", "grad_clip.norm=1.0")
    result = run("train", *tiny, *words)
    assert result.status == 0, result.err
    folder = Path(result.out.strip().splitlines()[-1])
    found = []
    for job in "0123":
        config = yaml.safe_load((folder / job / "config.yaml").read_text())
        found.append((config["ema"], config["grad_clip"]["norm"], config["model"]["dropout"]))
    assert found == [(0.9, 1.0, 0.1), (None, 1.0, 0.1), (0.9, None, 0.1), (0.9, 1.0, 0)]
    assert not (folder / "4").exists()
    rows = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [row["varied"] for row in rows] == [[], ["ema=null"], ["grad_clip.norm=null"], ["model.dropout=0"]]
    again = run("train", *tiny, *words)
    assert again.out.count(": skipped, ") == 4
    other = run("train", *tiny, *words, "ema=0.8", "sweep.ablate=[ema]", "seed=0,1")
    assert other.status == 0, other.err
    assert "4 of 4 jobs finished" in other.out
    assert Path(other.out.strip().splitlines()[-1]) != folder


def test_every_toggle_is_a_key_and_has_a_value_that_is_off():
    values = {"sweep": {"ablate": "all"}}
    for key in TOGGLES:
        assert keys.find(Train, key) is not None
        section = values
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = [1] if key == "transform.train" else 0.5
    off = toggles_off(values, Train)
    assert list(off) == list(TOGGLES)
    assert {word.split("=")[1] for word in off.values()} == {"false", "null", "0", "[]"}
