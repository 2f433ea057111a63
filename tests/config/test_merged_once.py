"""Compositions that take their files from what was merged before are those that Hydra makes without it."""

from __future__ import annotations

import copy

import pytest
from hydra._internal import config_loader_impl

from runner.config import overrides
from runner.config.app import application, merged_once
from runner.config.load import compose, sources_of
from runner.config.overrides import parse_flags
from runner.config.schema import VERBS

COMMANDS = (
    ["model=mlp", "seed=1"],
    ["model=mlp", "seed=2", "optimizer.lr=0.5"],
    ["model=small_cnn", "+amp=true", "~logger"],
    ["model=mlp", "hydra.searchpath=[file://mine]", "data=small"],
    ["model=mlp", "seed=3"],
)


@pytest.fixture
def composed(workdir):
    """The values, overrides and choices of each command, inside one application."""
    (workdir / "mine" / "data").mkdir(parents=True)
    (workdir / "mine" / "data" / "small.yaml").write_text("# Mine.\ndefaults:\n  - digits\n  - _self_\nbatch_size: 8\n")

    def call():
        schema, found = VERBS["train"], []
        sources = sources_of(parse_flags(COMMANDS[3], []))
        with application("train", sources):
            for words in COMMANDS:
                checked = overrides.check_overrides(words, schema, sources, False)
                composition, cfg = compose("train", checked, sources, also=lambda composition: [])
                parts = composition.values, composition.overrides, composition.group_choices
                found.append((copy.deepcopy(parts), cfg.hydra.overrides.task))
        return found

    return call


def test_what_is_merged_once_is_what_hydra_composes(composed):
    plain = composed()
    before = config_loader_impl.create_defaults_list
    with merged_once():
        assert composed() == plain
        assert composed() == plain
    assert config_loader_impl.create_defaults_list is before
    assert [found[0][0]["seed"] for found in plain] == [1, 2, 0, 0, 3]


def test_a_job_does_not_change_what_the_next_one_gets(workdir):
    schema = VERBS["train"]
    sources = sources_of(parse_flags([], []))
    checked = overrides.check_overrides(["model=mlp"], schema, sources, False)
    with application("train", sources), merged_once():
        _, cfg = compose("train", checked, sources, also=lambda composition: [])
        cfg.optimizer.lr = -1
        composition, _ = compose("train", checked, sources, also=lambda composition: [])
    assert composition.values["optimizer"]["lr"] > 0
