"""What is refused about averaged weights, pieces of batches and batch sizes that are found."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        (("ema=0.9", "swa=0.5"), "swa", "only one average is supported"),
        (("ema=1.0",), "ema", "cannot be 1.0"),
        (("ema=0",), "ema", "cannot be 0"),
        (("swa=-1",), "swa", "cannot be -1"),
        (("swa=0.5", "evaluate.every_epochs=null"), "swa", "at evaluations"),
        (("averaging.lr_factor=0.1",), "averaging.lr_factor", "has no effect without swa"),
        (("averaging.recalibrate_batches=3", "ema=0.9"), "averaging.recalibrate_batches", "has no effect without swa"),
        (("grad_clip.agc=0",), "grad_clip.agc", "cannot be 0"),
        (("on_oom=splitt",), "on_oom", "cannot be splitt"),
        (("on_oom=split", "compile=true", "compiler.mode=reduce-overhead"), "on_oom", "replays CUDA graphs"),
        (("data.batch_size=automatic",), "data.batch_size", "cannot be automatic"),
        (("data.batch_size=0",), "data.batch_size", "cannot be 0"),
    ],
)
def test_what_cannot_be_is_a_problem_of_its_key(words: tuple[str, ...], key: str, says: str, problems: Any) -> None:
    found = problems(*words)
    assert list(found) == [key]
    assert says in found[key].message
    assert found[key].allowed


@pytest.mark.parametrize("verb", ["audit", "bench"])
def test_what_is_compared_has_a_batch_size_of_its_own(verb: str, problems: Any) -> None:
    assert list(problems("data.batch_size=auto", verb=verb)) == ["data.batch_size"]
