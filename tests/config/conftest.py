"""What the tests of the config share: compositions as a job gets them, and the problems in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.config.app import Composition, current, launch
from runner.config.errors import Problem
from runner.config.resolve import problems_in
from runner.config.schema import VERBS

# The same words give the same composition, and composing is what takes the time.
_KNOWN: dict[tuple[str, ...], Composition] = {}


@pytest.fixture
def compose(workdir: Path) -> Callable[..., Composition]:
    """What the words after a verb amount to, as the (first) job sees it: `compose("model=mlp", verb="eval")`."""

    def call(*words: str, verb: str = "train") -> Composition:
        call_id = (verb, *words)
        if call_id in _KNOWN:
            return copy.deepcopy(_KNOWN[call_id])
        caught: list[Composition] = []
        launch(
            lambda cfg: caught.append(current(cfg)),
            VERBS[verb],
            verb,
            words,
            also=lambda composition: [],
            sweep_root=lambda values: workdir / "sweep",
        )
        if not any(word.startswith("--") for word in words):
            _KNOWN[call_id] = copy.deepcopy(caught[0])
        return caught[0]

    return call


@pytest.fixture
def problems(compose: Callable[..., Composition]) -> Callable[..., dict[str, Problem]]:
    """The problems that validation finds in a composition, by key."""

    def call(*words: str, verb: str = "train") -> dict[str, Problem]:
        composition = compose(*words, verb=verb)
        return {problem.key: problem for problem in problems_in(composition.values, composition, VERBS[verb])[1]}

    return call
