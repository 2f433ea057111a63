"""What looks at every module while a run trains, as far as the config asks for it."""

from __future__ import annotations

from runner.build.run import Run
from runner.config.schema.sections import Watch
from runner.engine.finite import FiniteWatch
from runner.runtime.shapes import ShapeWatch
from runner.tracking.console import Console


def watch_modules(config: Watch, run: Run, console: Console) -> None:
    """Put hooks on the modules of a run that is about to begin; none where nothing is asked for."""
    if config.shapes:

        def show(rows: list[list[str]]) -> None:
            console.table("shapes in the first batch", ["module", "type", "takes", "gives"], rows)

        ShapeWatch(run.model, show)
    if config.finite:
        FiniteWatch(run.state)
