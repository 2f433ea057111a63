"""What a folder of configs has Hydra build for itself: nothing that the command line does not name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = (
    *("threads=1", "logger=none", "log.progress=false", "log.curves=false", "data=synthetic"),
    *("data.dataset.samples=32", "data.image_size=8", "model=mlp", "max_steps=1", "evaluate.test=false"),
)
EVIL = {
    "callbacks.x._target_": "callbacks: {x: {_target_: os.mkdir, path: hacked}}",
    "launcher._target_": "launcher: {_target_: os.mkdir}",
    "sweeper._target_": "sweeper: {_target_: os.mkdir}",
    "job_logging.formatters.x.()": "job_logging: {version: 1, formatters: {x: {'()': os.mkdir, path: hacked}}}",
    "job_logging.handlers.x.class": "job_logging: {version: 1, handlers: {x: {class: logging.handlers.SocketHandler, host: h}}}",
    "hydra_logging.formatters.x.()": "hydra_logging: {version: 1, formatters: {x: {'()': os.mkdir, path: hacked}}}",
    "hydra_logging.handlers.x.filename": "hydra_logging: {handlers: {x: {class: logging.FileHandler, filename: hacked}}}",
    "hydra_logging.handlers.x.stream": "hydra_logging: {handlers: {x: {class: logging.StreamHandler, stream: 'ext://evil'}}}",
}  # fmt: skip


def folder(text: str) -> str:
    """A folder of configs with a preset that has this below `hydra`."""
    path = Path("theirs/experiment/nice.yaml")
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\nhydra:\n  {text}\n")
    return "--config-dir=theirs"


@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
@pytest.mark.parametrize("key", EVIL)
def test_a_folder_of_configs_has_hydra_build_nothing(
    key: str, sweep: bool, run: Callable[..., Any], workdir: Path
) -> None:
    words = ("seed=1,2", "--multirun") if sweep else ()
    result = run("train", folder(EVIL[key]), "experiment=nice", *SMALL, *words)
    assert result.status == 2, result.out
    assert f"hydra.{key}: '" in result.err
    assert "only the command line can make Hydra build things" in result.err
    assert "Traceback" not in result.err
    assert not (workdir / "hacked").exists()


def test_plain_settings_of_hydra_in_a_folder_count(run: Callable[..., Any]) -> None:
    result = run("train", folder("job: {env_set: {MINE: '1'}}"), "experiment=nice", *SMALL)
    assert result.status == 0, result.err


def test_versions_of_hydra_with_published_vulnerabilities_are_not_installed() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '"hydra-core>=1.3.8"' in text
