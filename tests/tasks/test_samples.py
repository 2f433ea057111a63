"""`sample` of a task: pictures, texts and numbers while it trains, and by `predict samples=...`, through the program."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extended import some
from extras import needs
from PIL import Image
from safetensors.torch import load_file

WORDS = (
    "transform=none", "~model.dropout", "~model.width", "data.batch_size=16", "data.num_workers=0", "data=own", "data.images=[]",
    "data.dataset._target_=own_steps.Digits", "model._target_=own_steps.Normed", "loss=none", "log.every_steps=1",
    "task._target_=own_steps.Sampled", "optimizer.lr=0.05", "epochs=2",
)  # fmt: skip
PLAIN = "task._target_=own_steps.Reconstruction"
FILES = {"digits.png", "first.png", "___found.txt"}
TIMES = {"samples_per_s", "data_wait", "peak_memory_mib"}


def files(directory: Path) -> dict[str, bytes]:
    """The contents of all samples of a run by their name."""
    return {path.name: path.read_bytes() for path in (directory / "samples").iterdir()}


def names(*steps: int) -> set[str]:
    return {name.replace(".", f"_{step:08}.") for step in steps for name in FILES}


def pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image, int)


def metrics(result: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES | {"spread"}} for line in result.metrics]


def events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / "tensorboard"), {"images": 0, "tensors": 0})
    found.Reload()
    return found


@pytest.mark.parametrize("average", some([("ema=0.9",), ("swa=0.5",), ()], 0, 2), ids=lambda words: "".join(words))
def test_samples_are_those_of_the_evaluated_weights_and_training_keeps_its_bits(
    train: Callable[..., Any], accepted: Any, average: tuple[str, ...]
) -> None:
    result, plain = train(*WORDS, *average, "logger=tensorboard"), train(*WORDS, *average, PLAIN)
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert metrics(result) == metrics(plain)
    steps = [line["global_step"] for line in result.metrics if line["split"] == "val"]
    assert [line["split"] for line in result.metrics if "spread" in line] == ["val"] * len(steps) == ["val"] * 2
    found = files(result.directory)
    assert found.keys() == names(*steps)
    first, last = (found[f"digits_{step:08}.png"] for step in steps)
    assert first != last
    assert found[f"___found_{steps[-1]:08}.txt"] == "training False, gradients False, torch.float32\n<6> ä".encode()
    # The same weights and seed give the same picture elsewhere, and other weights or another seed do not
    call = ("predict", "threads=1", "samples=6", f"ckpt_path={result.directory}/checkpoints/last.safetensors")
    which = f"weights={'averaged' if average else 'raw'}"
    accepted(*call, which, "output=same")
    accepted(*call, which, "output=other", "weights=raw" if average else "seed=1")
    assert Path("same/digits.png").read_bytes() == last
    assert Path("other/digits.png").read_bytes() != last
    # TensorBoard
    shown = events(result.directory)
    assert [[event.step for event in shown.Images(f"sample/{name}")] for name in ("digits", "first")] == [steps] * 2
    texts = shown.Tensors("sample/___found/text_summary")
    assert [event.step for event in texts] == steps
    assert b"    training False" in texts[-1].tensor_proto.string_val[0]


def test_a_killed_run_writes_the_same_samples_and_ends_in_the_same_bits(
    train: Callable[..., Any], killed: Callable[..., Path]
) -> None:
    words = (*WORDS, "ema=0.9", "evaluate.every_steps=2", "checkpoint.every_steps=2", "logger=none")
    whole, plain = train(*words), train(*words, PLAIN)
    directory = killed(7, *words)
    before = files(directory)
    assert before.keys() == names(2, 4, 5, 6)
    (directory / "samples" / ".digits_00000007.png.0a1b2c.tmp").touch()
    resumed = train(f"ckpt_path={directory}", f"hydra.run.dir={directory}", "callbacks=none", "logger=none")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert before.items() <= files(directory).items() == files(whole.directory).items()


def test_tensorboard_shows_samples_of_a_resumed_run_once(train: Callable[..., Any]) -> None:
    words = (*WORDS, "evaluate.every_epochs=null", "evaluate.every_steps=2", "logger=tensorboard")
    directory = train(*words, "max_steps=4").directory
    (directory / "samples" / "secret_00000004.txt").symlink_to(directory / "config.yaml")
    train(f"ckpt_path={directory}", f"hydra.run.dir={directory}", "max_steps=8", "logger=tensorboard")
    found = events(directory)
    assert found.Tags()["tensors"] == ["sample/___found/text_summary"]
    assert [event.step for event in found.Images("sample/digits")] == [2, 4, 6, 8]
    # This reader does not hide texts that an earlier attempt wrote
    assert [event.step for event in found.Tensors("sample/___found/text_summary")] == [2, 4, 4, 6, 8]


@pytest.mark.parametrize("strategy", some(["ddp", "fsdp"], 0))
def test_several_ranks_write_samples_once_and_train_to_the_same_bits(
    train: Callable[..., Any], accepted: Any, strategy: str
) -> None:
    words = (*WORDS, "devices=2", f"strategy={strategy}", "dtype=float64", "ema=0.9", "logger=none")
    words += ("data.drop_last=true", "max_steps=4", "evaluate.every_steps=2")
    result, plain = train(*words), train(*words, PLAIN)
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert metrics(result) == metrics(plain)
    found = files(result.directory)
    assert found.keys() == names(2, 4)
    # One process that has all weights generates the same
    path = f"ckpt_path={result.directory}/checkpoints/last.safetensors"
    accepted("predict", path, "weights=averaged", "samples=6", "output=alone", "threads=1")
    assert Path("alone/digits.png").read_bytes() == found["digits_00000004.png"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@needs("mlflow")
@needs("wandb")
def test_trackers_get_pictures_and_texts(train: Callable[..., Any], workdir: Path, monkeypatch: Any) -> None:
    from mlflow.tracking import MlflowClient
    from wandb_files import history

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address := f"file://{workdir}/mlruns")
    result = train(*WORDS, "logger=[mlflow,wandb]", "logger.wandb.mode=offline")
    assert "did not arrive" not in result.out
    steps = [line["global_step"] for line in result.metrics if line["split"] == "val"]
    client = MlflowClient(tracking_uri=address)
    [found] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    sent = client.list_artifacts(found.info.run_id, "samples")
    assert {Path(each.path).name for each in sent} == files(result.directory).keys() == names(*steps)
    assert len(client.get_metric_history(found.info.run_id, "val/spread")) == 2
    rows = [row for row in history(result.directory) if any(name.startswith("sample/") for name in row)]
    assert [row["global_step"] for row in rows] == steps
    kinds = [[row[f"sample/{name}/_type"] for name in ("digits", "first", "___found")] for row in rows]
    assert kinds == [["image-file", "image-file", "html-file"]] * 2


@pytest.mark.parametrize(
    ("gives", "reason"),
    [
        ("a list", "its sample fails: 'list' object has no attribute 'items'"),
        ("floats", "its sample gives torch.float32 (3, 8, 8) as faces"),
        ("two channels", "its sample gives torch.uint8 (4, 2, 8, 8) as faces"),
        ("no picture", "its sample gives torch.uint8 (0, 3, 8, 8) as faces"),
        ("None", "its sample gives a NoneType as faces"),
        ("a metric", "its sample gives val/loss, which the evaluation gives, too"),
        ("a column", "callback Samples, on_evaluation: the metric cannot be named 'val/epoch'"),
        ("an error", "its sample fails: 'faces'"),
    ],
)
def test_what_sample_may_not_return_is_refused(rejected: Callable[..., Any], gives: str, reason: str) -> None:
    err = rejected("train", "threads=1", "logger=none", *WORDS, "max_steps=1", f"task.gives={gives}").err
    assert reason in err
    assert gives == "a column" or "task: its sample" in err
    assert gives != "an error" or "own_steps.py" in err


def test_predict_writes_a_grid_and_single_pictures(train: Callable[..., Any], printed: Any, refused: Any) -> None:
    directory = train(*WORDS, "max_steps=1", "logger=none").directory
    call = ("predict", f"ckpt_path={directory}")
    found = printed(*call, "samples=3")
    folder = Path(found["output"])
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == FILES | {
        f"digits/00000{number}.png" for number in range(3)
    }
    assert (found["samples"], found["numbers"].keys()) == (3, {"spread"})
    assert {Path(path).name for path in found["files"]} == FILES
    single = pixels(folder / "digits/000002.png")
    assert single.shape == (8, 8, 3)
    assert (pixels(folder / "digits.png")[2:10, 22:30] == single).all()
    assert "<3>" in (folder / "___found.txt").read_text()
    for words, key in ((["input=test"], "input"), (["top_k=2"], "top_k"), (["pictures=true"], "pictures")):
        refused([f"ckpt_path={directory}", "samples=3", *words], key, "does not apply to", verb="predict")


@pytest.mark.parametrize(
    ("takes", "count"),
    [("modules", None), ("modules, count", 16), ("modules, count=3", 3), ("modules, *, count", 16)]
    + [(takes, "refused") for takes in ("count, modules", "modules, number")],
)
def test_a_count_is_passed_to_those_who_take_one(
    train: Callable[..., Any], refused: Callable[..., None], own_module: Any, takes: str, count: Any
) -> None:
    own_module("counted", COUNTED.format(takes=takes))
    words = (*WORDS, "max_steps=1", "logger=none", "task._target_=counted.Counted")
    if count == "refused":
        refused(words, "task._target_", f"sample({takes}) does not take modules", "sample(self, modules[, count])")
        return
    result = train(*words)
    assert [line.get("count") for line in result.metrics if line["split"] == "val"] == [count or 1]
    assert not (result.directory / "samples").exists()  # without pictures and texts
    if count is None:
        reason = "Counted has no sample(modules, count)"
        refused([f"ckpt_path={result.directory}", "samples=3"], "samples", reason, verb="predict")


def test_a_full_disk_ends_the_run_with_its_state_and_a_resumed_one_samples(
    train: Callable[..., Any], run: Callable[..., Any], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = (*WORDS, "logger=none", f"hydra.run.dir={workdir}/run")
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", full)
        ended = run("train", "threads=1", *words)
    assert ended.status == 1
    assert f"no space left on the disk that holds {workdir}/run/samples/digits_00000005.png" in ended.err
    assert files(workdir / "run") == {}
    result = train(f"ckpt_path={workdir}/run", f"hydra.run.dir={workdir}/run", "logger=none", "callbacks=none")
    assert files(workdir / "run").keys() == names(5, 10)
    assert result.summary["weights_sha256"] == train(*WORDS, "logger=none").summary["weights_sha256"]


COUNTED = """
import own_steps


class Counted(own_steps.Reconstruction):
    def sample(self, {takes}):
        return {{"count": locals().get("count", 1)}}
"""
CALLBACK = """
import torch


class Averages:
    def on_evaluation(self, loop, metrics):
        averaged = loop.state.averaged
        before = [weight.detach().clone() for weight in loop.state.model.parameters()]
        with averaged.applied():
            torch.save(loop.state.model.state_dict(), loop.directory / "average.pt")
        assert all(map(torch.equal, before, loop.state.model.parameters()))
"""


@pytest.mark.parametrize("words", [(), ("devices=2",)], ids=["one", "two ranks"])
def test_a_callback_writes_the_averaged_weights_into_the_run_directory(
    train: Callable[..., Any], own_module: Any, words: tuple[str, ...]
) -> None:
    own_module("averages", CALLBACK)
    own = ("model._target_=own_steps.VAE", "+callbacks.own._target_=averages.Averages")
    result = train(*WORDS, *words, "logger=none", "max_steps=3", "ema=0.9", *own)
    found = torch.load(result.directory / "average.pt")
    saved = load_file(result.directory / "checkpoints" / "last.safetensors")
    assert all(torch.equal(value, saved[f"averaged/weights/{name}"]) for name, value in found.items())
    assert [*Path().glob("average.pt")] == []


def test_verbs_that_call_callbacks_give_them_a_folder(accepted: Any, own_module: Any, workdir: Path) -> None:
    own_module("averages", 'class Note:\n    def on_step(self, loop):\n        (loop.directory / "note").touch()\n')
    own = ("+callbacks.own._target_=averages.Note", "threads=1", "model=mlp")
    accepted("profile", *own, "steps=2", "warmup_steps=0", "trace_steps=0")
    json.loads(accepted("check", *own, "only=[step]", "json=true").out)
    assert [path.parent.parent.name for path in workdir.rglob("note")] == ["profiles"]  # that of check is gone
