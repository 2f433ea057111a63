"""`check` on data that is read slowly: a fair sample of it, inside the time budget, and a report of what was not checked."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))

from runner.verbs.check.run import OutOfTime, time_limit
from runner.verbs.check.split_stats import stratified_order
from runner.verbs.check.table import CHECKS, turn

CLASSES, EACH = 5, 80


class Ordered(Dataset[Any]):
    """Samples in the order of their classes, as in a folder, each of which takes a while to read."""

    def __init__(self, seconds: float, stuck: int | None = None, known: bool = True) -> None:
        self.seconds, self.stuck = seconds, stuck
        self.labels = torch.arange(CLASSES).repeat_interleave(EACH)
        self.classes = [f"kind{number}" for number in range(CLASSES)]
        if known:
            self.targets = self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(60 if index == self.stuck else self.seconds)
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=generator)
        image[int(self.labels[index]) % 3] //= 2
        return image, int(self.labels[index])


class Slow(nn.Module):
    """A model of which each call takes a while."""

    def __init__(self, num_classes: int, seconds: float = 0.0, **unused: Any) -> None:
        super().__init__()
        self.seconds, self.head = seconds, nn.Linear(3 * 16 * 16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.head(images.flatten(1))


WORDS = (
    *("check", "json=true", "threads=1", "device=cpu", "data=digits", "data.split.val=0.2", "data.batch_size=16"),
    *("data.normalize.mean=[0.5]", "data.normalize.std=[0.3]", "transform=none", "epochs=1", "data.num_workers=0"),
)


def data(seconds: float, **more: Any) -> str:
    extra = "".join(f", {key}: {json.dumps(value)}" for key, value in more.items())
    return f"data.dataset={{_target_: test_check_budget.Ordered, seconds: {seconds}{extra}}}"


def model(seconds: float = 0.0) -> str:
    return f"model={{_target_: test_check_budget.Slow, num_classes: null, seconds: {seconds}}}"


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import before the clock starts what the first call of a process would import."""
    for name in ("torch._dynamo", "sklearn.linear_model", "sklearn.metrics", "scipy.stats"):
        importlib.import_module(name)


@pytest.fixture
def check(run: Callable[..., Any]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit status of a call and the object that it prints."""

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        result = run(*WORDS, *words)
        assert result.out, result.err
        found = json.loads(result.out)
        found["checks"] = {each["name"]: each for each in found["checks"]}
        return result.status, found

    return call


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
def test_a_sample_of_a_folder_has_every_class(check: Callable[..., Any], known: bool) -> None:
    status, found = check(
        data(0, known=known), model(), "samples=40", "only=[image-range,class-balance,missing-classes]"
    )
    assert status == 0
    seen = found["seen"]
    assert {name: each["read"] for name, each in seen.items()} == {"train": 40, "val": 40, "test": 40}
    assert set(seen["train"]["classes"]) == {f"kind{number}" for number in range(CLASSES)}
    low, high = (8, 8) if known else (2, 20)
    assert all(low <= count <= high for count in seen["train"]["classes"].values()), seen


def test_a_check_of_too_few_images_does_not_pass(check: Callable[..., Any]) -> None:
    status, found = check(data(0.05), model(), "budget_s=1.5", "only=[readable,image-range,class-balance,logits]")
    checks = found["checks"]
    assert status == 5
    assert found["ok"]
    assert not found["complete"]
    assert found["seen"]["train"]["read"] < 40
    for name in ("readable", "image-range"):
        assert (checks[name]["status"], checks[name]["lack"]) == ("skip", "images"), checks[name]
        assert f"saw only {found['seen']['train']['read']} of 240 images of train" in checks[name]["evidence"]
    assert checks["class-balance"]["status"] == "pass", "the labels are known without reading"
    assert checks["logits"]["status"] == "pass", "a batch is enough for it"


def test_a_fault_in_a_few_images_is_reported(check: Callable[..., Any]) -> None:
    wrong = "data.normalize={mean: [127.0], std: [60.0]}"
    status, found = check(data(0.05), model(), wrong, "budget_s=1.5", "only=[normalization]")
    assert status == 1
    assert found["checks"]["normalization"]["status"] == "fail"


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        ((data(0.0), model(0.15)), "overfit"),
        ((data(0.05), model(0.05)), "overfit"),
        ((data(0.0, stuck=3), model()), "image-range"),
    ],
    ids=["slow model", "slow both", "a file that hangs"],
)
def test_the_budget_holds(check: Callable[..., Any], words: tuple[str, ...], lacks: str) -> None:
    status, found = check(*words, "budget_s=2")
    assert status == 5
    assert found["seconds"] < 2.4
    assert found["checks"][lacks]["lack"], found["checks"][lacks]
    assert all(each["status"] in ("pass", "warn", "skip") for each in found["checks"].values())


def test_settings_are_checked_first_and_without_reading_images(check: Callable[..., Any]) -> None:
    names = {"optimizer-settings", "schedule", "averaging", "norm-statistics", "dropout-rate", "epoch-length"}
    assert {each.name for each in sorted(CHECKS, key=turn)[: len(names)]} == names
    status, found = check(data(0.0), model(), "budget_s=300", "ema=0.9999", f"only=[{','.join(names)}]")
    assert (status, found["seen"]) == (0, {})
    assert found["checks"]["averaging"]["status"] == "warn"


def test_the_last_line_says_what_was_not_run(run: Callable[..., Any]) -> None:
    words = [word for word in WORDS if word != "json=true"]
    result = run(*words, data(0.05), model(0.5), "budget_s=2", "only=[image-range,overfit]")
    assert result.status == 5
    *_, test, last = result.out.strip().splitlines()
    assert test.startswith("saw ")
    assert "of 80 images of test: kind0 " in test
    assert "1 not run for lack of time (overfit)" in last
    assert "1 not decided, as too few images were seen (image-range)" in last


def test_code_is_stopped_only_if_it_takes_too_long() -> None:
    with pytest.raises(OutOfTime), time_limit(0.05):
        time.sleep(5)
    with time_limit(5):
        pass
    time.sleep(0.01)


def test_an_import_is_finished_before_code_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "__init__.py").write_text("import time\nimport slow_package.part\ntime.sleep(0.2)\n")
    (package / "part.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: [sys.modules.pop(name, None) for name in ("slow_package", "slow_package.part")])

    def work() -> None:
        importlib.import_module("slow_package")
        time.sleep(5)

    with pytest.raises(OutOfTime), time_limit(0.05):
        work()
    assert importlib.import_module("slow_package").part
