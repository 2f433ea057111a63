"""What is shown of an error in a user's own code: the user's file and line, and nothing of libraries."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PARTS = """
import torch
from torch import nn
from torch.nn import functional as F

from runner.tasks.classification import Classification


class Net(nn.Module):
    def __init__(self, num_classes, kind=""):
        super().__init__()
        if kind == "constructor":
            raise RuntimeError("my bug")  # constructor
        if kind == "value":
            raise ValueError("my bug")  # value
        self.kind = kind
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.head = nn.Linear(9 if kind == "shape" else 8, num_classes)

    def forward(self, images):
        if self.kind == "later" and self.training and len(images) > 2:
            raise RuntimeError("my bug")  # later
        if self.kind == "name":
            return self.haed(images)  # name
        hidden = self.body(images)
        return self.head(hidden)  # shape


class NoNet:
    def __init__(self, num_classes):
        pass


class Loss(nn.Module):
    def forward(self, logits, targets):
        raise RuntimeError("my bug")  # loss


class Metric:
    higher_is_better = True

    def __init__(self, kind):
        self.kind = kind

    def update(self, outputs, targets):
        if self.kind == "raises":
            raise RuntimeError("my bug")  # metric

    def compute(self):
        return {"float": 0.1, "text": "none"}.get(self.kind, torch.tensor(0.1))


class Single:
    def __call__(self, image):
        return image


class Batches:
    def __call__(self, images, rng):
        if len(images) > 2:
            raise RuntimeError("my bug")  # batches
        return images


class Sample:
    def __call__(self, image):
        raise RuntimeError("my bug")  # sample


class Images:
    def __init__(self, kind="item"):
        self.kind, self.targets = kind, [index % 10 for index in range(80)]
        self.classes = [str(number) for number in range(10)]
        if kind == "data":
            raise KeyError("my bug")  # data

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index > 20:
            raise RuntimeError("my bug")  # item
        return torch.zeros(1, 8, 8, dtype=torch.uint8), index % 10


class Callback:
    def __init__(self, at):
        setattr(self, at, self.fail)

    def fail(self, *_):
        raise RuntimeError("my bug")  # callback


class NoLogger:
    pass


class Optimizer(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)

    def step(self, closure=None):
        raise RuntimeError("my bug")  # optimizer


class NoOptimizer:
    def __init__(self, params, lr=0.1):
        pass


class Schedule:
    def __init__(self, total_steps):
        pass

    def factor(self, step):
        raise RuntimeError("my bug")  # schedule

    factors = __call__ = factor

    def observe(self, value):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Task(Classification):
    def metrics(self, device):
        raise RuntimeError("my bug")  # task
"""
BASE = (
    "train", "threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu", "data=digits",
    "data.num_workers=0", "max_steps=2", "data.batch_size=32", "transform=none", "evaluate.test=false",
    "trust=[own_parts]",
)  # fmt: skip
NET = ("model=mlp", "~model.hidden", "~model.dropout", "model._target_=own_parts.Net")
OWN = ("--config-dir", "mine")
IMAGES = (*OWN, "data=own_images", "data.placement=disk")
# Words, the comment where it raises (empty for a mistake in the config), the exit status, and what is said besides.
KINDS: dict[str, tuple[tuple[str, ...], str, int, str]] = {
    "constructor": ((*NET, "+model.kind=constructor"), "constructor", 1, "while model was built"),
    "refused argument": ((*NET, "+model.kind=value"), "value", 2, "model: own_parts.Net refuses its arguments"),
    "layers that do not fit": ((*NET, "+model.kind=shape"), "shape", 2, "model: cannot take images of shape"),
    "attribute": ((*NET, "+model.kind=name"), "name", 1, "while model was tried on one sample"),
    "forward in training": ((*NET, "+model.kind=later"), "later", 1, "in epoch 1, after 0 optimizer steps"),
    "model that is none": ((*NET[:-1], "model._target_=own_parts.NoNet"), "", 2, "model._target_: own_parts.NoNet"),
    "loss": ((*OWN, "loss=own"), "loss", 2, "loss: my bug"),
    "metric": (("+metrics.mine={_target_:own_parts.Metric,kind:raises}", "checkpoint.monitor=val/mine"), "metric", 1, ""),
    "metric that gives a text": (
        ("+metrics.mine={_target_:own_parts.Metric,kind:text}", "checkpoint.monitor=val/mine"), "", 2,
        "metrics.mine: compute() gives a str",
    ),
    "transform of one image": (("transform.train=[{_target_:own_parts.Single}]",), "", 2, "transform.sample_train"),
    "transform of batches": (("transform.train=[{_target_:own_parts.Batches}]",), "batches", 1, "in epoch 1"),
    "transform of samples": (("transform.sample_train=[{_target_:own_parts.Sample}]",), "sample", 2, "of 'train'"),
    "data set": ((*IMAGES, "data.dataset.kind=data"), "data", 1, "while data.dataset was built"),
    "sample": (IMAGES, "item", 2, "data.dataset: sample "),
    "sample in a worker": ((*IMAGES, "data.num_workers=1"), "item", 2, "data.dataset: sample "),
    "callback": (("+callbacks.mine={_target_:own_parts.Callback,at:on_step}",), "callback", 1, "after 1 optimizer steps"),
    "logger that is none": (("+logger.mine={_target_:own_parts.NoLogger}",), "", 2, "NoLogger without open, log"),
    "optimizer": ((*OWN, "optimizer=own"), "optimizer", 1, "in epoch 1"),
    "optimizer that is none": (
        (*OWN, "optimizer=own", "optimizer._target_=own_parts.NoOptimizer"), "", 2, "optimizer._target_: own_parts.NoOpt",
    ),
    "schedule": ((*OWN, "scheduler=own"), "schedule", 1, "RuntimeError: my bug"),
    "task": (("task._target_=own_parts.Task",), "task", 1, "in epoch 1"),
}  # fmt: skip


@pytest.fixture
def start(workdir: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> Callable[..., Any]:
    (workdir / "own_parts.py").write_text(PARTS)
    for file, text in {
        "loss/own": "_target_: own_parts.Loss\n",
        "optimizer/own": "_target_: own_parts.Optimizer\nlr: 0.1\n",
        "scheduler/own": "_target_: own_parts.Schedule\ntotal_steps: null\n",
        "data/own_images": "defaults:\n  - _base\n  - _self_\nname: own\ndataset:\n  _target_: own_parts.Images\n  kind: item\n",
    }.items():
        path = workdir / "mine" / f"{file}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    return lambda *words: run(*BASE, *words)


def line_of(comment: str) -> int:
    [number] = [at for at, line in enumerate(PARTS.splitlines(), 1) if line.endswith(f"# {comment}")]
    return number


@pytest.mark.parametrize("name", KINDS)
def test_an_error_in_own_code_names_the_file_and_line_and_shows_no_library(
    name: str, start: Any, workdir: Path
) -> None:
    words, comment, status, said = KINDS[name]
    result = start(*words)
    head = "\n".join(result.err.splitlines()[:10])
    assert result.status == status, result.err
    assert said in head
    assert result.err.count("error: ") == 1
    if comment:
        frame = f'own_parts.py", line {line_of(comment)}, in '
        assert frame in head or f"(own_parts.py:{line_of(comment)})" in head, result.err
    else:
        assert "    allowed: " in head
    assert not re.search(r"site-packages|src/runner|Traceback", result.err), result.err
    if status == 1:
        assert "Traceback" in (result.directory / "run.log").read_text(), "the log has everything"


def test_the_whole_traceback_is_shown_when_it_is_asked_for(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = start(*NET, "+model.kind=later")
    assert result.status == 1
    assert "Traceback" in result.err
    assert "site-packages" in result.err


def test_a_metric_may_give_a_plain_number(start: Any) -> None:
    result = start("+metrics.mine={_target_:own_parts.Metric,kind:float}", "checkpoint.monitor=val/mine")
    assert result.status == 0, result.err
    assert result.summary["last"]["mine"] == 0.1


def test_shapes_up_to_the_module_that_fails_are_shown(start: Any) -> None:
    result = start(*NET, "+model.kind=shape", "debug=shapes")
    table = result.err[result.err.index("shapes up to the module that fails") :].splitlines()
    rows = {line.split()[0]: line.split("  ")[-1].strip() for line in table[3:]}
    assert rows["body.1"] == "float32 (1, 8)"
    assert rows["head"] == "fails"
