"""Each rank drops other units than the others, which depends on nothing but the seed, the batch and the rank."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from extended import some

from runner.engine.rank_step import own_draws


def test_ranks_draw_other_numbers_in_each_batch_whatever_was_drawn_before() -> None:
    torch.manual_seed(3)
    before, masks = torch.get_rng_state(), []
    places = [*itertools.product((0, 1), (0, 1, 2), (0, 1)), (1, 2, 1)]
    for place in places:
        with own_draws(*place, torch.device("cpu")):
            masks.append(F.dropout(torch.ones(64)))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(masks[-1], masks[-2])
    assert not any(torch.equal(some, other) for some, other in itertools.combinations(masks[:-1], 2))


def test_the_numbers_of_a_rank_follow_from_a_hash_that_no_version_of_python_changes() -> None:
    torch.manual_seed(3)
    with own_draws(1, 2, 1, torch.device("cpu")):
        assert torch.initial_seed() == int(hashlib.sha256(b"3 1 2 1").hexdigest()[:14], 16)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", some(["ddp", "fsdp"], 1))
def test_a_run_with_dropout_is_resumed_to_the_same_bits(train: Any, pool: Any, strategy: str) -> None:
    words = (
        "data=synthetic", "data.dataset.samples=46", "data.image_size=8", "data.batch_size=10", "epochs=2", "device=cpu",
        "model=vit_tiny", "model.dim=12", "model.depth=2", "model.dropout=0.2", "model.drop_path=0.2", "accumulate=2",
        "activation_checkpointing=true", "checkpoint.min_seconds=0", "checkpoint.every_steps=2", "checkpoint.keep=9",
        "devices=2", f"strategy={strategy}",
    )  # fmt: skip
    with pool.installed():
        whole = train(*words)
        checkpoint = whole.directory / "checkpoints" / "step_0000000002.safetensors"  # inside an epoch
        resumed = train(*words, f"ckpt_path={checkpoint}")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
