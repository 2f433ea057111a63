"""Own code that raises, or cannot be trained: the user's file and line are shown, or what is wrong, and nothing of libraries."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.run.trial import _training

PARTS = """
import torch
from torch import nn
from torch.nn import functional as F

from runner.tasks.classification import Classification


def bug(*_, **__):
    raise RuntimeError("my bug")  # bug


class Net(nn.Module):
    def __init__(self, num_classes, kind=""):
        super().__init__()
        if kind == "constructor":
            bug()
        if kind == "value":
            raise ValueError("my bug")  # value
        self.kind = kind
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(9 if kind == "shape" else 8, num_classes)

    def forward(self, images):
        if self.training and (self.kind == "later" and len(images) > 2 or self.kind == "large" and len(images) < 4):
            bug()
        if self.kind == "name":
            return self.haed(images)  # name
        logits = self.head(self.body(images))  # shape
        if self.kind == "detached" or (self.kind == "detached while evaluating" and not self.training):
            return logits.detach()
        if self.kind == "dropping" and len(images) > 1 and self.training:
            return logits[:-1]
        if self.kind == "no derivative":
            return logits.exp().add_(1) * logits.relu_()
        if self.kind == "keeping":
            self.last = logits
        return logits


class Nothing:
    def __init__(self, *_, **__):
        pass


def mean_loss(logits, targets, **unused):
    return F.cross_entropy(logits, targets)


LOSSES = {
    "": torch.mean,
    "bug": bug,
    "one element": lambda losses: losses.mean()[None],
    "samples": lambda losses: losses,
    "squeezed": torch.squeeze,
    "detached": lambda losses: losses.mean().detach(),
    "none": lambda losses: None,
    "float": lambda losses: float(losses.mean()),
}


class Loss(nn.Module):
    def __init__(self, kind="", **unused):
        super().__init__()
        self.kind = kind

    def forward(self, logits, targets):
        return LOSSES[self.kind](F.cross_entropy(logits, targets, reduction="none"))


class Metric:
    higher_is_better = True

    def __init__(self, kind):
        self.kind = kind

    def update(self, outputs, targets):
        if self.kind == "raises":
            bug()

    def compute(self):
        return {"float": 0.1, "text": "none"}.get(self.kind, torch.tensor(0.1))


class Transform:
    def __init__(self, most=0):
        self.most = most

    def __call__(self, images, rng=None):
        return images if len(images) <= self.most else bug()


class Single:
    def __call__(self, image):
        return image


class Images:
    def __init__(self, kind="item"):
        self.kind, self.targets = kind, [index % 10 for index in range(80)]
        self.classes = [str(number) for number in range(10)]
        if kind == "data":
            bug()

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return (torch.zeros(1, 8, 8, dtype=torch.uint8), index % 10) if index <= 20 else bug()


class Callback:
    def __init__(self, at):
        setattr(self, at, bug)


class Noted:
    def on_log(self, loop, metrics):
        metrics["note"] = "good"


class Optimizer(torch.optim.SGD):
    step = bug


class Schedule:
    def __init__(self, total_steps):
        pass

    factor = factors = __call__ = bug

    def observe(self, value):
        pass

    def state_dict(self):
        return {}

    load_state_dict = observe


class Task(Classification):
    metrics = bug
"""
BASE = (
    "train", "threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu", "data=digits",
    "data.num_workers=0", "max_steps=2", "data.batch_size=32", "transform=none", "evaluate.test=false",
    "trust=[own_parts]",
)  # fmt: skip
NET = ("model=mlp", "~model.hidden", "~model.dropout", "model._target_=own_parts.Net")
OWN = ("--config-dir", "mine")
LOSS = "loss._target_=own_parts.Loss"
METRIC = "+metrics.mine={{_target_:own_parts.Metric,kind:{}}}"
IMAGES = (*OWN, "data=own_images", "data.placement=disk")
# Words, the comment where it raises (empty for a mistake in the config), the exit status, and what is said besides.
KINDS: dict[str, tuple[tuple[str, ...], str, int, str]] = {
    "constructor": ((*NET, "+model.kind=constructor"), "bug", 1, "while model was built"),
    "refused argument": ((*NET, "+model.kind=value"), "value", 2, "model: own_parts.Net refuses its arguments"),
    "layers that do not fit": ((*NET, "+model.kind=shape"), "shape", 2, "model: cannot take images of shape"),
    "attribute": ((*NET, "+model.kind=name"), "name", 1, "while model was tried: cannot take images of shape"),
    "forward in training": ((*NET, "+model.kind=later"), "bug", 1, "in epoch 1, after 0 optimizer steps"),
    "model that is none": ((*NET[:-1], "model._target_=own_parts.Nothing"), "", 2, "model._target_: own_parts.Nothing"),
    "detached outputs": ((*NET, "+model.kind=detached"), "", 2, "model: its result has no gradient"),
    "sample dropped": (
        (*NET, "+model.kind=dropping"), "", 2, "model: gives (1, 10) in training for a batch of 2",
    ),
    "no derivative": (
        (*NET, "+model.kind=no derivative"), "", 2,
        "model: its gradients cannot be computed, in a trial with 2 samples: ",
    ),
    "loss": ((LOSS, "+loss.kind=bug"), "bug", 2, "loss: in a trial with 1 sample: my bug"),
    "detached loss": ((LOSS, "+loss.kind=detached"), "", 2, "loss: its result has no gradient"),
    "loss of each sample": ((LOSS, "+loss.kind=samples"), "", 2, "loss: gives a tensor of shape (1,) as the loss"),
    "loss of each sample, squeezed": (
        (LOSS, "+loss.kind=squeezed"), "", 2, "loss: gives a tensor of shape (2,) as the loss",
    ),
    "loss with one element": (
        (LOSS, "+loss.kind=one element"), "", 2, "loss: gives a tensor of shape (1,) as the loss",
    ),
    "loss as a function": (("loss._target_=own_parts.mean_loss", "+loss._partial_=true"), "", 2, "loss: is a partial"),
    "no loss": ((LOSS, "+loss.kind=none"), "", 2, "loss: gives a NoneType as the loss"),
    "loss as a float": ((LOSS, "+loss.kind=float"), "", 2, "loss: gives a float as the loss"),
    "metric": ((METRIC.format("raises"), "checkpoint.monitor=val/mine"), "bug", 1, ""),
    "metric that gives a text": (
        (METRIC.format("text"), "checkpoint.monitor=val/mine"), "", 2, "metrics.mine: compute() gives a str",
    ),
    "transform of one image": (("transform.train=[{_target_:own_parts.Single}]",), "", 2, "transform.sample_train"),
    "transform of batches": (("transform.train=[{_target_:own_parts.Transform,most:2}]",), "bug", 1, "in epoch 1"),
    "transform of samples": (("transform.sample_train=[{_target_:own_parts.Transform}]",), "bug", 2, "of 'train'"),
    "data set": ((*IMAGES, "data.dataset.kind=data"), "bug", 1, "while data.dataset was built"),
    "sample": (IMAGES, "bug", 2, "data.dataset: sample "),
    "sample in a worker": ((*IMAGES, "data.num_workers=1"), "bug", 2, "data.dataset: sample "),
    "callback": (("+callbacks.mine={_target_:own_parts.Callback,at:on_step}",), "bug", 1, "after 1 optimizer steps"),
    "callback that logs a text": (
        ("+callbacks.mine._target_=own_parts.Noted",), "", 2, "Noted, on_log: metric 'note' is a str",
    ),
    "logger that is none": (("+logger.mine={_target_:own_parts.Nothing}",), "", 2, "Nothing without open, log"),
    "optimizer": ((*OWN, "optimizer=own"), "bug", 1, "in epoch 1"),
    "optimizer that is none": (
        (*OWN, "optimizer=own", "optimizer._target_=own_parts.Nothing"), "", 2, "optimizer._target_: own_parts.Nothing",
    ),
    "schedule": ((*OWN, "scheduler=own"), "bug", 1, "RuntimeError: my bug"),
    "task": (("task._target_=own_parts.Task",), "bug", 1, "in epoch 1"),
}  # fmt: skip


@pytest.fixture
def start(workdir: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> Callable[..., Any]:
    (workdir / "own_parts.py").write_text(PARTS)
    for file, text in {
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
        assert result.summary["status"] == "failed"
        assert "my bug" in result.summary["error"] or name == "attribute"


def test_the_whole_traceback_is_shown_when_it_is_asked_for(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = start(*NET, "+model.kind=later")
    assert result.status == 1
    assert "Traceback" in result.err
    assert "site-packages" in result.err


def test_a_metric_may_give_a_plain_number(start: Any) -> None:
    result = start(METRIC.format("float"), "checkpoint.monitor=val/mine")
    assert result.status == 0, result.err
    assert result.summary["last"]["mine"] == 0.1


@pytest.mark.parametrize(
    "words",
    [(), ("+model.kind=detached while evaluating",), ("+model.kind=large",), ("+model.kind=keeping", "ema=0.9")],
)
def test_what_can_be_trained_is_not_refused(words: tuple[str, ...], start: Any) -> None:
    result = start(*NET, LOSS, "data.batch_size=8", *words)
    assert result.status == 0, result.err


def test_shapes_up_to_the_module_that_fails_are_shown(start: Any) -> None:
    result = start(*NET, "+model.kind=shape", "debug=shapes")
    table = result.err[result.err.index("shapes up to the module that fails") :].splitlines()
    rows = {line.split()[0]: line.split("  ")[-1].strip() for line in table[3:]}
    assert rows["body.1"] == "float32 (1, 8)"
    assert rows["head"] == "fails"


def test_an_output_that_the_model_keeps_is_gone_after_the_check() -> None:
    model = nn.Linear(4, 3)
    with _training(model, nn.Identity()):
        model.last = model(torch.randn(2, 4))
    assert not hasattr(model, "last")
