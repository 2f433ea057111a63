"""data.on_error=skip with several ranks: the same replacements, one count, and one limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

MINE = """
from runner.data.sources.folders import image_folder

class Picky:
    def __init__(self, inner): self.inner, self.classes, self.targets = inner, inner.classes, inner.targets
    def __len__(self): return len(self.inner)
    def path(self, index): return f"picture {index}"
    def __getitem__(self, index):
        if index % 15 == 4: raise ValueError("not this one")
        return self.inner[index]

def picky(root, image_size=None): return {name: Picky(split) for name, split in image_folder(root, image_size).items()}
"""
WORDS = (
    "data=image_folder", "data.dataset._target_=picky.picky", "data.root=images", "data.image_size=4", "data.batch_size=8",
    "epochs=2", "model=mlp", "model.hidden=[8]", "data.split.test=0", "data.split.val=0.2", "data.normalize.mean=[0.5]",
    "data.normalize.std=[0.25]", "dtype=float64", "device=cpu", "log.every_steps=1", "checkpoint.min_seconds=0",
    "checkpoint.every_steps=4", "checkpoint.keep=9", "data.on_error=skip", "trust=[picky]",
)  # fmt: skip


@pytest.fixture
def here(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workdir / "picky.py").write_text(MINE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(workdir))
    monkeypatch.syspath_prepend(str(workdir))
    for number in range(60):
        path = workdir / "images" / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return workdir


def weights(run: Any) -> dict[str, Any]:
    return load_file(run.directory / "checkpoints" / "last.safetensors")


@pytest.mark.extended
@pytest.mark.slow
def test_ranks_and_workers_skip_the_same_samples_and_count_them_once(
    here: Path, train: Callable[..., Any], run: Callable[..., Any], pool: Any
) -> None:
    one = train(*WORDS, "hydra.run.dir=one")
    with pool.installed():
        two = train(*WORDS, "devices=2", "data.num_workers=1", "hydra.run.dir=two")
    assert one.summary["skipped"] == two.summary["skipped"] == 4
    for name, value in weights(one).items():
        np.testing.assert_allclose(weights(two)[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    checkpoint = "two/checkpoints/step_0000000004.safetensors"
    with pool.installed():
        rest = train(f"ckpt_path={checkpoint}", "data.num_workers=0", "trust=[picky]", "hydra.run.dir=rest")
    assert rest.summary["weights_sha256"] == two.summary["weights_sha256"]

    refused = run("train", *WORDS, "devices=2", "data.max_skipped=0", "data.num_workers=0", "logger=none")
    assert refused.status == 2
    assert "data.max_skipped: 1 of the 48 samples of 'train' cannot be read" in refused.err + refused.out
    assert "ValueError: not this one" in refused.err + refused.out
