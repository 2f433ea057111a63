"""Tasks with several optimizers, and optimizers that compute the loss themselves, through the program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from own_steps import Digits
from safetensors.torch import load_file
from torch.nn import functional as F

COMMON = (
    "--config-dir=conf", "transform=none", "~model.dropout", "~model.width", "epochs=2", "data.num_workers=0",
    "data.batch_size=15", "data.images=[]", "data.dataset._target_=own_steps.Digits", "loss=none", "log.every_steps=1",
    "model._target_=torch.nn.Linear", "+model.in_features=8", "+model.out_features=64", "logger=[]",
)  # fmt: skip
SEVERAL = (*COMMON, "optimizer=two", "task._target_=own_networks.Networks", "scheduler=constant")
LBFGS = (
    *COMMON, "optimizer=lbfgs", "optimizer.max_iter=3", "task._target_=own_networks.Reconstruction", "scheduler=constant"
)  # fmt: skip
OPTIONS = {
    "optimizer/two": """
  - adam@generator
  - sgd@discriminator
  - _self_
generator: {lr: 0.01, weight_decay: 0.1, no_decay: auto}
discriminator: {lr: 0.05}
""",
    "optimizer/mixed": "  - lbfgs@generator\n  - sgd@discriminator\n",
    "scheduler/two": "  - step@generator\n  - constant@discriminator\n  - _self_\ngenerator: {every: 1, gamma: 0.5}\n",
    "scheduler/critic": "  - step@generator\n  - constant@critic\n",
}
STILL = ("optimizer.generator.lr=0", "optimizer.discriminator.lr=0", "max_steps=1")
EXACT = ("dtype=float64", "data.shuffle=false", "max_steps=4", "epochs=1", "data.split.val=0", "data.split.test=0")


@pytest.fixture(autouse=True)
def conf(workdir: Path) -> None:
    """Options for several optimizers."""
    (workdir / "conf" / "optimizer").mkdir(parents=True)
    (workdir / "conf" / "scheduler").mkdir()
    for name, text in OPTIONS.items():
        (workdir / "conf" / f"{name}.yaml").write_text(f"# Two.\n# train\ndefaults:\n{text}", encoding="utf-8")


def test_steps_of_several_optimizers_see_the_progress_of_the_run(train: Callable[..., Any]) -> None:
    words = (*SEVERAL, *EXACT, "task._target_=own_networks.Ramped")
    one, *others = (train(*words, *each) for each in ((), ("devices=2",), ("data.batch_size=5", "accumulate=3")))
    for result in (one, *others):
        steps = [row for row in result.metrics if row["split"] == "train"]
        assert [(row["at_generator"], row["at_discriminator"]) for row in steps] == [(step, step) for step in range(4)]
        assert steps[0]["loss"] == 0, "the ramp begins at 0"
        for name, value in result.last["model"].items():
            if name.endswith(("weight", "bias")):
                torch.testing.assert_close(value, one.last["model"][name], rtol=0, atol=1e-12)


def test_a_gan_trains_as_a_loop_by_hand_does(train: Callable[..., Any]) -> None:
    found = train(*SEVERAL, *EXACT, "grad_clip.norm=0.5").last["model"]
    start = train(*SEVERAL, *EXACT, *STILL).last["model"]
    generator, discriminator = torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)
    for name, network in (("model", generator), ("discriminator", discriminator)):
        network.double().load_state_dict({key: start[f"{name}.{key}"] for key in ("weight", "bias")})
    groups = [{"params": [generator.weight], "weight_decay": 0.1}, {"params": [generator.bias], "weight_decay": 0.0}]
    adam = torch.optim.Adam(groups, lr=0.01)
    sgd = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.0005)
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
    small = ("accumulate=3", "data.batch_size=5")
    one, *others = (train(*words, *EXACT, *each) for each in ((), ("devices=2",), small, ("devices=2", *small)))
    for other in others:
        torch.testing.assert_close(other.last["model"], one.last["model"], rtol=0, atol=1e-10)
        logged = [[record["loss"] for record in each.logged("train")] for each in (one, other)]
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
    records = train(*SEVERAL, "scheduler=two").logged("train")
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
    words = (*SEVERAL, "task._target_=own_networks.Repeated", "+task.times=2", "+task.small=2")
    words += ("amp=fp16", "grad_clip.norm=1.0", "max_steps=4", "epochs=1")
    frozen = train(*words, "freeze=[discriminator]", "unfreeze_at=1ep").last["model"]
    start = train(*words, *STILL).last["model"]
    free = train(*words).last["model"]
    assert frozen["discriminator.weight"].equal(start["discriminator.weight"])
    assert not free["discriminator.weight"].equal(start["discriminator.weight"])
    assert not frozen["model.weight"].equal(start["model.weight"])


def test_modules_start_from_those_of_another_run(train: Callable[..., Any]) -> None:
    first = train(*SEVERAL, "epochs=1")
    second = train(*SEVERAL, *STILL, f"init_from={{discriminator: {first.directory}}}")
    best = load_file(first.directory / "checkpoints" / "best.safetensors")
    assert second.last["model"]["discriminator.weight"].equal(best["discriminator.weight"])
    assert not second.last["model"]["model.weight"].equal(best["model.weight"])


def test_a_task_may_have_no_best_evaluation(train: Callable[..., Any], printed: Any, refused: Any) -> None:
    words = (*SEVERAL, "task._target_=own_networks.WithoutMonitor", "data.split.test=0.2", "ema=0.5")
    result = train(*words)
    summary, files = result.summary, {path.name for path in (result.directory / "checkpoints").iterdir()}
    assert (summary["best"], summary["monitor"], "best.safetensors" in files) == (None, None, False)
    assert summary["last"]["loss"] > 0
    name = f"name={result.directory.parent.name}"
    assert printed("eval", "ckpt_path=last", name)["metrics"]["loss"] == summary["test"]["loss"]
    # Resumed without the monitor that it had, a run has no best checkpoint any more
    here = f"hydra.run.dir={train(*words, 'checkpoint.monitor=loss').directory}"
    assert "best.safetensors" in {path.name for path in Path(here.partition("=")[2], "checkpoints").iterdir()}
    resumed = train(f"ckpt_path={here.partition('=')[2]}", here, "checkpoint.monitor=null", "epochs=3")
    assert resumed.summary["best"] is None
    assert "the best evaluation was by val/loss (min); from now on there is none" in resumed.out
    assert "best.safetensors" not in {path.name for path in (resumed.directory / "checkpoints").iterdir()}
    for key, more in (
        ("scheduler", "scheduler=plateau"),
        ("callbacks.early_stopping.monitor", "callbacks=early_stopping"),
    ):
        refused((*words, more), key, "the task names n")
        train(*words, more, "checkpoint.monitor=loss")


def test_a_run_that_is_never_evaluated_needs_no_evaluation_step(train: Callable[..., Any], printed: Any) -> None:
    words = ("task._target_=own_networks.Unevaluated", "evaluate.every_epochs=null", "evaluate.test=false")
    assert train(*SEVERAL, *words).summary["status"] == "finished"
    checked = printed("check", *SEVERAL[:-1], *words, "only=[step,outputs]")
    results = {each["name"]: each for each in checked["checks"]}
    for name in ("modes", "evaluation-leaves-state"):
        assert results[name]["status"] == "skip"
        assert "evaluation" in results[name]["evidence"]


def test_verbs_that_measure_one_kind_of_update_say_so(refused: Any, accepted: Any) -> None:
    refused(SEVERAL[:-1], "optimizer", "there are several", verb="profile")
    accepted("check", *SEVERAL[:-1], "only=[step,missing-gradients]")


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ((*SEVERAL, "optimizer=adam"), "optimizer", "is one"),
        ((*SEVERAL, "task._target_=own_networks.Reconstruction"), "optimizer", "none"),
        ((*SEVERAL, "task._target_=own_networks.OtherName"), "task", "critic"),
        ((*SEVERAL, "task._target_=own_networks.Shared"), "task", "discriminator.bias to 2"),
        ((*SEVERAL, "task._target_=own_networks.Yields"), "task", "yields a Tensor"),
        ((*SEVERAL, "task._target_=own_networks.Yields", "+task.name=critic"), "task", "'critic'"),
        (
            (*SEVERAL, "task._target_=own_networks.Repeated", "+task.small=2", "accumulate=7"),
            "task",
            "for one batch of a window",
        ),
        ((*SEVERAL, "task._target_=own_networks.Unevaluated"), "task", "evaluation_step(modules, batch), or evaluate."),
        ((*SEVERAL, "lr=0.1"), "lr", "there are several"),
        ((*SEVERAL, "optimizer.lr=0.1"), "optimizer.lr", "optimizer.generator.lr"),
        ((*SEVERAL, "freeze=[discriminator]"), "freeze", "optimizer.discriminator"),
        ((*SEVERAL, "task._target_=own_networks.Listed"), "task", "gives a list"),
        ((*SEVERAL, "optimizer=mixed"), "optimizer.generator", "LBFGS"),
        ((*SEVERAL, "optimizer.generator.rate=1"), "optimizer.generator.rate", "not an argument"),
        ((*SEVERAL, "scheduler=critic"), "scheduler", "scheduler.critic"),
        ((*COMMON, "~optimizer", "+optimizer@optimizer.two=adam"), "optimizer", "adam@NAME among its defaults"),
        ((*LBFGS, "on_nonfinite=skip"), "on_nonfinite", "LBFGS"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    refused: Callable[..., None], words: tuple[str, ...], key: str, reason: str
) -> None:
    refused(words, key, reason)
