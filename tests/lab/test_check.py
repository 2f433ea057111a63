"""`check` as it is called: what it prints, its exit status, and that it leaves everything as it was."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))

from runner.lab.check.run import CHECKS
from runner.lab.check.sample import stratified_order

QUICK = ("check", "threads=1", "device=cpu", "model=mlp", "model.hidden=[16]")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "verbs" / "check.md"


def test_a_default_run_passes_and_every_check_has_a_line(run: Any, workdir: Path) -> None:
    result = run("check", "threads=1", "device=cpu")
    assert result.status == 0, result.out
    for each in CHECKS:
        line = rf"^({each.group} +{each.name} +pass +\S|skipped \(.+\): (.+, )?{each.name}(, .+)?$)"
        assert re.search(line, result.out, re.MULTILINE), each.name
    assert re.search(r"^\d+ passed, \d+ skipped in \d+\.\d s$", result.out.strip().splitlines()[-1])
    assert not list(workdir.iterdir()), "nothing is written"


def test_a_warning_fails_only_with_strict(run: Any) -> None:
    words = (*QUICK, "optimizer.lr=4e-7", "only=[step-size,image-range]")
    assert run(*words).status == 0
    strict = run(*words, "--strict")
    assert strict.status == 1
    assert "1 warned (step-size), 2 passed in" in strict.out
    assert "fix: a larger optimizer.lr" in strict.out


def test_checks_are_chosen_by_name_and_by_group(run: Any) -> None:
    result = run(*QUICK, "only=[labels,logits]", "skip=[near-duplicates]", "--json")
    groups = {each.name for each in CHECKS if each.group == "labels"} - {"near-duplicates"}
    assert {each["name"] for each in json.loads(result.out)["checks"]} == {"build", "logits", *groups}
    assert "check of digits" in result.err, "what is not JSON goes to standard error"


def test_check_refuses_a_config_like_train(run: Any) -> None:
    told = [run(verb, "epoch=3", "threads=1") for verb in ("train", "check")]
    assert [each.status for each in told] == [2, 2]
    assert told[0].err == told[1].err


@pytest.mark.parametrize(
    ("words", "evidence", "later"),
    [
        ((*QUICK[3:], "task=regression", "loss=cross_entropy"), "loss", ["readable"]),
        (("data=image_folder", "data.root=nowhere"), "nowhere", []),
    ],
    ids=["of the model", "of the data"],
)
def test_a_failed_build_fails_but_what_was_built_is_checked(
    run: Any, words: tuple[str, ...], evidence: str, later: list[str]
) -> None:
    result = run(*QUICK[:3], *words, "json=true", "only=[data,step]")
    assert result.status == 1
    checks = {each["name"]: each for each in json.loads(result.out)["checks"]}
    assert checks["build"]["status"] == "fail"
    assert evidence in checks["build"]["evidence"]
    assert [name for name in ("readable", "step-size") if name in checks] == later
    shown = run(*QUICK[:3], *words).out
    assert "1 failed (build)" in shown
    assert "checks were not run, as what they look at could not be built" in shown


def test_after_max_time_the_data_are_checked_and_nothing_else(run: Any) -> None:
    result = run(*QUICK[:3], "max_time=1e-9", "json=true", "only=[data,labels,step-size,logits]")
    found = {each["name"]: each for each in json.loads(result.out)["checks"]}
    late = [name for name, each in found.items() if each["evidence"].startswith("not begun within max_time=")]
    assert late == ["logits", "step-size"]
    assert {found[name]["status"] for name in late} == {"skip"}
    assert {found[name]["status"] for name in ("build", "readable", "leakage", "target-range")} == {"pass"}


def test_the_docs_list_every_check_and_what_it_finds() -> None:
    cells = re.findall(r"^\| (\w+) \| `([\w-]+)` \| (.*?) \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row for row in cells if row[0] != "config"] == [(each.group, each.name, each.finds) for each in CHECKS]


def test_a_training_after_checks_is_the_one_without_them(run: Any, train: Any) -> None:
    words = ("model=mlp", "model.hidden=[16]", "model.dropout=0.1", "epochs=1", "evaluate.test=false")
    before = train(*words).summary["weights_sha256"]
    assert run("check", "threads=1", *words, "only=[model,loss,step]", "skip=[zero-input]").status == 0
    assert train(*words).summary["weights_sha256"] == before


def test_every_check_begins_where_the_run_would(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.checkpoint.weights import weights_sha256
    from runner.lab.check import run as check_run

    seen: set[str] = set()
    real = check_run.run_check

    def spying(each: Any, subject: Any, broken: dict[str, str]) -> Any:
        verdict = real(each, subject, broken)
        seen.add(
            weights_sha256(subject.model.state_dict())
            + str(subject.training.state.optimizer.state_dict()["state"].keys())
        )
        return verdict

    monkeypatch.setattr(check_run, "run_check", spying)
    assert run(*QUICK, "skip=[zero-input,baselines]", "scheduler=constant").status == 0
    assert len(seen) == 1


CLASSES, EACH = 5, 80


class Ordered(Dataset[Any]):
    """Samples in the order of their classes, as in a folder."""

    def __init__(self, known: bool = True) -> None:
        self.labels = torch.arange(CLASSES).repeat_interleave(EACH)
        self.classes = [f"kind{number}" for number in range(CLASSES)]
        if known:
            self.targets = self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=generator)
        image[int(self.labels[index]) % 3] //= 2
        return image, int(self.labels[index])


SAMPLED = (
    *("check", "threads=1", "device=cpu", "data=digits", "data.split.val=0.2", "data.batch_size=16", "model=mlp"),
    *("data.normalize.mean=[0.5]", "data.normalize.std=[0.3]", "transform=none", "epochs=1", "data.num_workers=0"),
)


def data(known: bool = True) -> str:
    return f"data.dataset={{_target_: test_check.Ordered, known: {str(known).lower()}}}"


def test_every_prefix_of_the_order_is_a_stratified_random_sample() -> None:
    targets = torch.tensor([0] * 600 + [1] * 300 + [7] * 90 + [2] * 10)
    order = stratified_order(targets, len(targets), 0)
    assert sorted(order.tolist()) == list(range(1000))
    assert set(targets[order[:4]].tolist()) == {0, 1, 2, 7}
    for count in (50, 100, 500):
        seen = torch.bincount(targets[order[:count]], minlength=8) / count
        assert (seen[[0, 1, 7, 2]] - torch.tensor([0.6, 0.3, 0.09, 0.01])).abs().max() < 0.03
    places = order[:100][targets[order[:100]] == 0]
    assert places.float().mean() == pytest.approx(300, abs=80)
    assert (places.diff() < 0).any(), "not in the order of the files"
    assert torch.equal(order, stratified_order(targets, len(targets), 0))
    assert not torch.equal(order, stratified_order(targets, len(targets), 1))
    assert sorted(stratified_order(None, 5, 0).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("known", [True, False], ids=["targets known", "targets read"])
def test_a_sample_of_a_folder_has_every_class(run: Any, known: bool) -> None:
    only = "only=[image-range,class-balance,missing-classes]"
    result = run(*SAMPLED, "json=true", data(known), "samples=40", only)
    assert result.status == 0, result.err
    seen = json.loads(result.out)["seen"]
    assert {name: each["read"] for name, each in seen.items()} == {"train": 40, "val": 40, "test": 40}
    assert set(seen["train"]["classes"]) == {f"kind{number}" for number in range(CLASSES)}
    low, high = (8, 8) if known else (2, 20)
    assert all(low <= count <= high for count in seen["train"]["classes"].values()), seen
    if known:
        *_, test, last = run(*SAMPLED, data(), "samples=40", "only=[image-range]").out.strip().splitlines()
        assert test == "saw 40 of 80 samples of test: " + ", ".join(f"kind{number} 8" for number in range(CLASSES))
        assert last.startswith("2 passed in ")


def test_settings_are_checked_without_reading_images(run: Any) -> None:
    names = ("optimizer-settings", "schedule", "averaging", "norm-statistics", "dropout-rate", "epoch-length")
    result = run(*SAMPLED, "json=true", data(), "ema=0.9999", "averaging.warmup=false", f"only=[{','.join(names)}]")
    found = json.loads(result.out)
    assert (result.status, found["seen"]) == (1, {})
    assert {each["name"]: each["status"] for each in found["checks"]}["averaging"] == "fail"
