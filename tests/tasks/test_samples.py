"""`sample` of a task: pictures, texts and numbers while it trains, and by `predict samples=...`, through the program."""

from __future__ import annotations

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
    "data.dataset._target_=own_steps.Digits", "model._target_=own_steps.VAE", "loss=none", "log.every_steps=1",
    "task._target_=own_steps.Sampled", "optimizer.lr=0.05", "epochs=2",
)  # fmt: skip
PLAIN = "task._target_=own_steps.Reconstruction"
FILES = {"digits.png", "first.png", "found.txt"}
TIMES = {"samples_per_s", "data_wait", "peak_memory_mib"}


def files(directory: Path) -> dict[str, bytes]:
    """The contents of all samples of a run by their place."""
    folder = directory / "samples"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    assert found.keys() == {f"step_{step:08}/{name}" for step in steps for name in FILES}
    first, last = (f"step_{step:08}" for step in steps)
    assert found[f"{first}/digits.png"] != found[f"{last}/digits.png"]
    assert found[f"{last}/found.txt"] == b"training False, gradients False, torch.float32\n<6>"
    # The same weights and seed give the same picture elsewhere, and other weights or another seed do not
    call = ("predict", "threads=1", "samples=6", f"ckpt_path={result.directory}/checkpoints/last.safetensors")
    which = f"weights={'averaged' if average else 'raw'}"
    accepted(*call, which, "output=same")
    accepted(*call, which, "output=other", "weights=raw" if average else "seed=1")
    assert Path("same/digits.png").read_bytes() == found[f"{last}/digits.png"]
    assert Path("other/digits.png").read_bytes() != found[f"{last}/digits.png"]
    # TensorBoard
    shown = events(result.directory)
    assert [[event.step for event in shown.Images(f"sample/{name}")] for name in ("digits", "first")] == [steps] * 2
    texts = shown.Tensors("sample/found/text_summary")
    assert [event.step for event in texts] == steps
    assert b"    training False" in texts[-1].tensor_proto.string_val[0]


def test_a_killed_run_writes_the_same_samples_and_ends_in_the_same_bits(
    train: Callable[..., Any], killed: Callable[..., Path]
) -> None:
    words = (*WORDS, "ema=0.9", "evaluate.every_steps=2", "checkpoint.every_steps=2", "logger=none")
    whole, plain = train(*words), train(*words, PLAIN)
    directory = killed(7, *words)
    before = files(directory)
    assert {path.partition("/")[0] for path in before} == {f"step_0000000{step}" for step in (2, 4, 5, 6)}
    resumed = train(f"ckpt_path={directory}", f"hydra.run.dir={directory}", "callbacks=none", "logger=none")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert before.items() <= files(directory).items() == files(whole.directory).items()


def test_tensorboard_shows_samples_of_a_resumed_run_once(train: Callable[..., Any]) -> None:
    words = (*WORDS, "evaluate.every_epochs=null", "evaluate.every_steps=2", "logger=tensorboard")
    directory = train(*words, "max_steps=4").directory
    train(f"ckpt_path={directory}", f"hydra.run.dir={directory}", "max_steps=8", "logger=tensorboard")
    found = events(directory)
    assert [event.step for event in found.Images("sample/digits")] == [2, 4, 6, 8]
    # This reader does not hide texts that an earlier attempt wrote
    assert [event.step for event in found.Tensors("sample/found/text_summary")] == [2, 4, 4, 6, 8]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_ranks_write_samples_once_and_train_to_the_same_bits(
    train: Callable[..., Any], accepted: Any, strategy: str
) -> None:
    words = (*WORDS, "devices=2", f"strategy={strategy}", "max_steps=4", "ema=0.9", "dtype=float64", "logger=none")
    result, plain = train(*words), train(*words, PLAIN)
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert metrics(result) == metrics(plain)
    found = files(result.directory)
    assert found.keys() == {f"step_00000004/{name}" for name in FILES}
    # One process that has all weights generates the same
    accepted("predict", f"ckpt_path={result.directory}", "weights=averaged", "samples=6", "output=alone", "threads=1")
    assert Path("alone/digits.png").read_bytes() == found["step_00000004/digits.png"]


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
    images = [each.path for each in client.list_artifacts(found.info.run_id, "images") if each.path.endswith(".png")]
    assert [
        sum(f"~{name}+step+{step}+" in path for path in images) for name in ("digits", "first") for step in steps
    ] == [1] * 4
    for step in steps:
        place = f"samples/step_{step:08}"
        assert [each.path for each in client.list_artifacts(found.info.run_id, place)] == [f"{place}/found.txt"]
    assert len(client.get_metric_history(found.info.run_id, "val/spread")) == 2
    rows = [row for row in history(result.directory) if any(name.startswith("sample/") for name in row)]
    assert [row["global_step"] for row in rows] == steps
    kinds = [[row[f"sample/{name}/_type"] for name in ("digits", "first", "found")] for row in rows]
    assert kinds == [["image-file", "image-file", "html-file"]] * 2


@pytest.mark.parametrize(
    ("gives", "reason"),
    [
        ("a list", "its sample gives a list"),
        ("floats", "its sample gives torch.float32 (3, 8, 8) as faces"),
        ("two channels", "its sample gives torch.uint8 (4, 2, 8, 8) as faces"),
        ("no picture", "its sample gives torch.uint8 (0, 3, 8, 8) as faces"),
        ("None", "its sample gives a NoneType as faces"),
        ("a path", "its sample gives the name '../faces', which is not a file name"),
        ("a hidden file", "its sample gives the name '.faces', which is not a file name"),
        ("no name", "its sample gives the name 3, which is not a file name"),
        ("a metric", "its sample gives a number as loss, which the evaluation has, too"),
        ("a column", "its sample gives a number as epoch, which the evaluation has, too"),
        ("an error", "its sample fails: 'faces'"),
    ],
)
def test_what_sample_may_not_return_is_refused(refused: Callable[..., None], gives: str, reason: str) -> None:
    refused((*WORDS, "max_steps=1", f"task.gives={gives}"), "task", reason)


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
    assert single.shape == (8, 8)
    assert (pixels(folder / "digits.png")[2:10, 22:30, 0] == single).all()
    assert "<3>" in (folder / "found.txt").read_text()
    for words, key in ((["input=test"], "input"), (["top_k=2"], "top_k"), (["pictures=true"], "pictures")):
        refused([f"ckpt_path={directory}", "samples=3", *words], key, "does not apply to", verb="predict")
    plain = train(*WORDS, PLAIN, "max_steps=1", "logger=none").directory
    reason = "Reconstruction has no sample(modules, count)"
    refused([f"ckpt_path={plain}", "samples=3"], "samples", reason, verb="predict")


def test_a_count_without_a_default_is_16_while_training(train: Callable[..., Any]) -> None:
    result = train(*WORDS, "max_steps=1", "logger=none", "task._target_=own_steps.SampledAlways")
    assert [line["count"] for line in result.metrics if line["split"] == "val"] == [16]
    assert not (result.directory / "samples").exists()


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
    result = train(*WORDS, *words, "logger=none", "max_steps=3", "ema=0.9", "+callbacks.own._target_=averages.Averages")
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
