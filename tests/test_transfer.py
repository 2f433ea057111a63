"""What was learned on some classes helps with others."""

from __future__ import annotations

from typing import Any

import pytest

RESNET = ("model=torchvision", "model.name=resnet18", "transform=none", "evaluate.every_epochs=null")
EVEN, ODD = "+data.dataset.classes=[0,2,4,6,8]", "+data.dataset.classes=[1,3,5,7,9]"


@pytest.mark.slow
@pytest.mark.extended
def test_a_head_on_a_frozen_trunk_that_knows_other_digits_beats_the_same_steps_from_scratch(
    train: Any,
) -> None:
    first = train(*RESNET, EVEN, "epochs=3", "optimizer.lr=0.002", "evaluate.test=false")
    budget = (ODD, "epochs=null", "max_steps=5")
    start = (f"init_from={first.directory}", "model.head=linear", "freeze=all-but-head")
    tuned = train(*RESNET, *budget, *start, "optimizer.lr=0.02").summary["test"]["accuracy"]
    # Everything is trained, with the rate of the head and with a lower one, which suits it better.
    scratch = [train(*RESNET, *budget, f"optimizer.lr={lr}").summary["test"]["accuracy"] for lr in (0.005, 0.02)]
    assert tuned > max(scratch) + 0.1, f"{tuned} against {scratch}"
