"""A run is composed once, jobs of a sweep share what is merged, and Hydra builds nothing for itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.hydra import Hydra

from runner.base.errors import ConfigError
from runner.config.app import application, merged_once
from runner.config.composition import Composition
from runner.config.load import compose as compose_first
from runner.config.overrides import check_overrides
from runner.config.schema import VERBS
from runner.config.sources import Sources

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
JOBS = (
    ["model=mlp", "seed=1"],
    ["model=mlp", "seed=2", "optimizer.lr=0.5"],
    ["model=small_cnn", "+amp=true", "~logger"],
    ["model=mlp", "hydra.searchpath=[file://mine]", "data=small"],
    ["model=mlp", "seed=3"],
)


def test_a_run_is_composed_once(compose: Any) -> None:
    with mock.patch.object(Hydra, "compose_config", autospec=True, side_effect=Hydra.compose_config) as composed:
        assert compose("seed=12345").values["seed"] == 12345
    composed.assert_called_once()


def composed(sources: Sources, words: list[str]) -> Any:
    checked = check_overrides(words, VERBS["train"], sources, False)
    return compose_first(Composition(VERBS["train"], "train", sources), checked)


def test_what_is_merged_once_is_what_hydra_composes(workdir: Path) -> None:
    (workdir / "mine" / "data").mkdir(parents=True)
    (workdir / "mine" / "data" / "small.yaml").write_text("# Mine.\ndefaults:\n  - digits\n  - _self_\nbatch_size: 8\n")
    sources = Sources([workdir / "mine"])

    def call() -> list[Any]:
        with application("train", sources):
            return [copy.deepcopy(composed(sources, words)) for words in JOBS]

    plain, before = call(), config_loader_impl.create_defaults_list
    with merged_once():
        assert call() == plain
        assert call() == plain
    assert config_loader_impl.create_defaults_list is before
    assert [job.values["seed"] for job in plain] == [1, 2, 0, 0, 3]


def test_a_launcher_is_resolved_for_a_sweep_alone(compose: Any, workdir: Path) -> None:
    path = workdir / "mine/hydra/launcher/odd.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("_target_: own.Launcher\nhost: ${oc.env:NO_SUCH_VARIABLE}\n")
    words = ("--config-dir=mine", "hydra/launcher=odd")
    assert compose(*words).hydra == {}
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.host: .*NO_SUCH_VARIABLE"):
        compose(*words, "--multirun", "seed=1,2")


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
