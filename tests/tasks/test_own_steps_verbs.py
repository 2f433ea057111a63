"""Verbs and settings that take tasks with their own steps, and samples of any kind, through the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extended import some

MODULE = '''
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


class Digits(torch.utils.data.Dataset):
    def __init__(self, samples=96):
        self.vectors = torch.from_numpy(load_digits().data[:samples] / 16).float()

    def __len__(self):
        return len(self.vectors)

    def __getitem__(self, index):
        return self.vectors[index]


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 2 * latent), nn.Linear(latent, 64)

    def forward(self, vectors):
        mean, log_variance = self.encoder(vectors).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(drawn), mean, log_variance


class Reconstruction:
    def training_step(self, modules, batch):
        logits, mean, log_variance = modules["model"](batch)
        error = F.binary_cross_entropy_with_logits(logits, batch, reduction="none").sum(1).mean()
        divergence = (-0.5 * (1 + log_variance - mean.square() - log_variance.exp())).sum(1).mean()
        return {"loss": error + divergence, "divergence": divergence}

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)["loss"]}


class Scenes(Digits):
    """Images of bytes (1, 8, 8) with some boxes each."""

    def __getitem__(self, index):
        image = (self.vectors[index] * 255).to(torch.uint8).view(1, 8, 8)
        return {"image": image, "boxes": torch.full((1 + index % 3, 4), float(index)), "name": f"scene {index}"}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(64, 8)

    def forward(self, images):
        return self.features(images.flatten(1))


class CountBoxes:
    @staticmethod
    def collate(samples):
        return {"image": torch.stack([each["image"] for each in samples]), "boxes": [each["boxes"] for each in samples],
                "name": [each["name"] for each in samples]}

    def modules(self, model, loss):
        return {"head": nn.Linear(8, 3)}

    def training_step(self, modules, batch):
        targets = torch.tensor([len(boxes) - 1 for boxes in batch["boxes"]])
        return F.cross_entropy(modules["head"](modules["model"](batch["image"])), targets)

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}


class Contrast:
    """Pulls two noisy views of an image together."""

    def outputs(self, classes):
        return 10

    def modules(self, model, loss):
        return {"projection": nn.Linear(10, 4)}

    def training_step(self, modules, batch):
        views = [batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(2)]
        one, other = (F.normalize(modules["projection"](modules["model"](view))) for view in views)
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}


class Restless(Digits):
    """Gives other vectors each time."""

    def __getitem__(self, index):
        return {"vector": self.vectors[index] + torch.rand(64, generator=torch.Generator().manual_seed(torch.seed()))}


class OfFields(Reconstruction):
    def training_step(self, modules, batch):
        return super().training_step(modules, batch["vector"])


class Pieces(Digits):
    """The last samples are shorter, as the last pieces of texts are."""

    def __getitem__(self, index):
        return self.vectors[index][: 64 if index < 64 else 32]


def pieces():
    return {"train": Pieces(), "val": torch.utils.data.Subset(Digits(112), range(96, 112))}


class Padded(Reconstruction):
    def training_step(self, modules, batch):
        return super().training_step(modules, F.pad(batch, (0, 64 - batch.shape[1])))


class Normed(VAE):
    """Blocks whose branches end in a norm, and that can be computed again."""

    def __init__(self, latent=4):
        super().__init__(latent)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, vectors):
        for block in self.blocks:
            vectors = block(vectors)
        return super().forward(vectors)


class Block(nn.Module):
    has_skip = True

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.BatchNorm1d(64)

    def forward(self, x):
        return x + self.norm(self.second(F.relu(self.first(x))))
'''
COMMON = (
    "transform=none", "~model.dropout", "~model.width", "epochs=2", "data.batch_size=16", "data.num_workers=0",
    "scheduler=constant", "loss=none",
)  # fmt: skip
VECTORS = (
    *COMMON, "data.images=[]", "data.dataset._target_=own_steps.Digits", "model._target_=own_steps.VAE",
    "task._target_=own_steps.Reconstruction",
)  # fmt: skip
BOXES = (
    *COMMON, "data=own", "data.images=[image]", "data.dataset._target_=own_steps.Scenes",
    "model._target_=own_steps.Pooled", "task._target_=own_steps.CountBoxes",
)  # fmt: skip
NORMED = (*VECTORS, "model._target_=own_steps.Normed")


@pytest.fixture(autouse=True)
def module(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "own_steps.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(workdir)
    monkeypatch.setenv("RUNNER_TRUST", "own_steps")


@pytest.fixture
def record(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*words: str, status: int = 0) -> Any:
        result = run(*words, "threads=1", "logger=none", "json=true")
        assert result.status == status, result.err + result.out
        return json.loads(result.out)

    return call


@pytest.mark.extended
@pytest.mark.parametrize("words", some([VECTORS, BOXES], 0), ids=["vectors", "boxes"])
def test_bench_and_profile_measure_steps_of_a_task(record: Callable[..., Any], words: tuple[str, ...]) -> None:
    found = record("bench", *words, "toggles=[activation_checkpointing,data.num_workers]", "repeats=2")
    assert found["baseline"]["samples_per_s"]["median"] > 0
    profiled = record("profile", *words, "steps=4", "trace_steps=0")
    assert profiled["samples_per_s"] > 0
    assert min(profiled["shares"].values()) > 0


@pytest.mark.parametrize("words", [VECTORS, BOXES], ids=["vectors", "boxes"])
def test_audit_compares_steps_of_a_task(record: Callable[..., Any], words: tuple[str, ...]) -> None:
    found = record("audit", *words, "steps=2", "vary={data.num_workers: [0, 1]}")
    assert found["same"], found["difference"]
    assert found["step"] == 2


def test_a_dry_run_tries_a_step(run: Callable[..., Any]) -> None:
    result = run("train", *VECTORS, "dry_run=true", "devices=2", "threads=1", "logger=none")
    assert result.status == 0, result.err
    assert "a step with batches of 8, of one of 2 ranks: " in result.out


def test_an_automatic_batch_size_fits_the_samples(train: Callable[..., Any]) -> None:
    result = train(*NORMED, "data.batch_size=auto", "epochs=1")
    assert "64 samples" in result.out  # the largest power of two among 67


def test_activation_checkpointing_keeps_the_bits(train: Callable[..., Any]) -> None:
    plain = train(*NORMED, "epochs=1")
    again = train(*NORMED, "epochs=1", "activation_checkpointing=true")
    assert again.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert "recomputed in 4 blocks" in again.out
    assert "has no effect" not in again.err


def test_initial_weights_are_drawn_and_residual_blocks_start_as_shortcuts(
    train: Callable[..., Any], run: Callable[..., Any]
) -> None:
    from safetensors.torch import load_file

    result = train(*NORMED, "max_steps=1", "optimizer.lr=1e-9", "init=[orthogonal,zero_gamma]", "scheduler=constant")
    weights = load_file(result.directory / "checkpoints" / "last.safetensors")
    assert weights["blocks.0.norm.weight"].abs().max() < 1e-6
    rows = weights["encoder.weight"]
    assert (rows @ rows.T).diagonal().sub(1).abs().max() < 1e-4
    prior = run("train", *VECTORS, "init=prior_bias", "threads=1", "logger=none")
    assert prior.status == 2
    assert "init: prior_bias does not apply" in prior.err


@pytest.mark.extended
def test_check_finds_nothing_in_healthy_tasks_and_skips_what_does_not_apply(record: Callable[..., Any]) -> None:
    contrast = ("data=digits", "transform=none", "model=mlp", "model.hidden=[32]", "loss=none")
    of_pairs = (*contrast, "task._target_=own_steps.Contrast", "optimizer.lr=0.001")
    texts = (*VECTORS, "data.dataset._target_=own_steps.pieces", "task._target_=own_steps.Padded", "data.shuffle=false")
    for words, least, skipped in (
        (VECTORS, {"readable", "duplicates", "step-size"}, ("normalization", "not pairs of image and target")),
        (texts, {"readable", "evaluation-transform", "step-size"}, ("logits", "not pairs of image and target")),
        (BOXES, {"readable", "gradient-scale", "step-size"}, ("logits", "not pairs of image and target")),
        (of_pairs, {"normalization", "class-balance", "step-size"}, ("logits", "the task computes its steps itself")),
    ):
        checks = {each["name"]: each for each in record("check", *words)["checks"]}
        assert {name: each["evidence"] for name, each in checks.items() if each["status"] in ("fail", "warn")} == {}
        assert least <= {name for name, each in checks.items() if each["status"] == "pass"}
        assert (checks[skipped[0]]["status"], skipped[1] in checks[skipped[0]]["evidence"]) == ("skip", True)
