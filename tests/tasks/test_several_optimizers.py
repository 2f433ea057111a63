"""Tasks with several optimizers, and optimizers that compute the loss themselves, through the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from safetensors.torch import load_file
from torch.nn import functional as F

MODULE = '''
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


class Digits(torch.utils.data.Dataset):
    """Digits as vectors (64,), without targets."""

    def __init__(self, samples=96, bad=-1):
        self.vectors = torch.from_numpy(load_digits().data[:samples] / 8 - 1)
        if bad >= 0:
            self.vectors[bad] = float("nan")

    def __len__(self):
        return len(self.vectors)

    def __getitem__(self, index):
        return self.vectors[index].float()


class Networks:
    """A generator, which gets noise that depends on the sample, and a discriminator."""

    def modules(self, model, loss):
        torch.manual_seed(1)
        return {"discriminator": nn.Linear(64, 1)}

    def optimizers(self, modules):
        return {"generator": modules["model"], "discriminator": [modules["discriminator"]]}

    def optimizer_steps(self, modules, vectors):
        fakes = modules["model"](vectors.flip(1)[:, :8])
        real, fake = modules["discriminator"](vectors), modules["discriminator"](fakes.detach())
        yield "discriminator", {"loss": F.softplus(-real).mean() + F.softplus(fake).mean(), "real": real.mean()}
        yield "generator", F.softplus(-modules["discriminator"](fakes)).mean()

    def evaluation_step(self, modules, vectors):
        return {"loss": F.softplus(-modules["discriminator"](vectors)).mean()}


class WithoutMonitor(Networks):
    monitor = None


class Unevaluated:
    modules, optimizers, optimizer_steps = Networks.modules, Networks.optimizers, Networks.optimizer_steps


class Twice(Networks):
    def optimizer_steps(self, modules, vectors):
        for _ in range(2):
            yield from super().optimizer_steps(modules, vectors)


class Listed(Networks):
    def optimizers(self, modules):
        return [modules["model"]]


class Shared(Networks):
    def optimizers(self, modules):
        return {"generator": [modules["model"], modules["discriminator"].bias], "discriminator": modules["discriminator"]}


class OtherName(Networks):
    def optimizers(self, modules):
        return {"generator": modules["model"], "critic": modules["discriminator"]}


class Uneven(Networks):
    def optimizer_steps(self, modules, vectors):
        for _ in range(1 + (len(vectors) < 8)):
            yield from super().optimizer_steps(modules, vectors)


class NoName(Networks):
    def optimizer_steps(self, modules, vectors):
        yield modules["model"](vectors[:, :8]).mean()


class UnknownName(Networks):
    def optimizer_steps(self, modules, vectors):
        yield "critic", modules["model"](vectors[:, :8]).mean()


class Reconstruction:
    def training_step(self, modules, vectors):
        return (modules["model"](vectors[:, :8]) - vectors).square().mean()

    def evaluation_step(self, modules, vectors):
        return {"loss": self.training_step(modules, vectors)}
'''
COMMON = (
    "--config-dir=conf", "transform=none", "~model.dropout", "~model.width", "epochs=2", "data.num_workers=0",
    "data.batch_size=15", "data.images=[]", "data.dataset._target_=networks.Digits", "loss=none", "log.every_steps=1",
    "model._target_=torch.nn.Linear", "+model.in_features=8", "+model.out_features=64", "logger=[]",
)  # fmt: skip
SEVERAL = (*COMMON, "optimizer=two", "task._target_=networks.Networks", "scheduler=constant")
LBFGS = (
    *COMMON, "optimizer=lbfgs", "optimizer.max_iter=3", "task._target_=networks.Reconstruction", "scheduler=constant"
)  # fmt: skip
OPTION = """
# Adam for each of two networks.
# python -m runner train optimizer=two
defaults:
  - adam@generator
  - sgd@discriminator
  - _self_
generator:
  lr: 0.01
  weight_decay: 0.1
  no_decay: auto
discriminator:
  lr: 0.05
"""
SCHEDULES = {
    "two": "  - step@generator\n  - constant@discriminator\n  - _self_\ngenerator: {every: 1, gamma: 0.5}\n",
    "critic": "  - step@generator\n  - constant@critic\n",
}
EXACT = ("dtype=float64", "data.shuffle=false", "max_steps=4", "epochs=1", "data.split.val=0", "data.split.test=0")


@pytest.fixture(autouse=True)
def module(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "networks.py").write_text(MODULE, encoding="utf-8")
    (workdir / "conf" / "optimizer").mkdir(parents=True)
    (workdir / "conf" / "scheduler").mkdir()
    (workdir / "conf" / "optimizer" / "two.yaml").write_text(OPTION, encoding="utf-8")
    mixed = "# Two.\n# train\ndefaults:\n  - lbfgs@generator\n  - sgd@discriminator\n"
    (workdir / "conf" / "optimizer" / "mixed.yaml").write_text(mixed, encoding="utf-8")
    for name, text in SCHEDULES.items():
        (workdir / "conf" / "scheduler" / f"{name}.yaml").write_text(
            f"# Two.\n# train\ndefaults:\n{text}", encoding="utf-8"
        )
    monkeypatch.syspath_prepend(workdir)
    monkeypatch.setenv("RUNNER_TRUST", "networks")


def weights_of(result: Any) -> dict[str, torch.Tensor]:
    saved = load_file(result.directory / "checkpoints" / "last.safetensors")
    return {name: value for name, value in saved.items() if name.endswith(("weight", "bias")) and "/" not in name}


def test_a_gan_trains_as_a_loop_by_hand_does(train: Callable[..., Any]) -> None:
    found = weights_of(train(*SEVERAL, *EXACT, "grad_clip.norm=0.5"))
    start = weights_of(
        train(*SEVERAL, *EXACT, "max_steps=1", "optimizer.generator.lr=0", "optimizer.discriminator.lr=0")
    )
    generator, discriminator = torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)
    for name, network in (("model", generator), ("discriminator", discriminator)):
        network.double().load_state_dict({key: start[f"{name}.{key}"] for key in ("weight", "bias")})
    groups = [{"params": [generator.weight], "weight_decay": 0.1}, {"params": [generator.bias], "weight_decay": 0.0}]
    adam = torch.optim.Adam(groups, lr=0.01)
    sgd = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.0005)
    from networks import Digits

    vectors = torch.stack([Digits()[index] for index in range(60)]).double()
    for batch in vectors.split(15):
        fakes = generator(batch.flip(1)[:, :8])
        (F.softplus(-discriminator(batch)).mean() + F.softplus(discriminator(fakes.detach())).mean()).backward()
        torch.nn.utils.clip_grad_norm_(discriminator.parameters(), 0.5)
        sgd.step()
        F.softplus(-discriminator(fakes)).mean().backward()
        torch.nn.utils.clip_grad_norm_(generator.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        sgd.zero_grad()
    for name, network in (("model", generator), ("discriminator", discriminator)):
        for key, value in network.state_dict().items():
            torch.testing.assert_close(found[f"{name}.{key}"], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("words", some([SEVERAL, LBFGS], 1), ids=["several", "lbfgs"])
def test_ranks_and_accumulation_train_the_weights_of_one_large_batch(
    train: Callable[..., Any], words: tuple[str, ...]
) -> None:
    divided = (
        ("devices=2",),
        ("accumulate=3", "data.batch_size=5"),
        ("devices=2", "accumulate=3", "data.batch_size=5"),
    )
    one, *others = (train(*words, *EXACT, *each) for each in ((), *divided))
    for other in others:
        for name, value in weights_of(one).items():
            torch.testing.assert_close(weights_of(other)[name], value, rtol=0, atol=1e-10)
        logged = [[record["loss"] for record in each.metrics if record["split"] == "train"] for each in (one, other)]
        assert logged[0] == pytest.approx(logged[1], abs=1e-10)


@pytest.mark.parametrize("words", some([SEVERAL, LBFGS], 0), ids=["several", "lbfgs"])
def test_a_killed_run_resumes_to_the_same_bits(
    train: Callable[..., Any], killed: Callable[..., Path], words: tuple[str, ...]
) -> None:
    whole = train(*words, "ema=0.9")
    directory = killed(3, "threads=1", "logger=none", "checkpoint.every_steps=1", *words, "ema=0.9")
    resumed = train("--config-dir=conf", f"ckpt_path={directory}", "callbacks=none", "data.num_workers=2")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.summary["test"] == whole.summary["test"]


def test_each_optimizer_has_its_rate_schedule_and_loss(train: Callable[..., Any]) -> None:
    records = [each for each in train(*SEVERAL, "scheduler=two").metrics if each["split"] == "train"]
    rates = {each["epoch"]: (each["lr_generator_0"], each["lr_discriminator"]) for each in records[:-1]}
    assert rates == {1: (0.01, 0.05), 2: (0.005, 0.05)}
    assert all(each["loss"] == pytest.approx(each["discriminator"] + each["generator"]) for each in records)
    assert all("real" in each for each in records)


@pytest.mark.parametrize("words", [SEVERAL, LBFGS], ids=["several", "lbfgs"])
def test_a_step_that_is_not_finite_ends_training(run: Callable[..., Any], words: tuple[str, ...]) -> None:
    assert run("train", "threads=1", *words, *EXACT, "+data.dataset.bad=20").status == 3


def test_skipped_steps_leave_no_trace_in_any_network(train: Callable[..., Any]) -> None:
    words = (*SEVERAL, *EXACT, "on_nonfinite=skip")
    good = train(*words, "max_steps=1")
    skipped = train(*words, "max_steps=2", "+data.dataset.bad=20")
    assert skipped.summary["weights_sha256"] == good.summary["weights_sha256"]


def test_an_optimizer_may_be_updated_twice_in_a_step_and_frozen_for_a_while(train: Callable[..., Any]) -> None:
    words = (*SEVERAL, "task._target_=networks.Twice", "amp=fp16", "grad_clip.norm=1.0", "max_steps=4", "epochs=1")
    frozen = weights_of(train(*words, "freeze=[discriminator]", "unfreeze_at=1ep"))
    start = weights_of(train(*words, "max_steps=1", "optimizer.generator.lr=0", "optimizer.discriminator.lr=0"))
    free = weights_of(train(*words))
    assert frozen["discriminator.weight"].equal(start["discriminator.weight"])
    assert not free["discriminator.weight"].equal(start["discriminator.weight"])
    assert not frozen["model.weight"].equal(start["model.weight"])


def test_modules_start_from_those_of_another_run(train: Callable[..., Any]) -> None:
    first = train(*SEVERAL, "epochs=1")
    words = (*SEVERAL, "max_steps=1", "optimizer.generator.lr=0", "optimizer.discriminator.lr=0")
    second = train(*words, f"init_from={{discriminator: {first.directory}}}")
    best = load_file(first.directory / "checkpoints" / "best.safetensors")
    assert weights_of(second)["discriminator.weight"].equal(best["discriminator.weight"])
    assert not weights_of(second)["model.weight"].equal(best["model.weight"])


def test_a_task_may_have_no_best_evaluation(train: Callable[..., Any], accepted: Any, rejected: Any) -> None:
    words = (*SEVERAL, "task._target_=networks.WithoutMonitor", "data.split.test=0.2", "ema=0.5")
    result = train(*words)
    summary, files = result.summary, {path.name for path in (result.directory / "checkpoints").iterdir()}
    assert (summary["best"], summary["monitor"], "best.safetensors" in files) == (None, None, False)
    assert summary["last"]["loss"] > 0
    trusted, name = "trust=[networks]", f"name={result.directory.parent.name}"
    again = accepted("eval", "ckpt_path=last", name, trusted, "threads=1", "json=true").out
    assert json.loads(again)["metrics"]["loss"] == summary["test"]["loss"]
    # Resumed without the monitor that it had, a run has no best checkpoint any more
    here = f"hydra.run.dir={train(*words, 'checkpoint.monitor=loss').directory}"
    assert "best.safetensors" in {path.name for path in Path(here.partition("=")[2], "checkpoints").iterdir()}
    resumed = train(f"ckpt_path={here.partition('=')[2]}", here, trusted, "checkpoint.monitor=null", "epochs=3")
    assert resumed.summary["best"] is None
    assert "the best evaluation was by val/loss (min); from now on there is none" in resumed.out
    assert "best.safetensors" not in {path.name for path in (resumed.directory / "checkpoints").iterdir()}
    for key, *more in (["scheduler", "scheduler=plateau"], ["callbacks.early_stopping", "callbacks=early_stopping"]):
        assert f"  {key}" in (error := rejected("train", "threads=1", *words, *more).err) or f"error: {key}" in error
        assert "the task names n" in error
        train(*words, *more, "checkpoint.monitor=loss")


def test_a_run_that_is_never_evaluated_needs_no_evaluation_step(
    train: Callable[..., Any], run: Callable[..., Any]
) -> None:
    words = ("task._target_=networks.Unevaluated", "evaluate.every_epochs=null", "evaluate.test=false")
    assert train(*SEVERAL, *words).summary["status"] == "finished"
    checked = run("check", *SEVERAL[:-1], *words, "only=[step,outputs]", "json=true")
    results = {each["name"]: each for each in json.loads(checked.out)["checks"]}
    assert checked.status == 0, results
    for name in ("modes", "evaluation-leaves-state"):
        assert results[name]["status"] == "skip"
        assert "evaluation" in results[name]["evidence"]


def test_verbs_that_measure_one_kind_of_update_say_so(run: Callable[..., Any]) -> None:
    result = run("profile", *SEVERAL[:-1])
    assert (result.status, "optimizer: there are several" in result.err) == (2, True), result.err
    assert run("check", *SEVERAL[:-1], "only=[step,missing-gradients]").status == 0


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ((*SEVERAL, "optimizer=adam"), "optimizer", "is one"),
        ((*SEVERAL, "task._target_=networks.Reconstruction"), "optimizer", "none"),
        ((*SEVERAL, "task._target_=networks.OtherName"), "task", "critic"),
        ((*SEVERAL, "task._target_=networks.Shared"), "task", "discriminator.bias to 2"),
        ((*SEVERAL, "task._target_=networks.NoName"), "task", "yields a Tensor"),
        ((*SEVERAL, "task._target_=networks.UnknownName"), "task", "'critic'"),
        ((*SEVERAL, "task._target_=networks.Uneven", "accumulate=7"), "task", "for one batch of a window"),
        ((*SEVERAL, "task._target_=networks.Unevaluated"), "task", "evaluation_step(modules, batch), or evaluate."),
        ((*SEVERAL, "lr=0.1"), "lr", "there are several"),
        ((*SEVERAL, "optimizer.lr=0.1"), "optimizer.lr", "optimizer.generator.lr"),
        ((*SEVERAL, "freeze=[discriminator]"), "freeze", "optimizer.discriminator"),
        ((*SEVERAL, "task._target_=networks.Listed"), "task", "gives a list"),
        ((*SEVERAL, "optimizer=mixed"), "optimizer.generator", "LBFGS"),
        ((*SEVERAL, "optimizer.generator.rate=1"), "optimizer.generator.rate", "not an argument"),
        ((*SEVERAL, "scheduler=critic"), "scheduler", "scheduler.critic"),
        ((*LBFGS, "on_nonfinite=skip"), "on_nonfinite", "LBFGS"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    run: Callable[..., Any], words: tuple[str, ...], key: str, reason: str
) -> None:
    result = run("train", "threads=1", *words)
    assert result.status == 2, result.err + result.out
    assert f"{key}:" in result.err
    assert reason in result.err
