"""strategy=fsdp with models larger than a process: built block by block, saved by all ranks together, read row by row."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

from runner.checkpoint import file, layout
from runner.config.errors import Problem
from runner.distributed.deferred import Deferred, is_blank
from runner.distributed.sharding import Part, loaded
from runner.models.initial import draw_weights, zero_last_norms
from runner.models.vit import ViT

SMALL = (
    "data=synthetic", "data.dataset.samples=46", "data.image_size=8", "data.batch_size=10", "evaluate.batch_size=2", "epochs=2",
    "evaluate.test=false", "device=cpu", "dtype=float64", "optimizer=adamw", "scheduler=constant", "callbacks=none",
    "checkpoint.min_seconds=0", "checkpoint.every_steps=3", "checkpoint.keep=9", "ema=0.9", "sync_batchnorm=true",
    "model=small_cnn", "model.width=6",
)  # fmt: skip
TWO = ("devices=2", "strategy=fsdp")


class Unusual(nn.Module):
    """Reads values while it is built, and has tensors of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in rates)
        self.scale = nn.Parameter(torch.randn(8) * torch.tensor(0.02))
        self.first = nn.Parameter(torch.rand(4, 8))
        self.second = nn.Parameter(self.first.detach().clone().mul_(2))
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.layers[0][0].weight
        self.register_buffer("mask", torch.ones(8, 8).triu())
        self.plain = torch.arange(8)
        with torch.no_grad():
            self.first[1:3].normal_()
            self.first[0] = torch.tensor([float(random.random())] * 8)
            if self.first.sum() > 0:
                self.scale.add_(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.tied(self.layers[0](images.flatten(1)[:, :8] + self.scale) @ self.mask) + self.plain


class Impossible(nn.Linear):
    """Fills its weight where no call is seen."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.detach().numpy()[:] = random.random()


def built(build: Callable[[], nn.Module], then: Callable[[nn.Module], Any], deferred: Deferred | None) -> nn.Module:
    torch.manual_seed(3)
    random.seed(3)
    if deferred is None:
        model = build()
        then(model)
        return model
    with deferred:
        model = deferred.construct(build)
        then(model)
    assert deferred.reason or any(map(is_blank, model.parameters()))
    deferred.materialize(model, torch.device("cpu"))
    return model


def drawn(scheme: Any) -> Callable[[nn.Module], None]:
    return lambda model: draw_weights(model, scheme)


def vit() -> nn.Module:
    return ViT(image_size=(8, 8), in_channels=3, num_classes=4, patch_size=4, dim=12, depth=2, heads=2)


def resnet() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4)


def nothing(model: nn.Module) -> None:
    pass


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), nothing),
    "vit": (vit, nothing),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2), nothing),
    "torchvision": (resnet, nothing),
    "float64": (resnet, lambda model: model.to(torch.float64)),
    "channels_last": (resnet, lambda model: model.to(memory_format=torch.channels_last)),
    "zero_gamma": (resnet, lambda model: zero_last_norms(model.eval(), lambda: model(torch.zeros(1, 3, 32, 32)))),
    "unusual": (Unusual, nothing),
    **{scheme: (vit, drawn(scheme)) for scheme in ("normal", "xavier", "kaiming", "orthogonal", "trunc_normal")},
}


@pytest.mark.parametrize(("build", "then"), CASES.values(), ids=CASES)
def test_weights_that_are_computed_later_have_the_same_bits(
    build: Callable[[], nn.Module], then: Callable[[nn.Module], Any]
) -> None:
    whole = built(build, then, None)
    state = torch.get_rng_state()
    deferred = Deferred()
    later = built(build, then, deferred)
    assert not deferred.reason
    assert torch.equal(torch.get_rng_state(), state)
    wanted, found = whole.state_dict(), later.state_dict()
    assert list(wanted) == list(found)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
    assert [each.requires_grad for each in later.parameters()] == [each.requires_grad for each in whole.parameters()]


def test_a_model_that_cannot_be_built_later_is_built_at_once_and_says_why() -> None:
    whole, deferred = built(Impossible, nothing, None), Deferred()
    later = built(Impossible, nothing, deferred)
    assert "numpy" in deferred.reason
    assert torch.equal(*(cast(nn.Linear, each).weight for each in (later, whole)))


def test_a_forward_pass_computes_the_weights_that_it_needs() -> None:
    images = torch.ones(2, 3, 8, 8)
    expected = built(vit, nothing, None).eval()(images)
    torch.manual_seed(3)
    with (deferred := Deferred()):
        model = deferred.construct(vit).eval()
        outputs = model(images)
        assert torch.equal(outputs, expected)
        assert all(map(is_blank, model.parameters()))


_MEASURE = """
import re, sys, torch
from pathlib import Path
from torch import nn
from runner.distributed.deferred import Deferred
def build():
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))  # 268 MB
with (small := Deferred()):  # torch imports modules for tensors without values
    small.construct(lambda: nn.Linear(8, 8))(torch.ones(1, 8))
def peak():  # KiB; unlike getrusage, without the memory of the process that started this one
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
if sys.argv[1] == "later":
    with (deferred := Deferred()):
        model = deferred.construct(build)
        with torch.no_grad():
            model(torch.ones(1, 2048))
    kept = []
    for block in model:
        deferred.materialize(block, torch.device("cpu"))
        kept.append(block.weight.detach()[:512].clone())  # what a rank of four keeps
        block.weight = None
else:
    model = build()
print(peak() - before)
"""


def test_building_takes_the_memory_of_the_parts_not_of_the_model() -> None:
    peaks = [
        int(subprocess.run([sys.executable, "-c", _MEASURE, how], capture_output=True, text=True, check=True).stdout)
        for how in ("later", "at once")
    ]
    assert peaks[1] > 250_000  # KiB
    assert peaks[0] < 0.55 * peaks[1], peaks


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
    at_once = runs(*TWO, "checkpoint.sharded=true", "checkpoint.async=false", "fsdp.lazy_init=false")
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
    assert "fsdp.lazy_init" in problems("fsdp.lazy_init=false")
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
    left = [name for name, tensor in contents["model"].items() if is_blank(tensor)]
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
