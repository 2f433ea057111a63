"""Learning from a trained model, through the program."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from runner.tasks.distillation import Distillation

TEACHER = ("model=mlp", "model.hidden=[32]", "epochs=3", "transform=none")
STUDENT = (
    "task=distillation", "model@task.teacher=mlp", "task.teacher.hidden=[32]", "model=mlp", "model.hidden=[8]",
    "transform=none", "log.every_steps=1",
)  # fmt: skip


@pytest.fixture
def teacher(train_once: Callable[..., Any]) -> Path:
    directory: Path = train_once(*TEACHER).directory
    return directory


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "checkpoints" / "last.safetensors")


def test_a_student_learns_from_a_teacher_that_stays_as_it_is(
    train: Callable[..., Any], accepted: Any, printed: Any, killed: Callable[..., Path], teacher: Path
) -> None:
    words = (*STUDENT, f"init_from={{teacher: {teacher}}}", "epochs=2")
    whole = train(*words)
    steps = whole.logged("train")
    assert all(each["loss"] == pytest.approx(0.9 * each["outputs"] + 0.1 * each["classes"]) for each in steps)
    assert steps[-1]["outputs"] < 0.8 * steps[0]["outputs"], "nothing was learned"
    best = load_file(teacher / "checkpoints" / "best.safetensors")
    ends = saved(whole.directory)
    assert all(ends[f"teacher.{name}"].equal(best[name]) for name in best if name.startswith("layers"))
    assert whole.summary["init_from"]["teacher"]["tensors"] == 4
    # A checkpoint is enough for all that follows
    directory = killed(20, "threads=1", "logger=none", "checkpoint.every_steps=10", *words)
    shutil.rmtree(teacher)
    assert printed("eval", f"ckpt_path={whole.directory}", "split=test")["metrics"] == whole.summary["test"]
    accepted("predict", f"ckpt_path={whole.directory}", "input=test", "output=rows.csv")
    resumed = train(f"ckpt_path={directory}", "callbacks=none")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_layers_of_other_widths_and_sizes_are_compared(train: Callable[..., Any], workdir: Path) -> None:
    cnn = ("model=small_cnn", "transform=none", "epochs=1")
    teacher = train(*cnn, "model.width=8").directory
    layers = [name[:-7] for name, each in saved(teacher).items() if name.endswith("weight") and each.ndim == 4]
    words = (
        *cnn, "model.width=4", "task=distillation", "model@task.teacher=small_cnn", "task.teacher.width=8",
        f"init_from={{teacher: {teacher}}}", "log.every_steps=1", "task.features_weight=10",
    )  # fmt: skip
    result = train(*words, f"task.features={{{layers[0]}: {layers[-1]}}}", "max_steps=8")
    steps = result.logged("train")
    parts = [0.9 * each["outputs"] + 0.1 * each["classes"] + 10 * each["features"] for each in steps]
    assert [each["loss"] for each in steps] == pytest.approx(parts, rel=1e-4)


def test_the_loss_is_that_of_the_paper() -> None:
    teacher, student = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    task = Distillation(3, teacher, temperature=2.0, weight=0.7)
    modules = {"model": student, "loss": torch.nn.CrossEntropyLoss(), **task.modules(student, torch.nn.Identity())}
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    soft = (teacher(inputs) / 2).softmax(1)
    divergence = (soft * (soft.log() - (student(inputs) / 2).log_softmax(1))).sum(1).mean()
    expected = 0.7 * 4 * divergence + 0.3 * F.cross_entropy(student(inputs), targets)
    torch.testing.assert_close(task.training_step(modules, (inputs, targets))["loss"], expected)


def test_a_custom_task_of_the_same_name_needs_no_teacher(
    train: Callable[..., Any], own_module: Callable[..., Path]
) -> None:
    text = "from runner.tasks.classification import Classification\n\n\nclass Distillation(Classification):\n    pass\n"
    own_module("own_distillation", text)
    assert train("task._target_=own_distillation.Distillation", "max_steps=1").summary["status"] == "finished"


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ((), "init_from", "no weights for task.teacher"),
        (("init_from={teacher: TEACHER}", "task.teacher.hidden=[16]"), "init_from", "not those of this teacher"),
        (("init_from={teacher: TEACHER}", "data.dataset.classes=[1,2,3]"), "init_from", "of other classes"),
        (("init_from={master: TEACHER, teacher: TEACHER}",), "init_from", "'master'"),
        (("init_from={teacher: TEACHER}", "task.weight=2"), "task.temperature", "weight from 0 to 1"),
        (("init_from={teacher: TEACHER}", "task.features={neck: head}"), "task", "no layer 'neck'"),
        (("init_from={teacher: TEACHER}", "task.teacher.width=3"), "task.teacher.width", "not an argument"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    refused: Callable[..., None], teacher: Path, words: tuple[str, ...], key: str, reason: str
) -> None:
    refused([*STUDENT, *(word.replace("TEACHER", str(teacher)) for word in words)], key, reason)
