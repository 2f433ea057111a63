"""What a folder of configs has Hydra build for itself: nothing, as this program starts its jobs itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SMALL = (
    *("threads=1", "logger=none", "log.progress=false", "log.curves=false", "data=synthetic"),
    *("data.dataset.samples=32", "data.image_size=8", "model=mlp", "max_steps=1", "evaluate.test=false"),
)
EVIL = """# @package _global_
hydra:
  callbacks: {x: {_target_: os.mkdir, path: hacked}}
  launcher: {_target_: os.mkdir}
  sweeper: {_target_: os.mkdir}
  job_logging: {version: 1, formatters: {x: {'()': os.mkdir, path: hacked}}}
  hydra_logging: {handlers: {x: {class: logging.FileHandler, filename: hacked}}}
"""


@pytest.mark.parametrize("words", [(), ("seed=1,2", "--multirun"), ("--cfg", "job")], ids=["run", "sweep", "shown"])
def test_a_folder_of_configs_has_hydra_build_nothing(words, accepted: Any, workdir: Path) -> None:
    path = Path("theirs/experiment/nice.yaml")
    path.parent.mkdir(parents=True)
    path.write_text(EVIL)
    accepted("train", "--config-dir=theirs", "experiment=nice", *SMALL, *words)
    assert not (workdir / "hacked").exists()


def test_versions_of_hydra_with_published_vulnerabilities_are_not_installed() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '"hydra-core>=1.3.8"' in text
