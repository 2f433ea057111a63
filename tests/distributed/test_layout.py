"""The formulas of a layout give what a hand computation gives, and `dry_run=true` prints them and writes nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest

from runner.config.resolve import resolve_config
from runner.config.schema.train import Train
from runner.distributed.layout import (
    Traffic,
    Weight,
    ddp_memory,
    ddp_traffic,
    fsdp_memory,
    fsdp_traffic,
    samples_of_ranks,
)
from runner.run.dry_run import predict
from runner.train import build_run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import scale_memory

# A block of 10 x 4 = 160 bytes and another of 3 x 4 = 48, a head of 2 x 4 = 32, and 20 frozen bytes; Adam keeps two moments.
WEIGHTS = (
    Weight((10, 4), divided=320, whole=4, unit="blocks.0"),
    Weight((3, 4), divided=96, whole=4, unit="blocks.1"),
    Weight((2, 4), divided=64, whole=4),
    Weight((5,), trained=False),
)
# model=mlp model.hidden=[16] on 8x8 digits with 10 classes: 64 x 16 + 16 and 16 x 10 + 10 weights of 4 bytes.
MLP = ("model=mlp", "model.hidden=[16]", "model.dropout=0", "threads=1", "logger=none", "dry_run=true")
MLP_BYTES = 4 * (64 * 16 + 16 + 16 * 10 + 10)


def layout_of(compose: Callable[..., Any], *words: str) -> Any:
    return predict(resolve_config(compose(*MLP, *words), Train), build_run)


@pytest.mark.parametrize(
    ("batch", "ranks", "found"), [(64, 64, (1, 1)), (64, 3, (21, 22)), (5, 8, (0, 1)), (7, 1, (7, 7))]
)
def test_samples_of_a_rank(batch: int, ranks: int, found: tuple[int, int]) -> None:
    assert samples_of_ranks(batch, ranks) == found


def test_every_rank_of_ddp_holds_everything() -> None:
    memory = ddp_memory(WEIGHTS, buffers=7, averaged=True, activations=100)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (260, 240, 492)
    assert (memory.buffers, memory.average, memory.activations, memory.gathered) == (7, 240, 100, 0)
    assert memory.total == 260 + 240 + 492 + 7 + 240 + 100


def test_a_ring_moves_the_gradients_nearly_twice() -> None:
    assert ddp_traffic(WEIGHTS, 4, buffers=7) == Traffic(all_reduce=360, broadcast=7)
    assert ddp_traffic(WEIGHTS, 1, buffers=7).total == 0


def test_shards_of_fsdp_are_padded_in_their_first_dimension() -> None:
    # Of 10 rows the largest of 4 shards has 3, of 3, 2 and 5 rows 1, 1 and 2.
    assert [weight.share(4) for weight in WEIGHTS] == [48, 16, 16, 8]
    assert Weight(()).share(4) == 4
    assert Weight((0, 3)).share(4) == 0
    memory = fsdp_memory(WEIGHTS, 4, buffers=7, averaged=True, activations=100)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (88, 80, 160 + 12)
    assert (memory.buffers, memory.average, memory.activations) == (7, 80, 100)
    # The rest (32 + 20), the largest block, and its gradients; without resharding all parameters.
    assert memory.gathered == 52 + 160 + 160
    assert fsdp_memory(WEIGHTS, 4, reshard=False).gathered == 260 + 160
    assert fsdp_memory(WEIGHTS, 4, batches=2).gathered == 52 + 160 + 240


def test_fsdp_gathers_parameters_twice_and_scatters_gradients_once() -> None:
    # N - 1 shards each: 88 in forward and in backward, 80 of gradients.
    assert fsdp_traffic(WEIGHTS, 4) == Traffic(all_gather=3 * 88 * 2, reduce_scatter=240)
    assert fsdp_traffic(WEIGHTS, 4, reshard=False) == Traffic(all_gather=3 * 88, reduce_scatter=240)
    assert fsdp_traffic(WEIGHTS, 4, batches=2) == Traffic(all_gather=3 * 88 * 4, reduce_scatter=240)
    assert fsdp_traffic(WEIGHTS, 4, replicas=2) == Traffic(all_reduce=80, all_gather=3 * 88 * 2, reduce_scatter=240)
    assert fsdp_traffic(WEIGHTS, 1).total == 0


def test_the_sizes_of_a_real_model(compose: Callable[..., Any]) -> None:
    found = layout_of(compose, "devices=4")
    assert (found.ranks, found.strategy, found.batch, found.samples) == (4, "ddp", 64, (16, 16))
    assert found.memory.parameters == found.memory.gradients == MLP_BYTES
    assert found.memory.optimizer == 2 * MLP_BYTES + 4 * 4  # AdamW: two moments, and a counter for each tensor
    assert found.traffic.total == round(1.5 * MLP_BYTES)
    sharded = layout_of(compose, "devices=4", "strategy=fsdp", "ema=0.9", "accumulate=2")
    shards = MLP_BYTES - 4 * 10 + 4 * 12  # 16 rows divide by 4; 10 of the last layer's bias and weight do not
    shards = (shards + 4 * 16 * 2) // 4
    assert sharded.memory.parameters == sharded.memory.average == shards
    assert sharded.traffic == Traffic(all_gather=3 * shards * 2 * 2, reduce_scatter=3 * shards)
    kept = layout_of(compose, "devices=4", "strategy=fsdp", "fsdp.reshard_after_forward=false", "fsdp.replicas=2")
    assert kept.memory.parameters == MLP_BYTES // 2
    assert kept.traffic == Traffic(all_reduce=MLP_BYTES // 2, all_gather=MLP_BYTES // 2, reduce_scatter=MLP_BYTES // 2)
    assert layout_of(compose, "devices=2").memory.activations > found.memory.activations


@pytest.mark.parametrize(("strategy", "kind"), [("fsdp", "reduce-scatter"), ("auto", "all-reduce")])
def test_the_table_is_printed_and_nothing_is_written(run: Callable[..., Any], strategy: str, kind: str) -> None:
    found = run("train", *MLP, "devices=64", f"strategy={strategy}")
    assert found.status == 0, found.err
    for pattern in (
        r"digits on 64 ranks, strategy (fsdp|ddp)",
        r"samples +1 to 1 +of each batch of 64",
        r"(?m)^parameters +\d",
        r"(?m)^optimizer state +\d",
        r"(?m)^total +\d",
        rf"sent per step .*{kind}",
    ):
        assert re.search(pattern, found.out), pattern + found.out
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (("devices=2", "strategy=single"), "strategy", "devices=1"),
        (("devices=3", "strategy=fsdp", "fsdp.replicas=2"), "fsdp.replicas", "a divisor of 3"),
        (("devices=64", "model=resnet18_cifar", "data=synthetic", "data.image_size=8"), "data.batch_size", "a larger"),
    ],
)
def test_what_would_fail_is_a_sentence(run: Callable[..., Any], words: tuple[str, ...], key: str, fix: str) -> None:
    found = run("train", "threads=1", "dry_run=true", *words)
    assert found.status == 2
    assert f"{key}:" in found.err
    assert fix in found.err
    assert list(Path().iterdir()) == []


def test_other_verbs_refuse_a_dry_run(problems: Callable[..., Any]) -> None:
    assert "is for train" in problems("dry_run=true", verb="bench")["dry_run"].message


def test_what_has_no_effect_is_said(compose: Callable[..., Any]) -> None:
    warnings = "\n".join(layout_of(compose, "devices=128", "compile=true").warnings)
    assert "compile has no effect on the measured step" in warnings
    assert "data.batch_size=64 is smaller than 128 ranks" in warnings


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bytes sent are counted by /proc")
def test_real_ranks_report_what_was_predicted(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_forked(command: list[str], env: dict[str, str], **_: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", env["PYTHONPATH"])
            return forked.run(command[command.index("runner") + 1 :])

    monkeypatch.setattr(scale_memory.subprocess, "run", run_forked)
    words = ("model=small_cnn", "devices=2", "device=cpu", *scale_memory.DATA, *scale_memory.QUIET)
    rows = scale_memory.compare((*words, "evaluate.every_epochs=null", "evaluate.test=false"))
    assert {"parameters", "gradients", "optimizer", "activations", "total", "sent"} <= {name for name, *_ in rows}
    assert {name: ratio for name, _, _, ratio in rows if abs(ratio - 1) > scale_memory.TOLERANCE} == {}
