"""`eval` and `predict` on several ranks give what one process gives, and other verbs read what several ranks wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from agent import Agent
from extended import some
from PIL import Image

from rank_pool import RankPool

WORDS = (
    "data=synthetic", "data.dataset.samples=60", "data.image_size=8", "data.batch_size=8", "evaluate.batch_size=4",
    "epochs=1", "model=mlp", "model.hidden=[16]",
)  # fmt: skip


@pytest.fixture
def call(train: Callable[..., Any], run: Callable[..., Any], pool: RankPool, workdir: Path) -> Any:
    """A verb on the checkpoint of a run that `strategy=fsdp` trained on two ranks."""
    with pool.installed():
        train(*WORDS, "devices=2", "strategy=fsdp", "hydra.run.dir=run")

    def call_(verb: str, *words: str) -> Any:
        with mock.patch("runner.launch.ranks.run_ranks", pool):
            return run(verb, "ckpt_path=run", *words)

    return call_


def test_eval_gives_the_numbers_of_one_process(call: Any, workdir: Path) -> None:
    words = ("tta=hflip", "+metrics.auroc._target_=torchmetrics.classification.MulticlassAUROC")
    words = (*words, "+metrics.auroc.num_classes=10")
    for ranks in (1, 3):
        result = call("eval", *words, f"devices={ranks}", f"output=of_{ranks}")
        assert result.status == 0, result.err
    one, three = [json.loads((workdir / f"of_{ranks}/eval_test.json").read_text()) for ranks in (1, 3)]
    assert three == one
    assert "confusion" in one


@pytest.mark.extended
def test_predict_writes_the_rows_of_one_process(call: Any, workdir: Path) -> None:
    (workdir / "images").mkdir()
    for number in range(11):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(workdir / f"images/{number:02}.png")
    (workdir / "images/05.png").write_bytes(b"no image")
    words = ("input=images", "features=head", "logits=true", "evaluate.batch_size=2", "data.num_workers=0")
    for ranks in (1, 3):
        result = call("predict", *words, f"devices={ranks}", f"output=of_{ranks}.csv")
        assert result.status == 0, result.err
        assert (workdir / f"of_{ranks}.csv").read_bytes() == (workdir / "of_1.csv").read_bytes()
        assert "05.png" in (workdir / f"of_{ranks}_unreadable.txt").read_text()
        with np.load(f"of_{ranks}_features.npz") as theirs, np.load("of_1_features.npz") as ones:
            assert "head" in theirs
            assert sorted(theirs) == sorted(ones)
            assert all(np.array_equal(theirs[name], ones[name]) for name in ones)
    assert (workdir / "of_1.csv").read_text().count("\n") == 11, "a title and 10 images"
    strict = call("predict", *words, "devices=2", "strict=true", "output=strict.csv")
    assert strict.status == 2
    assert "05.png" in strict.err
    assert not (workdir / "strict.csv").exists()


@pytest.mark.extended
def test_ranks_of_torchrun_evaluate_together(call: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("eval", "ckpt_path=run", "threads=1", "json=true")
    (status, out, err), (other, silence, noise) = Agent()((*words,), (*words,))
    assert (status, other) == (0, 0), err + noise
    assert not silence + noise
    one = call("eval", "threads=1", "json=true")
    assert json.loads(out) == json.loads(one.out)
    (status, _, err), (other, *_) = Agent()(("inspect", *words[1:]), ("inspect", *words[1:]))
    assert (status, other) == (2, 2)
    assert "inspect: runs in one process" in err


OTHERS = [
    ("audit", "steps=2", "epochs=2"),
    ("bench", "toggles=[]", "steps=2", "repeats=2"),
    ("check", "only=data"),
    ("export", "format=safetensors", "output=exported"),
    ("find-lr", "num_steps=60", "output=found"),
    ("inspect", "what=layers"),
    ("pack", "output=packed"),
]


@pytest.mark.parametrize("words", some(OTHERS, 3), ids=lambda words: words[0])
def test_other_verbs_run_in_one_process_and_say_so(call: Any, words: tuple[str, ...]) -> None:
    result = call(*words, "devices=2")
    assert result.status == 0, result.err
    assert f"devices=2 has no effect on {words[0]}, which runs in one process" in result.err
