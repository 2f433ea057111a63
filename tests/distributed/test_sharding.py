"""strategy=fsdp: runs whose weights are divided among ranks train as those of one process do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from extras import needs
from safetensors.torch import load_file

from scale_equality import LAYOUTS

# 41 samples to train on: five batches, of which the last has one. 5 samples to validate on: three batches.
SMALL = (
    "data=synthetic", "data.dataset.samples=46", "data.image_size=8", "data.batch_size=10", "evaluate.batch_size=2", "epochs=2",
    "evaluate.test=false", "device=cpu", "dtype=float64", "transform=strong", "optimizer=sgd", "optimizer.lr=0.02",
    "scheduler=constant", "callbacks=none", "log.every_steps=1", "checkpoint.min_seconds=0", "checkpoint.every_steps=3",
    "checkpoint.keep=9", "trust=[poison]",
)  # fmt: skip
MLP = ("model=mlp", "model.hidden=[16]")
VIT = ("model=vit_tiny", "model.dim=12", "model.depth=2", "model.mlp_ratio=2")
WINDOW = (*VIT, "accumulate=3", "grad_clip.norm=0.5", "ema=0.9")
TIED = ("model=null", "+model._target_=rank_faults.Tied", "trust=[rank_faults,poison]", "ema=0.9", "grad_clip.norm=0.5")
TWO = ("devices=2", "strategy=fsdp")
NORMS = ("model=small_cnn", "model.width=4", "model.dropout=0", "sync_batchnorm=true", "grad_clip.value=0.01")
PARTS = ("freeze=[blocks.0.*@3]", "grad_clip.agc=0.01", "activation_checkpointing=true", "swa=1")


@pytest.fixture
def runs(train: Callable[..., Any], pool: Any) -> Iterator[Callable[..., Any]]:
    """A quick training, on ranks that are there already if it asks for several."""
    with pool.installed():
        yield lambda *words: train(*SMALL, *words)


def tensors(run: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a run's last checkpoint."""
    return load_file(run.directory / "checkpoints" / "last.safetensors")


def assert_same(run: Any, other: Any) -> None:
    """Losses and tensors are equal to the rounding of float64."""
    pairs = list(zip(run.metrics, other.metrics, strict=True))
    for ours, theirs in pairs:
        names = [name for name in theirs if "loss" in name or "accuracy" in name]
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-10)
    assert len([ours for ours, _ in pairs if ours["split"] == "val"]) == 2
    ours, theirs = tensors(run), tensors(other)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        atol = 1e-10 * float(tensor.abs().amax()) if tensor.is_floating_point() and tensor.numel() else 0.0
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-10, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("names", some([[*LAYOUTS][:3], [*LAYOUTS]], 0), ids=len)
def test_accumulation_clipping_an_average_and_resuming_across_strategies(runs: Any, names: list[str]) -> None:
    whole = {name: runs(*WINDOW, *LAYOUTS[name]) for name in names}
    one = whole["1 process"]
    for other in whole.values():
        assert_same(other, one)
    # Each layout resumes what it wrote itself, and what the next one wrote; scripts/scale.py matrix tries all pairs.
    for writer, name in [*zip(names, names, strict=True), *itertools.pairwise([*names, names[0]])]:
        checkpoint = whole[writer].directory / "checkpoints" / "step_0000000003.safetensors"  # inside an epoch
        resumed = runs(*WINDOW, *LAYOUTS[name], f"ckpt_path={checkpoint}")
        assert_same(resumed, one)
        if writer == name:
            assert resumed.summary["weights_sha256"] == whole[name].summary["weights_sha256"], name


@pytest.mark.slow
def test_a_rank_holds_its_part_of_weights_and_optimizer_state(runs: Any, tmp_path: Path) -> None:
    held = {}
    for name in ("ddp, 2", "fsdp, 2"):
        words = (
            f"+callbacks.held={{_target_:rank_faults.Held,folder:{tmp_path}}}",
            "trust=[rank_faults,poison]",
            "max_steps=1",
        )
        runs(*VIT, *LAYOUTS[name], *words, "optimizer=adamw")
        held[name] = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    for rank in held["fsdp, 2"]:
        assert rank == pytest.approx([whole / 2 for whole in held["ddp, 2"][0]], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ranks"),
    some(
        [
            ((*VIT, *PARTS), (*TWO, "fsdp.blocks=[blocks.1]", "fsdp.reshard_after_forward=false")),
            (WINDOW, ("devices=4", "strategy=fsdp", "fsdp.replicas=2")),
            (NORMS, ("devices=3", "strategy=fsdp")),
            ((*VIT, "freeze=[blocks.0]", "ema=0.9"), TWO),
        ],
        2,
        several=True,
    ),
    ids=["frozen, recomputed and gathered apart", "replicas", "sync_batchnorm", "a part is never trained nor averaged"],
)
def test_divided_weights_train_as_whole_ones(runs: Any, words: tuple[str, ...], ranks: tuple[str, ...]) -> None:
    assert_same(runs(*words, *ranks), runs(*words))


@pytest.mark.slow
def test_a_checkpoint_has_the_average_of_weights_whose_gradients_are_off(runs: Any) -> None:
    words = (*VIT, "ema=0.9", "+callbacks.off={_target_:rank_faults.Off}", "trust=[rank_faults,poison]")
    assert_same(runs(*words, "devices=2"), runs(*words))


@needs("lora")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adapters_train_as_in_one_process(runs: Any, strategy: str) -> None:
    words = (*VIT, "adapters=lora", "adapters.modules=[*]", "adapters.rank=2", "ema=0.9", "grad_clip.norm=0.5")
    two = runs(*words, "devices=2", f"strategy={strategy}")
    one = runs(*words)
    for ours, theirs in zip(*([run.last["model"], run.last["averaged"]["weights"]] for run in (two, one)), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-12)
    inside = two.directory / "checkpoints" / "step_0000000003.safetensors"
    resumed = runs(*words, "devices=2", f"strategy={strategy}", f"ckpt_path={inside}")
    assert resumed.summary["weights_sha256"] == two.summary["weights_sha256"]


@pytest.mark.slow
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(runs: Any) -> None:
    words = (*MLP, "optimizer=adamw", "on_nonfinite=skip", "transform.train=[{_target_:poison.Poison,sample:3}]")
    one, two = runs(*words), runs(*words, *TWO)
    for run in (one, two):
        said = (run.directory / "run.log").read_text()
        assert "the images of sample 3 have values that are not finite; skipped" in said
    ours, theirs = tensors(two), tensors(one)
    for name in ("layers.0.weight", "optimizer/state/0/exp_avg_sq"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@pytest.mark.extended
def test_tied_weights_of_one_block_and_of_several(runs: Any) -> None:
    one, two = runs(*TIED), runs(*TIED, *TWO)
    assert_same(two, one)
    assert "gathers blocks.0, blocks.1, blocks.2 with the parameters outside" in (two.directory / "run.log").read_text()
    for before, now in ((two, LAYOUTS["1 process"]), (one, TWO)):
        checkpoint = before.directory / "checkpoints" / "step_0000000003.safetensors"
        assert_same(runs(*TIED, *now, f"ckpt_path={checkpoint}"), one)


@pytest.mark.slow
def test_initial_weights_have_the_same_bits(runs: Any) -> None:
    words = (*MLP, "optimizer.lr=1e-320", "optimizer.weight_decay=0", "max_steps=1", "dtype=float32")
    assert runs(*words, *TWO).summary["weights_sha256"] == runs(*words).summary["weights_sha256"]


@pytest.mark.parametrize(
    ("word", "key"), [("fsdp.replicas=3", "fsdp.replicas"), ("fsdp.blocks=[stages.*]", "fsdp.blocks")]
)
def test_what_does_not_fit_ranks_or_model_is_refused(run: Any, pool: Any, word: str, key: str) -> None:
    with pool.installed():
        found = run("train", *SMALL, *VIT, *TWO, "threads=1", "logger=none", word)
    assert found.status == 2
    assert key in found.err
