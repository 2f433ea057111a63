"""Between two log points a run asks the device for nothing: loop, callbacks and loader, as `train` puts them together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from waiting import Waits

EVERY = 4
# 24 steps of two batches in one epoch: the evaluation and the checkpoint come with the last log line.
RUN = (
    "data=synthetic", "data.dataset.samples=600", "data.split.test=0.1", "data.image_size=8", "data.batch_size=8",
    "data.drop_last=true", "epochs=1", "max_steps=24", "model=small_cnn", "model.width=4", "model.dropout=0.1",
    "transform=strong", "data.hflip=0.5", "accumulate=2", "evaluate.test=false", "log.progress=true",
    f"log.every_steps={EVERY}",
)  # fmt: skip
WATCHING = """
import torch

class Watch:
    count = staticmethod(lambda: 0)
    seen = []
    def on_start(self, loop): self.seen.append(self.count())
    def on_step(self, loop): self.seen.append(self.count())

class Strict:
    def on_step(self, loop):
        if loop.state.position.global_step % EVERY == 0: torch.cuda.set_sync_debug_mode("default")
    def on_boundary(self, loop):
        if not loop.finished: torch.cuda.set_sync_debug_mode("error")
"""
# AdamW and torch's GradScaler ask for a number in every step unless the optimizer is fused; on CUDA, AdamW does not.
FUSED = ("optimizer=adamw", "optimizer.fused=true")
STEPS = [
    ("optimizer=sgd", "grad_clip.norm=1.0"),
    ("optimizer=sgd", "amp=bf16", "grad_clip.value=0.1"),
    (*FUSED, "grad_clip.norm=1.0"),
    (*FUSED, "grad_clip.agc=0.01", "ema=0.9", "optimizer.no_decay=auto"),
    (*FUSED, "ema=0.9", "accumulate=2"),
    (*FUSED, "amp=fp16"),
    ("optimizer=adam", "optimizer.fused=true"),
]


def test_every_optimizer_that_is_shipped_is_watched() -> None:
    shipped = {path.stem for path in (Path(__file__).parents[1] / "conf/optimizer").glob("[!_]*.yaml")}
    assert {
        word.removeprefix("optimizer=") for words in STEPS for word in words if word.startswith("optimizer=")
    } == shipped - {"lbfgs", "muon", "rmsprop"}  # which have no fused kernel: each step waits, and a warning says so


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Counts methods that read a tensor's values, too."""
    reads = Waits()
    # Not `numpy`: it refuses what is not on the CPU, where nothing is waited for.
    for name, method in (("tolist", torch.Tensor.tolist), ("cpu", torch.Tensor.cpu)):

        def call(*args: Any, name: str = name, method: Any = method, **keys: Any) -> Any:
            reads.found.append(name)
            return method(*args, **keys)

        monkeypatch.setattr(torch.Tensor, name, call)
    return reads


@pytest.fixture
def watching(own_module: Any) -> Iterator[Any]:
    """The module with the callbacks, for `callbacks.watch._target_`."""
    own_module("watching", WATCHING.replace("EVERY", str(EVERY)))
    import watching  # type: ignore[import-not-found]

    yield watching
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("words", some(STEPS, 1, 3, 5, 6), ids=" ".join)
def test_a_run_reads_two_numbers_at_each_log_point_and_none_between(
    train: Any, watching: Any, reads: Waits, words: tuple[str, ...]
) -> None:
    watching.Watch.count = staticmethod(lambda: len(reads.found))
    with reads:
        train(*RUN, *words, "callbacks.watch={_target_: watching.Watch}")
    start, *after = watching.Watch.seen
    assert len(after) == 24
    # Whether steps were skipped, and the loss. The callback comes before the one that logs, so it sees the readings of the
    # log points before its step.
    assert [count - start for count in after] == [2 * ((step - 1) // EVERY) for step in range(1, 25)], reads.found


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "data", [("data.placement=device",), ("data.placement=disk", "data.num_workers=1")], ids=" ".join
)
@pytest.mark.parametrize(
    "words", [(), ("amp=bf16", "grad_clip.norm=1.0"), ("amp=fp16", "optimizer.fused=true")], ids=" ".join
)
def test_on_cuda_torch_finds_no_wait_between_two_log_points(
    train: Any, watching: Any, data: tuple[str, ...], words: tuple[str, ...]
) -> None:
    train(*RUN, *data, *words, "device=cuda", "callbacks.watch={_target_: watching.Strict}")
