"""What a config asks for and the whole run never comes to; not checked where only a few steps are made."""

from __future__ import annotations

from runner.build.metrics import stops_early
from runner.build.run import Run
from runner.build.weight_average import swa_start
from runner.config.errors import UserError


def validate_limits(run: Run) -> list[str]:
    """Warnings about what is never trained.

    Raises:
        UserError: if the weights cannot be averaged as `swa` says, or something waits for evaluations that never happen.
    """
    _validate_evaluations(run)
    _validate_average(run)
    timeline, warnings = run.length.timeline, []
    for part in run.state.freezing.parts:
        end = timeline.step(part.epochs or 0) if part.steps is None else part.steps
        if not part.permanent and end >= run.total_steps:
            warnings.append(f"freeze: {part.name} is never trained: the run ends after {run.total_steps:,} steps")
    return warnings


def _validate_evaluations(run: Run) -> None:
    """Refuse what needs evaluations without a validation split; what needs some while none are asked for was refused before."""
    if run.data.val is not None:
        return
    waiting = [f"callbacks.{name}" for name, node in run.config.callbacks.items() if stops_early(node)]
    if str(run.config.scheduler.get("_target_", "")).endswith("Plateau"):
        waiting.append("scheduler")
    for key in waiting:
        raise UserError(
            key,
            "waits for evaluations, but there is no validation split",
            f"data.split.val=0.1, a data set with a validation split, or no {key}",
        )


def _validate_average(run: Run) -> None:
    """Refuse SWA that never averages weights, or never computes BatchNorm's statistics for their mean."""
    averaged, timeline, total_steps = run.state.averaged, run.length.timeline, run.total_steps
    if averaged is None or run.config.swa is None:
        return
    start = swa_start(run.config.swa, run.length)
    first = round(timeline.step(timeline.scaled(start) / timeline.steps + 1))
    if first > total_steps:
        raise UserError(
            "swa",
            f"{run.config.swa:g} begins after step {start:,} and first averages weights {first - start:,} steps later, an "
            f"epoch, but the run ends at step {total_steps:,}",
            "a smaller swa, or more epochs",
        )
    with run.state.freezing.as_at(None):
        norms = averaged.norms()
    if norms and run.data.val is None:
        raise UserError(
            "swa",
            "computes BatchNorm's statistics at evaluations, but there is no validation split",
            "data.split.val=0.1, ema instead of swa, or a model without BatchNorm",
        )
