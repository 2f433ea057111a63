"""What a config asks for and the whole run never comes to; not checked where only a few steps are made."""

from __future__ import annotations

from runner.base.errors import UserError
from runner.config.schema.sections import components_of
from runner.run.metrics import stops_early
from runner.run.run import Run


def validate_limits(run: Run) -> list[str]:
    """Warnings about what is never trained.

    Raises:
        UserError: if the weights cannot be averaged as `swa` says, or something waits for evaluations that never happen.
    """
    config, timeline, total_steps, warnings = run.config, run.length.timeline, run.total_steps, []
    samples, batch_size = run.data.train.samples, run.plan.batch_size
    if batch_size > samples:
        warnings.append(f"data.batch_size={batch_size} has no effect above {samples:,}, the size of the training split")
    of_numbers = ("MeanSquaredError", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")
    # A loss for numbers on classes is unusual but runs, so it is worth a warning only
    if str(config.task["_target_"]).endswith(".Classification") and str(config.loss["_target_"]).endswith(of_numbers):
        warnings.append("loss: is one for numbers, on classes: loss=cross_entropy is the usual one for these")
    # Early stopping and Plateau would wait forever without evaluations
    if run.data.val is None:
        waiting = [f"callbacks.{name}" for name, node in config.callbacks.items() if stops_early(node)]
        schedules = components_of("scheduler", config.scheduler)
        waiting += [key for key, node in schedules.items() if str(node["_target_"]).endswith("Plateau")]
        for key in waiting:
            allowed = f"data.split.val=0.1, a data set with a validation split, or no {key}"
            raise UserError(key, "waits for evaluations, but there is no validation split", allowed)
    # An average that begins too late is never computed, and the run would end without it
    if run.state.averaged is not None and config.swa is not None:
        start = run.length.swa_start(config.swa)
        first = round(timeline.step(timeline.scaled(start) / timeline.steps + 1))
        if first > total_steps:
            problem = (
                f"{config.swa:g} begins after step {start:,} and first averages weights {first - start:,} steps later, an "
                f"epoch, but the run ends at step {total_steps:,}"
            )
            raise UserError("swa", problem, "a smaller swa, or more epochs")
        # Layers that are frozen at first may train by then, so their BatchNorm counts too
        with run.state.freezing.as_at(None):
            norms = run.state.averaged.norms()
        if norms and run.data.val is None:
            problem = "computes BatchNorm's statistics at evaluations, but there is no validation split"
            raise UserError("swa", problem, "data.split.val=0.1, ema instead of swa, or a model without BatchNorm")
    # A part that is never trained is allowed, but rarely what was meant
    for part in run.state.freezing.parts:
        end = timeline.step(part.epochs or 0) if part.steps is None else part.steps
        if not part.permanent and end >= total_steps:
            warnings.append(f"freeze: {part.name} is never trained: the run ends after {total_steps:,} steps")
    return warnings
