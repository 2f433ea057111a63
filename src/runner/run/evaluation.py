"""Evaluations of a run: of its weights, of their average, and of the best checkpoint on the test split.

`Predictions` is what a task gives for each sample of a batch (`predict_step`), and the picture that it draws of one (`draw`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.checkpoint import file
from runner.checkpoint.find import LoadedCheckpoint
from runner.checkpoint.manager import CheckpointManager
from runner.checkpoint.weights import part_with
from runner.config.schema.train import Train
from runner.data.build import not_finite
from runner.data.loaders import Batch, Fields
from runner.data.module import DataModule
from runner.distributed.sharding import is_sharded, reshard
from runner.distributed.world import world
from runner.engine.errors import Interrupted
from runner.engine.evaluation import evaluate
from runner.engine.weight_average import prefix
from runner.instrument.nested import parts_of_rows, tensors_moved
from runner.instrument.no_trace import preserved_rng
from runner.run.finetune import explaining
from runner.run.from_checkpoint import load_weights_of
from runner.run.metrics import fresh_metrics
from runner.run.model import modules_of
from runner.run.run import Run
from runner.run.trial import explaining_memory


class Evaluator:
    """Evaluates the splits of a run; `interrupted` is asked before every batch, and True raises `Interrupted`.

    Several ranks raise it together, once one is asked to stop; `agree` then lets all of them know why.
    """

    def __init__(
        self,
        run: Run,
        warn: Callable[[str], None],
        interrupted: Callable[[], bool],
        agree: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._warn, self._interrupted, self._agree = run, warn, interrupted, agree
        self._metrics = fresh_metrics(run.config, run.task, run.device)

    def weights(self, name: str) -> dict[str, float]:
        """Loss and metrics of the weights on a split, as {"val/loss": 0.1, ...}."""
        run, split, size = self._run, self._run.data.eval_split(name), self._run.config.evaluate.batch_size
        # Buffers of each rank come from its own rows: all ranks evaluate with those of rank 0
        world().copy_first((*run.model.buffers(), *run.state.loss.buffers()))
        assert split is not None, f"there is no split {name}"
        with explaining_memory("evaluate.batch_size", size, "a smaller evaluate.batch_size, or amp=true"):
            found = evaluate(
                run.model,
                split.loader,
                run.steps.evaluated,
                loss=run.loss,
                metrics=self._metrics(),
                autocast=run.precision.autocast,
                limit=run.config.limit.eval_batches,
                interrupted=self._interrupted,
            )
        # A loss of NaN has two causes, the weights or the data: a sample that is not finite settles which
        warn_of_nonfinite(found.get("loss", 0.0), run.data, name, self._warn)
        return {f"{name}/{metric}": number for metric, number in found.items()}

    def weights_and_average(self, name: str) -> dict[str, float]:
        """The same, and of the average of the weights, if there is one, as {"val/ema_loss": 0.1, ...}."""
        with self._agreeing():
            return evaluate_both(self._run, lambda: self.weights(name), self._interrupted)

    def test(self, manager: CheckpointManager) -> dict[str, Any]:
        """Test the best checkpoint, or without one the weights as they are.

        Gives `test`, the metrics; `test_step`, the step of the weights; and `test_weights`, their kind, where there are several.
        """
        state = self._run.state
        summary: dict[str, Any] = {"test_step": state.position.global_step}
        with self._agreeing():
            # Rank 0 decides for all, because ranks that disagree would wait for each other
            if state.best is not None and world().decide(manager.best.is_file):
                # Only the weights that are tested are read: the moments of the optimizer may take twice as much
                found = LoadedCheckpoint(manager.best, file.read(manager.best, part_with(), later=True), [])
                run = self._run
                kind = load_weights_of(found, run.config, run.model, loss=run.loss, task=run.task)
                summary["test_step"] = found.contents["position"]["global_step"]
                if state.averaged is not None or kind != "raw":
                    summary["test_weights"] = kind
                results = self.weights("test")
            else:
                results = evaluate_both(self._run, lambda: self.weights("test"), self._interrupted)
        return summary | {"test": {name.removeprefix("test/"): number for name, number in results.items()}}

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        try:
            yield
        except Interrupted:
            self._agree()
            raise


def warn_of_nonfinite(loss: float, splits: DataModule, name: str, tell: Callable[[str], None]) -> None:
    """Warn of the first sample of a split that is not finite, if the loss over the split is not; once for each split."""
    split = splits.eval_split(name)
    # One search for each split: it reads samples again, and would find the same one
    if math.isfinite(loss) or split is None or name in splits.searched_for_nonfinite:
        return
    splits.searched_for_nonfinite.add(name)
    batches = math.ceil(split.samples / split.loader.batch_size)
    if found := not_finite(split.loader.batches(0, 0, batches), name):
        tell(f"the loss on '{name}' is {loss}: {found}")


def evaluate_both(
    run: Run, evaluate: Callable[[], dict[str, float]], interrupted: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Evaluate the weights, and their average if there is one: `val/loss` and `val/ema_loss`, and so on.

    Before SWA begins, its average is the weights themselves, so their metrics stand for both. `interrupted` is asked before
    every batch that BatchNorm's statistics are computed from, and True raises `Interrupted`.
    """
    found, averaged = evaluate(), run.state.averaged
    if averaged is None:
        return found
    others = found
    if averaged.begun:
        with averaged.applied():
            if averaged.kind == "swa":
                with explaining_memory("data.batch_size", run.plan.batch_size, "a smaller data.batch_size or amp=true"):
                    averaged.recalibrate(lambda: _feed(run, interrupted))
            others = evaluate()
    # The average gets its own prefix in the log, so that both curves can be compared
    start = f"/{prefix(averaged.kind)}"
    return found | {name.replace("/", start, 1): value for name, value in others.items()}


def _feed(run: Run, interrupted: Callable[[], bool]) -> None:
    """Send the training split, without augmentation, through the model, in batches of the size that it is trained with.

    BatchNorm's statistics depend on that size, and must not depend on the batch size of evaluations.
    """
    loader, size, limit = run.data.train_for_eval.loader, run.plan.batch_size, run.config.averaging.recalibrate_batches
    batches = math.ceil(loader.samples / size)
    if batches > 1 and loader.samples % size == 1:
        batches -= 1  # a single sample has no variance
    # The loader is borrowed from evaluations, and gets its batch size back
    of_evaluations, loader.batch_size = loader.batch_size, size
    stopped, sharded = False, is_sharded(run.model)
    try:
        with preserved_rng(), torch.no_grad():
            for batch in loader.batches(0, 0, batches if limit is None else min(batches, limit)):
                # With sharded weights, all ranks need each other for a forward pass, so they stop together
                if stopped := any(world().gather(interrupted())) if sharded else interrupted():
                    break
                with run.precision.autocast():
                    run.steps.feed(batch.data)
        reshard(run.model)
    finally:
        loader.batch_size = of_evaluations
    # Ranks of a whole model may have stopped alone; afterwards all of them agree that they did
    if any(world().gather(stopped)):
        raise Interrupted


class Predictions(nn.Module):
    """What a task gives for each sample of a batch, by name, on the CPU; with `draws` also a `picture`, uint8 (3, H, W).

    `modules` are what `build_modules` returned. Raises `UserError` if the task lacks a method, or one gives something else.
    """

    def __init__(self, config: Train, task: Any, modules: nn.Module, draws: bool = False) -> None:
        super().__init__()
        for name in ("predict_step(modules, batch)", "draw(sample, outputs)")[: 1 + draws]:
            if not hasattr(task, name.partition("(")[0]):
                key = "pictures" if draws else "task"
                raise UserError(key, f"{type(task).__name__} has no {name}", "a task that has it")
        self._task, self._modules_of_task, self._data, self._draws = task, modules, config.data, draws

    def forward(self, batch: Batch) -> list[dict[str, Any]]:
        """A dict for each sample of a batch."""
        count = len(batch.indices)
        modules = modules_of(self._modules_of_task, nn.Identity())
        del modules["loss"]  # is not built where a model is only used
        with explaining("task", "its predict_step cannot take a batch: "):
            found = self._task.predict_step(modules, batch.data)
        fields = tensors_moved(dict(found), "cpu") if isinstance(found, Mapping) else {"": found}
        for name, values in fields.items():
            shape = values.shape if isinstance(values, Tensor) else [len(values)] if isinstance(values, list) else []
            if not name or list(shape[:1]) != [count]:
                problem = f"its predict_step gives a {type(values).__name__} {tuple(shape)} {name and f'as {name}'}"
                raise UserError("task", problem, f"a dict of tensors ({count}, ...) and lists of {count} items")
        rows = [{name: values[place] for name, values in fields.items()} for place in range(count)]
        if self._draws:
            samples = parts_of_rows(self._with_pixels(tensors_moved(batch.data, "cpu")), count, count)
            for sample, row in zip(samples, rows, strict=True):
                with explaining("task", "its draw cannot take a sample: "):
                    row["picture"] = picture = self._task.draw(sample, dict(row))
                if not isinstance(picture, Tensor) or picture.dtype != torch.uint8 or picture.shape[:-2] != (3,):
                    allowed = "a tensor, uint8 (3, H, W)"
                    raise UserError("task", f"its draw gives no image, but {str(picture)[:80]}", allowed)
        return rows

    def _with_pixels(self, data: Any) -> Any:
        """The data of a batch with images as RGB, uint8 (B, 3, H, W), without normalisation; of others the first channel."""
        normalize, names = self._data.normalize, self._data.images
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (normalize.mean or [0.0], normalize.std or [1.0]))

        def undone(images: Tensor, *_: Any) -> Tensor:
            pixels = (images.float() * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
            return pixels if pixels.shape[-3] == 3 else pixels[..., :1, :, :].expand(*pixels.shape[:-3], 3, -1, -1)

        return Fields(["0"] if names is None else names, undone)(data, torch.empty(0), 0)  # type: ignore[arg-type]
