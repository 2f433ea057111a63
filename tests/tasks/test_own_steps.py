"""Samples that are not pairs of image and target, and tasks that compute their own steps, through the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from safetensors.torch import load_file

from runner.checkpoint.file import read, write

MODULE = '''
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


class Digits(torch.utils.data.Dataset):
    """Digits as vectors (64,), without targets."""

    def __init__(self, samples=96):
        self.vectors = torch.from_numpy(load_digits().data[:samples] / 16).float()

    def __len__(self):
        return len(self.vectors)

    def __getitem__(self, index):
        return self.vectors[index]


class Scenes(Digits):
    """Images of bytes (1, 8, 8) with some boxes each."""

    def __getitem__(self, index):
        image = (self.vectors[index] * 255).to(torch.uint8).view(1, 8, 8)
        return {"image": image, "boxes": torch.full((1 + index % 3, 4), float(index)), "name": f"scene {index}"}


def scenes(samples):
    return {"image": torch.stack([each["image"] for each in samples]), "boxes": [each["boxes"] for each in samples],
            "name": [each["name"] for each in samples]}


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 2 * latent), nn.Linear(latent, 64)

    def forward(self, vectors):
        mean, log_variance = self.encoder(vectors).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(drawn), mean, log_variance


class Noisy:
    def training_step(self, modules, vectors):
        return modules["model"](vectors)[0].square().mean()

    def evaluation_step(self, modules, vectors):
        return {"loss": (vectors + torch.randn_like(vectors)).abs().mean()}


class Reconstruction:
    def training_step(self, modules, batch):
        logits, mean, log_variance = modules["model"](batch)
        error = F.binary_cross_entropy_with_logits(logits, batch, reduction="none").sum(1).mean()
        divergence = (-0.5 * (1 + log_variance - mean.square() - log_variance.exp())).sum(1).mean()
        return {"loss": error + divergence, "divergence": divergence}

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)["loss"]}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))

    def forward(self, images):
        return self.features(images)


class CountBoxes:
    """How many boxes there are: a head of its own on the features of the model."""

    monitor, mode = "val/wrong", "min"
    collate = staticmethod(scenes)

    def modules(self, model, loss):
        return {"model": model, "head": nn.Linear(8, 3)}

    def evaluation_step(self, modules, batch):
        assert 0 <= batch["image"].min() and batch["image"].max() <= 1 and batch["image"].is_floating_point()
        assert all(name.startswith("scene") for name in batch["name"]) and len(batch["boxes"]) == len(batch["image"])
        targets = torch.tensor([len(boxes) - 1 for boxes in batch["boxes"]])
        logits = modules["head"](modules["model"](batch["image"]))
        return {"loss": modules["loss"](logits, targets), "outputs": logits, "targets": targets}

    def training_step(self, modules, batch):
        return self.evaluation_step(modules, batch)["loss"]

    def outputs(self, classes):
        return 3

    def metric_names(self):
        return ["wrong"]

    def metrics(self, device):
        return {"wrong": Wrong()}


class Wrong:
    def __init__(self):
        self.wrong = 0

    def update(self, outputs, targets):
        self.wrong += int((outputs.argmax(1) != targets).sum())

    def compute(self):
        return torch.tensor(float(self.wrong))


class MomentumHead(CountBoxes):
    """A second head follows the first one, which also learns from it."""

    def modules(self, model, loss):
        head = nn.Linear(8, 3)
        return {"model": model, "head": head, "slow": copy.deepcopy(head).requires_grad_(False)}

    def training_step(self, modules, batch):
        features = modules["model"](batch["image"])
        apart = (modules["head"](features) - modules["slow"](features)).square().mean()
        return super().training_step(modules, batch) + apart

    def after_step(self, modules):
        for slow, fast in zip(modules["slow"].parameters(), modules["head"].parameters()):
            slow.lerp_(fast, 0.1)


class MeanOverBoxes(CountBoxes):
    """The mean over all boxes, of which samples have different numbers."""

    def weight(self, batch):
        return sum(len(boxes) for boxes in batch["boxes"])

    def evaluation_step(self, modules, batch):
        counts = torch.tensor([len(boxes) for boxes in batch["boxes"]])
        losses = modules["head"](modules["model"](batch["image"])).square().sum(1)
        return {"loss": (losses * counts).sum() / counts.sum(), "targets": counts - 1, "outputs": losses[:, None]}


class Contrast:
    """Pulls two noisy views of an image together, with a projection that is trained and not used afterwards."""

    def outputs(self, classes):
        return 10

    def modules(self, model, loss):
        return {"projection": nn.Linear(10, 4)}

    def training_step(self, modules, batch):
        images, _ = batch
        one, other = (
            F.normalize(modules["projection"](modules["model"](images + 0.1 * torch.randn_like(images)))) for _ in range(2)
        )
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(images)))

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}


class Vectors(CountBoxes):
    def training_step(self, modules, batch):
        return modules["head"](modules["model"](batch["image"])).sum(1)


class Detached(CountBoxes):
    def training_step(self, modules, batch):
        return super().training_step(modules, batch).detach()


class Pairs(Digits):
    def __getitem__(self, index):
        return self.vectors[index], index % 3


class TermOfShape(CountBoxes):
    def training_step(self, modules, batch):
        return {"loss": super().training_step(modules, batch), "term": torch.zeros(2)}


class NoLoss(CountBoxes):
    monitor = "val/loss"

    def evaluation_step(self, modules, batch):
        return {"outputs": modules["head"](modules["model"](batch["image"])), "targets": torch.zeros(len(batch["image"]))}

    def training_step(self, modules, batch):
        return super().evaluation_step(modules, batch)["loss"]


class OtherModel(CountBoxes):
    def modules(self, model, loss):
        return {"model": nn.Sequential(model)}


class Slip:
    def trainig_step(self, modules, batch):
        return batch.sum()
'''
COMMON = (
    "transform=none",
    "~model.dropout",
    "~model.width",
    "epochs=2",
    "data.batch_size=16",
    "data.num_workers=0",
    "scheduler=constant",
)
COLLATE = "data.collate._target_=own_steps.scenes"
VECTORS = (
    *COMMON, "data=own", "data.images=[]", "data.dataset._target_=own_steps.Digits", "model._target_=own_steps.VAE",
    "task._target_=own_steps.Reconstruction", "loss=none", "log.every_steps=1",
)  # fmt: skip
BOXES = (
    *COMMON, "data.images=[image]", "data.normalize.mean=[0.0]", "data.normalize.std=[1.0]",
    "data.dataset._target_=own_steps.Scenes", "model._target_=own_steps.Pooled",
    "task._target_=own_steps.CountBoxes",
)  # fmt: skip
PAIRS = (
    "transform=none", "epochs=1", "data=own", "data.images=[]", "data.dataset._target_=own_steps.Pairs", "task.num_classes=3",
    "model=mlp", "model.hidden=[8]", "model.in_channels=1", "model.image_size=[8,8]",
)  # fmt: skip


@pytest.fixture(autouse=True)
def module(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "own_steps.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(workdir)
    monkeypatch.setenv("RUNNER_TRUST", "own_steps")


def test_a_task_with_a_step_of_its_own_trains_logs_its_terms_and_is_tested(train: Callable[..., Any]) -> None:
    result = train(*VECTORS, "epochs=10", "optimizer.lr=0.01")
    steps = [record for record in result.metrics if record["split"] == "train"]
    assert all(0 <= record["divergence"] < record["loss"] for record in steps)
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"], "nothing was learned"
    assert result.summary["best"]["metric"] == "val/loss"
    assert set(result.summary["test"]) == {"loss"}


@pytest.mark.parametrize("words", some([VECTORS, BOXES], 1), ids=["vectors", "boxes"])
def test_workers_and_resumes_give_the_same_weights(train: Callable[..., Any], words: tuple[str, ...]) -> None:
    whole = train(*words)
    expected = whole.summary["weights_sha256"]
    assert train(*words, "data.num_workers=2").summary["weights_sha256"] == expected
    part = train(*words, "max_steps=3", "name=part")
    resumed = train(f"ckpt_path={part.directory}", "max_steps=null")
    assert resumed.summary["weights_sha256"] == expected
    assert resumed.summary["test"] == whole.summary["test"]


def test_modules_that_a_task_adds_are_trained_averaged_and_saved(
    train: Callable[..., Any], run: Callable[..., Any]
) -> None:
    result = train(*BOXES, "ema=0.9", "epochs=1")
    saved = load_file(next((result.directory / "checkpoints").glob("step_*.safetensors")))
    assert {"model.features.1.weight", "head.weight"} <= saved.keys()
    assert not saved["head.weight"].equal(saved["averaged/weights/head.weight"])
    evaluated = run("eval", f"ckpt_path={result.directory}", "split=test", "json=true")
    assert evaluated.status == 0, evaluated.err
    assert json.loads(evaluated.out)["metrics"] == result.summary["test"]


def test_a_task_goes_on_from_the_weights_after_each_step(train: Callable[..., Any]) -> None:
    words = (*BOXES, "task._target_=own_steps.MomentumHead", "max_steps=1", "dtype=float64")
    start, after = (
        load_file(train(*words, rate).directory / "checkpoints" / "last.safetensors")
        for rate in ("optimizer.lr=0", "optimizer.lr=0.1")
    )
    expected = start["slow.weight"].lerp(after["head.weight"], 0.1)
    torch.testing.assert_close(after["slow.weight"], expected, rtol=0, atol=1e-12)
    assert not torch.equal(start["slow.weight"], after["slow.weight"])


@pytest.mark.parametrize("task", some(["CountBoxes", "MeanOverBoxes", "MomentumHead"], 1))
def test_ranks_and_accumulation_train_the_weights_of_one_large_batch_to_rounding(
    train: Callable[..., Any], task: str
) -> None:
    words = (*BOXES, "epochs=1", "dtype=float64", f"task._target_=own_steps.{task}", "max_steps=4")
    divided = (
        ("devices=2", "data.batch_size=15"),
        ("accumulate=3", "data.batch_size=5"),
        ("devices=2", "accumulate=3", "data.batch_size=5"),
    )
    one, *others = (train(*words, *each) for each in (("data.batch_size=15",), *divided))
    weights = load_file(one.directory / "checkpoints" / "last.safetensors")
    for other in others:
        found = load_file(other.directory / "checkpoints" / "last.safetensors")
        for name in weights.keys() & {"model.features.1.weight", "head.weight", "slow.weight"}:
            torch.testing.assert_close(found[name], weights[name], rtol=0, atol=1e-10)
        assert other.summary["test"]["loss"] == pytest.approx(one.summary["test"]["loss"], abs=1e-10)


def test_an_evaluation_draws_the_same_random_numbers_each_time(
    train: Callable[..., Any], run: Callable[..., Any]
) -> None:
    words = (*VECTORS, "task._target_=own_steps.Noisy", "evaluate.batch_size=4")
    whole, ranks = train(*words), train(*words, "devices=2")
    first, second = (record["loss"] for record in whole.metrics if record["split"] == "val")
    assert first == second
    assert ranks.summary["test"] == whole.summary["test"]
    assert run("eval", f"ckpt_path={whole.directory}", "split=test").status == 0
    found = json.loads((whole.directory / "eval_test.json").read_text())
    assert found["metrics"]["loss"] == whole.summary["test"]["loss"]


def test_a_checkpoint_with_damaged_terms_is_a_sentence(train: Callable[..., Any], run: Callable[..., Any]) -> None:
    path = train(*VECTORS, "epochs=1", "log.every_steps=3").directory / "checkpoints" / "last.safetensors"
    contents = read(path)
    contents["metrics"]["terms"] = {"divergence": {"sum": torch.zeros(2), "samples": 3}}
    write(path, contents)
    result = run("train", f"ckpt_path={path}", "epochs=2")
    assert result.status == 2, result.err
    assert "metrics.terms is not running means by name" in result.err


@pytest.mark.extended
def test_a_model_that_was_trained_with_a_projection_is_used_without_it(
    train: Callable[..., Any], run: Callable[..., Any]
) -> None:
    model = ("model=mlp", "model.hidden=[16]", "transform=none")
    words = (*model, "task._target_=own_steps.Contrast", "loss=none")
    trained = train(*words, "epochs=3")
    assert trained.summary["last"]["loss"] < 4
    predicted = run("predict", f"ckpt_path={trained.directory}", "input=test", "output=rows.csv")
    assert predicted.status == 0, predicted.err
    averaged = run("eval", f"ckpt_path={trained.directory}", "tta=hflip")
    assert averaged.status == 2
    assert "tta: averages" in averaged.err
    probed = train(*model, "epochs=1", f"init_from={trained.directory}")
    assert probed.summary["init_from"]["tensors"] == 4
    result = run("train", "logger=none", *words, "compile=step")
    assert result.status == 2
    assert "compile: is step" in result.err


def test_the_default_steps_take_inputs_of_any_kind(train: Callable[..., Any]) -> None:
    assert set(train(*PAIRS).summary["test"]) == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ((*VECTORS, "transform=standard"), "transform.train", "(image, target)"),
        ((*VECTORS, "data.images=null", COLLATE, "data.collate._partial_=true"), "data.collate", "(image, target)"),
        ((*VECTORS, "data.sampler=balanced"), "data.sampler", "(image, target)"),
        ((*BOXES, "data.images=[picture]"), "data.images", "'picture'"),
        ((*BOXES, "data.images=[name]"), "data.images", "'name'"),
        ((*PAIRS, "data.images=['-1']"), "data.images", "'-1'"),
        ((*VECTORS, COLLATE, "data.collate._partial_=true"), "data.collate", "cannot make a batch"),
        ((*BOXES, "task._target_=own_steps.Vectors"), "task", "(2,)"),
        ((*BOXES, "task._target_=own_steps.Detached"), "task", "no gradient"),
        ((*BOXES, "task._target_=own_steps.TermOfShape"), "task", "'term' of shape (2,)"),
        ((*BOXES, "task._target_=own_steps.NoLoss"), "task", "gives no loss"),
        ((*BOXES, "task._target_=own_steps.OtherModel"), "task", "another model"),
        ((*VECTORS, "data.images=[image]"), "data.images", "one tensor"),
        ((*VECTORS, "task._target_=own_steps.Slip"), "task._target_", "trainig_step"),
        ((*PAIRS, "loss=none"), "task", "training_step"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    run: Callable[..., Any], words: tuple[str, ...], key: str, reason: str
) -> None:
    result = run("train", "threads=1", "logger=none", *words)
    assert result.status == 2, result.err + result.out
    assert f"{key}:" in result.err
    assert reason in result.err


def test_verbs_that_take_images_alone_say_so(train: Callable[..., Any], run: Callable[..., Any]) -> None:
    directory = train(*VECTORS, "epochs=1").directory
    for verb in ("predict input=test", "export"):
        result = run(*verb.split(), f"ckpt_path={directory}")
        assert result.status == 2, verb + result.err
        assert "data.images" in result.err or "predict_step" in result.err
