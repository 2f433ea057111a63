"""Hooks on every module during training, as far as `watch` asks for them."""

from __future__ import annotations

from runner.build.run import Run
from runner.config.schema.sections import Watch
from runner.engine.diagnosis import FiniteWatch
from runner.runtime.shapes import ShapeWatch
from runner.tracking.console import Console


def watch_modules(config: Watch, run: Run, console: Console) -> None:
    """Put hooks on the modules of a run before it starts; none unless asked for."""
    if config.shapes:

        def show(rows: list[list[str]]) -> None:
            console.table("shapes in the first batch", ["module", "type", "takes", "gives"], rows)

        ShapeWatch(run.model, show)
    if config.finite:
        FiniteWatch(run.state)
