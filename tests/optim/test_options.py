"""The option files of model, optimizer, scheduler and loss: they bind, repeat the defaults, and explain every key."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from extended import MARK
from extras import needs

CONF = Path(__file__).parents[2] / "conf"
FILES = [
    path for group in ("model", "optimizer", "scheduler", "loss") for path in sorted((CONF / group).glob("[!_]*.yaml"))
]
FACTS: dict[str, Any] = {
    "in_channels": 3,
    "image_size": (32, 32),
    "num_classes": 4,
    "class_counts": torch.tensor([3, 2, 1, 4]),
    "total_steps": 100,
    "steps_per_epoch": 10,
    "mode": "min",
}
_OF_EXTRAS = {
    "timm": "timm",
    "smp": "smp",
    "rtdetr_r18": "transformers",
    "transformers_detection": "transformers",
    "transformers_segmentation": "transformers",
}
_PARAMETERS = [
    pytest.param(
        path,
        marks=([needs(_OF_EXTRAS[path.stem])] if path.stem in _OF_EXTRAS else [])
        + ([MARK] if path.stem.endswith(("_detection", "rtdetr_r18")) else []),
        id=f"{path.parent.name}/{path.stem}",
    )
    for path in FILES
]
every_file = pytest.mark.parametrize("path", _PARAMETERS)


def target(options: dict[str, Any]) -> Any:
    module, _, name = options["_target_"].rpartition(".")
    found: Any = __import__(module, fromlist=[name])
    return getattr(found, name)


@every_file
def test_an_option_file_builds_what_it_names(path: Path) -> None:
    options = yaml.safe_load(path.read_text())
    build = target(options)
    del options["_target_"]
    options.pop("defaults", None)
    for name, value in FACTS.items():
        if name in inspect.signature(build).parameters and options.get(name) is None:
            options[name] = value
    if path.parent.name == "optimizer":
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = build(model.parameters(), **options)
        before = model[0].weight.clone()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert not torch.equal(before, model[0].weight)
    elif path.parent.name == "model":
        found = build(**options).eval()(torch.rand(2, 3, 32, 32))
        if path.stem.endswith(("_detection", "rtdetr_r18")):
            assert [{"boxes", "labels", "scores"} - each.keys() for each in found] == [set(), set()]
        elif path.stem in ("smp", "torchvision_segmentation", "transformers_segmentation"):
            assert (found["out"] if isinstance(found, dict) else found).shape == (2, 4, 32, 32)
        else:
            assert found.shape == (2, 4)
    elif path.parent.name == "scheduler":
        assert 0 < build(**options).factor(0) <= 1
    elif path.stem == "none":
        with pytest.raises(ValueError, match="training_step"):
            build(**options)(torch.randn(2, 4), torch.tensor([0, 1]))
    else:
        assert build(**options)(torch.randn(3, 4), torch.arange(3)).isfinite()


@every_file
def test_an_option_file_lists_every_argument_of_the_project_s_own_components(path: Path) -> None:
    options = yaml.safe_load(path.read_text())
    if options["_target_"].startswith("runner."):
        of_the_run = {"params", "fetch_weights", "clock", *(["lr"] if path.parent.name == "scheduler" else [])}
        arguments = set(inspect.signature(target(options)).parameters) - of_the_run
        assert set(options) - {"_target_", "defaults"} == arguments
