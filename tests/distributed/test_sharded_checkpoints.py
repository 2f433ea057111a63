"""Checkpoints of divided weights: saved by all ranks together, read tensor by tensor."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runner.checkpoint import file, layout
from runner.config.errors import Problem
from runner.distributed.sharding import Part, loaded

SMALL = (
    "data=synthetic", "data.dataset.samples=46", "data.image_size=8", "data.batch_size=10", "evaluate.batch_size=2", "epochs=2",
    "evaluate.test=false", "device=cpu", "dtype=float64", "optimizer=adamw", "scheduler=constant", "callbacks=none",
    "checkpoint.min_seconds=0", "checkpoint.every_steps=3", "checkpoint.keep=9", "ema=0.9", "sync_batchnorm=true",
    "model=small_cnn", "model.width=6",
)  # fmt: skip
TWO = ("devices=2", "strategy=fsdp")


@pytest.fixture
def runs(train: Callable[..., Any], pool: Any) -> Iterator[Callable[..., Any]]:
    """A quick training, on ranks that are there already if it asks for several."""
    with pool.installed():
        yield lambda *words: train(*SMALL, *words)


def assert_close(some: Path, other: Path) -> None:
    """The tensors of two checkpoints are equal to the rounding of float64."""
    ours, theirs = load_file(some), load_file(other)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        atol = 1e-9 * float(tensor.abs().amax()) if tensor.is_floating_point() and tensor.numel() else 0.0
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=atol)


@pytest.mark.slow
def test_a_checkpoint_that_all_ranks_write_is_the_one_that_the_first_writes(
    runs: Callable[..., Any], run: Callable[..., Any]
) -> None:
    gathered = runs(*TWO)
    together = runs(*TWO, "checkpoint.sharded=true")
    at_once = runs(*TWO, "checkpoint.sharded=true", "checkpoint.async=false")
    names = sorted(path.name for path in (gathered.directory / "checkpoints").iterdir())
    for found in (together, at_once):
        assert sorted(path.name for path in (found.directory / "checkpoints").iterdir()) == names
        for name in ("step_0000000003.safetensors", "best.safetensors", "last.safetensors"):
            file.verify(found.directory / "checkpoints" / name)
            ours, theirs = (load_file(each.directory / "checkpoints" / name) for each in (found, gathered))
            assert sorted(ours) == sorted(theirs)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    inside = together.directory / "checkpoints" / "step_0000000003.safetensors"  # of an epoch
    last = gathered.directory / "checkpoints" / "last.safetensors"
    for words in (
        ("devices=1", "strategy=auto"),
        ("devices=3",),
        ("devices=4", "fsdp.replicas=2"),
    ):
        resumed = runs(*TWO, "checkpoint.sharded=true", f"ckpt_path={inside}", *words)
        assert_close(resumed.directory / "checkpoints" / "last.safetensors", last)
    evaluated = run("eval", f"ckpt_path={together.directory}", "device=cpu", "threads=1")
    assert evaluated.status == 0, evaluated.err


def test_keys_for_divided_weights_have_no_effect_without(
    problems: Callable[..., dict[str, Problem]], train: Callable[..., Any]
) -> None:
    assert "checkpoint.sharded=true has no effect" in train(*SMALL, "checkpoint.sharded=true", "max_steps=1").out
    assert not problems("checkpoint.sharded=true", "strategy=fsdp", "devices=2", "device=cpu")


def test_the_pieces_of_two_ranks_make_a_file_and_a_lost_one_is_noticed() -> None:
    whole = torch.arange(15.0).view(5, 3)
    plain = torch.ones(2, dtype=torch.int64)
    ranks = [
        {"divided": Part(whole[:3], (5, 3), 0, True), "plain": plain},
        {"divided": Part(whole[3:], (5, 3), 3, True), "plain": plain},
    ]
    expected, found = io.BytesIO(), io.BytesIO()
    layout.write(expected, "2", {"config": ""}, {"divided": whole, "plain": plain})
    plan = layout.Plan("2", {"config": ""}, ranks[0])
    pieces = [
        layout.write_pieces(found, plan.places, rank, first) for rank, first in zip(ranks, (True, False), strict=True)
    ]
    of = {name: [each[name] for each in pieces if name in each] for name in plan.places}
    plan.finish(found, {name: layout.digest_pieces(found, place, of[name]) for name, place in plan.places.items()})
    assert found.getvalue() == expected.getvalue()
    place = plan.places["divided"]
    with pytest.raises(OSError, match="not written"):
        layout.digest_pieces(found, place, of["divided"][:1])
    found.seek(place[0])
    found.write(b"other")
    with pytest.raises(OSError, match="is missing"):
        layout.digest_pieces(found, place, of["divided"])


def test_large_tensors_stay_in_the_file_until_they_are_needed(train_once: Callable[..., Any], tmp_path: Path) -> None:
    trained = train_once(*SMALL[:-3], "model=mlp", "model.hidden=[600,600]", "max_steps=1")
    path = trained.directory / "checkpoints" / "last.safetensors"
    contents, whole = file.read(path, later=True), file.read(path)
    left = [name for name, tensor in contents["model"].items() if tensor.is_meta]
    assert left
    assert all(torch.equal(loaded(tensor), whole["model"][name]) for name, tensor in contents["model"].items())
    with path.open("r+b") as opened:  # altered after it was verified
        header = layout.read_header(opened)
        opened.seek(header.tensors[left[0]].begin)
        opened.write(b"other")
    with pytest.raises(file.DamagedCheckpoint):
        loaded(contents["model"][left[0]])
    with pytest.raises(file.DamagedCheckpoint):
        file.read(path, later=True)
