"""How long a run is: its epochs, batches and optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from runner.base.errors import UserError
from runner.config.schema.train import Train
from runner.data.module import DataModule
from runner.engine.plan import EpochPlan, Limits, Position, Timeline


@dataclass(frozen=True)
class RunLength:
    """How long a run is."""

    plan: EpochPlan  # how an epoch divides into batches and steps
    timeline: Timeline  # where epochs begin, also those of a resumed run that had another number of steps
    limits: Limits  # when training ends, and when it is evaluated
    total_steps: int  # optimizer steps of the whole run

    def swa_start(self, swa: float) -> int:
        """The optimizer step after which SWA begins, given as a share of the run, or from 1 on in epochs."""
        if swa >= 1:
            return round(self.timeline.step(swa))
        if self.timeline.turns and self.limits.epochs_decide(self.timeline):
            return round(self.timeline.step(swa * self.timeline.scaled(self.total_steps) / self.timeline.steps))
        return round(swa * self.total_steps)


def plan_length(config: Train, data: DataModule, start: Position | None) -> RunLength:
    """Plan the epochs and steps of a run that starts at `start`, or at its beginning."""
    size = config.data.samples_a_batch
    plan = EpochPlan(
        samples=data.train.samples,
        batch_size=size,
        accumulate=config.accumulate,
        drop_last=config.data.drop_last,
        limit=config.limit.train_batches,
    )
    # An epoch of other data may be shorter than the position, which would be outside it
    if start is not None and start.batch >= max(1, plan.batches):
        problem = f"the checkpoint is at batch {start.batch} of an epoch, and an epoch of this data has {plan.batches}"
        allowed = "the data that the run was trained on, or a checkpoint from the end of an epoch"
        raise UserError("ckpt_path", problem, allowed)
    if plan.batches == 0:
        problem = f"{size} is more than the {plan.samples} training samples, and data.drop_last=true leaves no batch"
        raise UserError("data.batch_size", problem, "a smaller data.batch_size, or data.drop_last=false")
    # The whole length is known before the first step: schedules and the progress bar need it
    limits = Limits(config.epochs, config.max_steps, config.evaluate.every_epochs, config.evaluate.every_steps)
    total = limits.total_steps(plan, start)
    if total < 1 and start is not None:
        problem = f"is {config.epochs}, and the checkpoint has completed {start.epoch} epochs of {plan.steps} steps"
        raise UserError("epochs", problem, f"epochs={start.epoch + 1} or more to train on")
    return RunLength(plan, Timeline.of(start or Position(), plan), limits, total)
