"""A loss with parameters or buffers is trained, averaged, saved and restored like the model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from nested import equal
from safetensors.torch import load_file
from torch import Tensor, nn

from rank_pool import RankPool
from runner.checkpoint import file
from runner.config.load import resolve_config
from runner.config.schema.train import Train
from runner.optim.groups import parameter_groups
from runner.optim.muon import Muon
from runner.train import build_run

WORDS = (
    "data=synthetic", "data.dataset.samples=60", "data.image_size=8", "data.batch_size=8", "epochs=2", "model=mlp",
    "model.hidden=[8]", "scheduler=constant", "evaluate.test=false", "checkpoint.min_seconds=0", "optimizer=sgd",
    "optimizer.lr=0.2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def trusted(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_TRUST", "kept_losses")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool()
    yield made
    made.close()


def loss(name: str, **arguments: Any) -> str:
    return f"loss={json.dumps({'_target_': f'kept_losses.{name}'} | arguments)}".replace('"', "")


def saved(run: Any, name: str = "last") -> dict[str, Tensor]:
    return load_file(run.directory / f"checkpoints/{name}.safetensors")


def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of model and loss."""
    return {name: tensor for name, tensor in tensors.items() if "/" not in name or name.startswith("loss/")}


def test_learned_weights_are_those_of_a_loop_by_hand(train: Any, compose: Any) -> None:
    words = (*WORDS, "threads=1", "epochs=1", "grad_clip.norm=0.5", "optimizer.lr_mult={loss.log_scales: 0.5}")
    found = saved(train(*words, loss("Weighted")))
    run = build_run(resolve_config(compose(*words, loss("Weighted")), Train))
    with contextlib.closing(run.data):
        model, criterion = run.model, run.loss
        groups = [{"params": [*model.parameters()], "lr": 0.2}, {"params": [*criterion.parameters()], "lr": 0.1}]
        settings = {key: run.config.optimizer[key] for key in ("momentum", "weight_decay", "nesterov")}
        optimizer = torch.optim.SGD(groups, **settings)
        for batch in run.data.train.loader.batches(0, 0, run.plan.batches):
            criterion(model(batch.images), batch.targets).backward()
            torch.nn.utils.clip_grad_norm_([*model.parameters(), *criterion.parameters()], 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert found["loss/log_scales"].abs().max() > 0.01
    torch.testing.assert_close(found["loss/log_scales"], criterion.log_scales.detach())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("name", some(["Weighted", "Bank"], 1))
def test_a_killed_run_ends_with_the_same_bits(train: Any, killed: Any, name: str) -> None:
    words = (*WORDS, loss(name), "ema=0.9", "checkpoint.every_steps=2")
    whole = train(*words)
    rest = train(f"ckpt_path={killed(7, *words)}", "callbacks=none")
    assert any(name.startswith("loss/") for name in kept(saved(whole)))
    assert equal(kept(saved(rest)), kept(saved(whole)))
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.extended
@pytest.mark.slow
def test_two_ranks_train_learned_weights_as_one_does(train: Any, pool: RankPool) -> None:
    words = (*WORDS, loss("Weighted"), "dtype=float64", "accumulate=2", "grad_clip.norm=0.5")
    one = kept(saved(train(*words)))
    with pool.installed():
        two = kept(saved(train(*words, "devices=2")))
    assert max(float((two[name] - tensor).abs().max()) for name, tensor in one.items()) < 1e-12


@pytest.mark.extended
@pytest.mark.slow
def test_what_a_loss_keeps_is_that_of_the_first_rank(train: Any, pool: RankPool) -> None:
    words = (*WORDS, loss("Bank"), "devices=2")
    with pool.installed():
        whole = train(*words)
        half = train(*words, "max_steps=5")
        rest = train(f"ckpt_path={half.directory}", "max_steps=null")
    assert saved(whole)["loss/updates"] == 14
    assert equal(kept(saved(rest)), kept(saved(whole)))


def test_fsdp_refuses_a_loss_with_parameters(run: Any, pool: RankPool) -> None:
    with pool.installed():
        result = run("train", *WORDS, loss("Weighted"), "threads=1", "devices=2", "strategy=fsdp")
    assert result.status == 2
    assert "loss: has parameters" in result.err


def test_an_average_has_the_loss_of_its_own_and_eval_uses_what_belongs_to_the_weights(
    train: Any, accepted: Any
) -> None:
    result = train(*WORDS, loss("Weighted"), "ema=0.8", "checkpoint.monitor=ema_loss")
    tensors = saved(result)
    assert not torch.equal(tensors["averaged/loss/log_scales"], tensors["loss/log_scales"])
    last = result.logged("val")[-1]
    for weights, metric in (("raw", "loss"), ("averaged", "ema_loss")):
        path = result.directory / "checkpoints/last.safetensors"
        found = accepted("eval", f"ckpt_path={path}", "split=val", f"weights={weights}", "json=true", "threads=1")
        assert json.loads(found.out)["metrics"]["loss"] == pytest.approx(last[metric], rel=1e-6)
    accepted("eval", f"ckpt_path={path}", "split=val", "json=true", "threads=1", "loss=cross_entropy")


def test_buffers_from_the_config_follow_the_config_and_old_files_go_on(train: Any) -> None:
    words = (*WORDS, loss("Constant", last=2.0))
    whole, half = train(*words), train(*words, "max_steps=5")
    path = half.directory / "checkpoints/last.safetensors"
    contents = file.read(path)
    del contents["loss"]
    file.write(path, contents)  # as older versions wrote it
    rest = train(f"ckpt_path={path}", "max_steps=null")
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]
    changed = train(f"ckpt_path={rest.directory}", "epochs=3", "loss.last=4.0")
    assert saved(changed)["loss/weight"][-1] == 4


def test_a_skipped_step_leaves_what_a_loss_keeps_as_it_was_and_a_bad_gradient_is_named(train: Any, run: Any) -> None:
    result = train(*WORDS, loss("Bank", fails=2), "on_nonfinite=skip", "max_steps=5")
    assert saved(result)["loss/updates"] == 2
    result = run("train", *WORDS, loss("Root"), "threads=1")
    assert (result.status, "the gradients of loss.log_scales are not" in result.err) == (3, True)


def test_groups_have_the_parameters_of_the_loss_with_the_rules_of_the_model() -> None:
    model, criterion = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), nn.Linear(4, 4)
    groups = parameter_groups(model, "auto", {"loss": 0.1, "loss.bias": 0.2}, layer_decay=0.5, loss=criterion)
    found = {id(each): group for group in groups for each in group["params"]}
    assert found[id(criterion.weight)]["lr_mult"] == 0.1
    assert found[id(criterion.bias)]["lr_mult"] == 0.2
    assert found[id(criterion.bias)]["weight_decay"] == 0
    assert "weight_decay" not in found[id(criterion.weight)]
    for optimizer in (Muon(groups), Muon([*criterion.parameters(), *model.parameters()])):
        kinds = {id(each): group["algorithm"] for group in optimizer.param_groups for each in group["params"]}
        assert kinds[id(model[1].weight)] == "adamw", "the head"
        assert kinds[id(criterion.weight)] == "muon"
