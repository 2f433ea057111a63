"""Runs of the training loop for a few steps, with the step, the callbacks and the evaluation of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runner.build.evaluation import evaluate_both
from runner.build.metrics import build_callbacks, fresh_metrics
from runner.checkpoint import resume
from runner.data.loaders import Loader
from runner.engine.callbacks import UnfreezeCallback
from runner.engine.evaluation import evaluate
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.verbs.check.context import CheckContext


def run_callbacks(context: CheckContext) -> tuple[list[Any], Callable[[Loop], None]]:
    """The callbacks of the run that affect training, and what `on_nonfinite=rollback` does: back to the start."""
    training = context.training
    extra = build_callbacks(context.config, training.task, training.monitor)
    kept = {name: resume.copied(each.state_dict()) for name, each in extra.items() if hasattr(each, "state_dict")}

    def roll_back(loop: Loop) -> None:
        context.restore()
        for name, before in kept.items():
            if hasattr(extra[name], "load_state_dict"):
                extra[name].load_state_dict(resume.copied(before))

    return [UnfreezeCallback(lambda line: None), *extra.values()], roll_back


def build_loop(
    context: CheckContext,
    source: Loader,
    plan: EpochPlan,
    limits: Limits,
    *,
    callbacks: bool = True,
    extra: Sequence[Any] = (),
    held_out: Loader | None = None,
    **options: Any,
) -> Loop:
    """The loop of the run with other batches and limits.

    Args:
        context: the run.
        source: the batches.
        plan: how they divide into steps.
        limits: when to stop and when to evaluate.
        callbacks: whether to call the callbacks of the run.
        extra: further callbacks.
        held_out: where given, the first batch of it is evaluated when `limits` says so.
        **options: `step` or `parts` instead of those of the run.
    """
    training = context.training
    own, roll_back = run_callbacks(context) if callbacks else ([], lambda loop: context.restore())
    metrics = fresh_metrics(context.config, training.task, training.device)

    def evaluate_once() -> dict[str, float]:
        assert held_out is not None
        arguments = (training.model, held_out, training.task.targets, training.loss, metrics())
        values = evaluate(*arguments, training.precision.autocast, 1)
        return {f"val/{name}": value for name, value in values.items()}

    return Loop(
        training.state,
        source,
        plan,
        options.get("parts", training.parts),
        limits,
        (lambda: evaluate_both(training, evaluate_once)) if held_out is not None else None,
        [*own, *extra],
        training.monitor,
        step=options.get("step", training.step),
        roll_back=roll_back,
    )


def held_out_loader(context: CheckContext) -> Loader:
    """The validation split, or the training split as it is evaluated."""
    splits = context.splits
    loader: Loader = (splits.val or splits.train_for_eval).loader
    return loader
