"""What only a GPU can show; skipped where there is none. `scripts/gpu.py` runs these tests on a machine that has one."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from runner.data.loaders import Batch
from runner.distributed.world import joined
from runner.engine.rank_step import RankStep
from runner.engine.state import RunningMean, TrainState
from runner.engine.step import Supervised
from runner.optim.schedules import Constant
from runner.runtime.memory import peak_memory, reset_peak_memory

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
RUN = (
    f"device={DEVICE}", "data=synthetic", "data.dataset.samples=256", "data.image_size=16", "data.batch_size=32", "epochs=2",
    "model=small_cnn", "model.width=16", "evaluate.test=false", "scheduler=constant", "log.every_steps=2",
)  # fmt: skip


def losses(result: Any) -> list[float]:
    return [record["loss"] for record in result.logged("train")]


def agree(one: Any, other: Any, tolerance: float = 0.02) -> bool:
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(losses(one), losses(other), strict=True))


def test_fp16_trains_with_the_scaler_and_the_scale_is_saved(train: Any) -> None:
    scaled = train(*RUN, "amp=fp16")
    assert agree(scaled, train(*RUN), 0.1), "besides one step, whose gradients overflow"
    assert scaled.last["scaler"]["scale"] > 1


@pytest.mark.parametrize(
    "words",
    [
        ("channels_last=true",),
        ("amp=bf16", "channels_last=true"),
        ("compile=true",),
        ("compile=step",),
        ("compile=true", "compiler.mode=reduce-overhead"),
        ("optimizer.fused=true",),
        ("optimizer.foreach=true",),
        ("activation_checkpointing=true",),
        ("data.placement=disk", "data.num_workers=2", "data.pin_memory=true"),
    ],
    ids=" ".join,
)
@pytest.mark.filterwarnings("ignore")  # compilers and workers warn about the machine
def test_how_a_step_is_computed_changes_no_loss_but_by_rounding(train: Any, words: tuple[str, ...]) -> None:
    assert agree(train(*RUN, *words), train(*RUN), 0.05)


@pytest.mark.parametrize("words", [(), ("amp=fp16",), ("amp=bf16", "channels_last=true", "ema=0.9")], ids=" ".join)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(train: Any, words: tuple[str, ...]) -> None:
    words = (*RUN, "deterministic=true", *words)
    whole = train(*words)
    resumed = train(f"ckpt_path={train(*words, 'epochs=1').directory}", "epochs=2")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert train(*words).summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_nccl_connects_a_world_of_one_whose_gradients_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    device = torch.device(DEVICE, 0)
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    images, targets = torch.randn(6, 4, device=device), torch.zeros(6, dtype=torch.int64, device=device)

    alone = torch.autograd.grad(F.cross_entropy(model(images), targets), list(model.parameters()))
    state = TrainState(model, torch.optim.SGD(model.parameters()), Constant(1), None, RunningMean(device))
    step = RankStep(state, Supervised(model, F.cross_entropy, lambda targets: targets))
    batch = Batch((images, targets), torch.arange(6, device=device))
    with joined(60.0, device) as world:
        step(batch, 1.0, 6, update=False)
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        assert total.item() == world.size == 1
        assert world.gather(3) == [3]
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(alone))


def test_the_peak_is_what_was_allocated_and_starts_again() -> None:
    device = torch.device(DEVICE, 0)
    reset_peak_memory(device)
    before = peak_memory(device).bytes
    big = torch.empty(2**26, dtype=torch.uint8, device=device)
    assert peak_memory(device).bytes - before >= big.nbytes
    del big
    reset_peak_memory(device)
    assert peak_memory(device).bytes < before + 2**26


def test_a_dry_run_tells_the_peak_of_a_step(run: Any) -> None:
    found = run("train", *RUN, "dry_run=true")
    assert found.status == 0, found.err
    assert "iB (most allocated for tensors on " in found.out
