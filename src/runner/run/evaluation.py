"""Evaluations of a run: of its weights, of their average, and of the best checkpoint on the test split.

`Predictions` is what a task gives for each sample of a batch (`predict_step`), and the picture that it draws of one (`draw`).
`Samples` is what it generates to show what its weights can do (`sample`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from runner.base.errors import UserError, blame
from runner.base.files import make_folder, replacing, writing
from runner.checkpoint import file
from runner.checkpoint.find import LoadedCheckpoint
from runner.checkpoint.manager import CheckpointManager
from runner.checkpoint.rng import seed_everything
from runner.checkpoint.weights import part_with
from runner.config.schema.train import Train
from runner.data.build import not_finite
from runner.data.loaders import Batch, Fields
from runner.data.module import DataModule
from runner.distributed.sharding import is_sharded, reshard
from runner.distributed.world import world
from runner.engine.errors import Interrupted
from runner.engine.evaluation import evaluate
from runner.engine.loop import Loop
from runner.engine.weight_average import prefix
from runner.instrument.nested import parts_of_rows, tensors_moved
from runner.instrument.no_trace import evaluating, preserved_rng
from runner.run.finetune import explaining
from runner.run.from_checkpoint import load_weights_of
from runner.run.interfaces import takes
from runner.run.metrics import fresh_metrics
from runner.run.model import modules_of
from runner.run.run import Run
from runner.run.trial import explaining_memory
from runner.runtime.precision import Precision
from runner.tracking.loggers import Background, Logger
from runner.tracking.plots import Pixels

_COUNT = 16  # of samples while training, if `count` of `sample` has no default


class Evaluator:
    """Evaluates the splits of a run; `interrupted` is asked before every batch, and True raises `Interrupted`.

    Several ranks raise it together, once one is asked to stop; `agree` then lets all of them know why. `watched` may
    wrap what evaluates a batch of the validation split, given the samples of the first one.
    """

    def __init__(
        self,
        run: Run,
        warn: Callable[[str], None],
        interrupted: Callable[[], bool],
        agree: Callable[[], None] = lambda: None,
        watched: Callable[[Callable[[Any], Any], int], Callable[[Any], Any]] = lambda evaluated, rows: evaluated,
    ) -> None:
        self._run, self._warn, self._interrupted, self._agree, self._watched = run, warn, interrupted, agree, watched
        self._metrics = fresh_metrics(run.config, run.task, run.device)

    def weights(self, name: str) -> dict[str, float]:
        """Loss and metrics of the weights on a split, as {"val/loss": 0.1, ...}."""
        run, split, size = self._run, self._run.data.eval_split(name), self._run.config.evaluate.batch_size
        # Buffers of each rank come from its own rows: all ranks evaluate with those of rank 0
        world().copy_first((*run.model.buffers(), *run.state.loss.buffers()))
        assert split is not None, f"there is no split {name}"
        evaluated = run.steps.evaluated
        if name == "val":
            evaluated = self._watched(evaluated, min(split.samples, split.loader.batch_size))
        with explaining_memory("evaluate.batch_size", size, "a smaller evaluate.batch_size, or amp=true"):
            found = evaluate(
                run.model,
                split.loader,
                evaluated,
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
    if found := not_finite(split.loader.batches(0, 0, len(split.loader)), name):
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

    If `truth` is set, a `truth` shows the targets of pairs in the same way. `modules` are what `build_modules` returned, and
    `options` further arguments of its `predict_step`. Raises `UserError` if the task lacks a method, or one gives something else.
    """

    truth = False

    def __init__(
        self, config: Train, task: Any, modules: nn.Module, draws: bool, classes: Sequence[str], **options: Any
    ) -> None:
        super().__init__()
        for name in ("predict_step(modules, batch)", "draw(sample, outputs)")[: 1 + draws]:
            if not hasattr(task, name.partition("(")[0]):
                key = "pictures" if draws else "task"
                raise UserError(key, f"{type(task).__name__} has no {name}", "a task that has it")
        self._task, self._modules_of_task, self._config = task, modules, config
        self._draws, self._classes, self._options = draws, classes, options

    def forward(self, batch: Batch) -> list[dict[str, Any]]:
        """A dict for each sample of a batch."""
        count = len(batch.indices)
        modules = modules_of(self._modules_of_task)
        with explaining("task", "its predict_step cannot take a batch: "):
            found = self._task.predict_step(modules, batch.data, **self._options)
        fields = tensors_moved(dict(found), "cpu") if isinstance(found, Mapping) else {"": found}
        for name, values in fields.items():
            shape = values.shape if isinstance(values, Tensor) else [len(values)] if isinstance(values, list) else []
            if not name or list(shape[:1]) != [count]:
                problem = f"its predict_step gives a {type(values).__name__} {tuple(shape)} {name and f'as {name}'}"
                raise UserError("task", problem, f"a dict of tensors ({count}, ...) and lists of {count} items")
        rows = [{name: values[place] for name, values in fields.items()} for place in range(count)]
        if self._draws:
            samples = parts_of_rows(with_pixels(tensors_moved(batch.data, "cpu"), self._config), count, count)
            for place, (sample, row) in enumerate(zip(samples, rows, strict=True)):
                row["picture"] = drawn(self._task, sample, dict(row), self._classes)
                if self.truth:
                    row["truth"] = drawn(self._task, sample, self._task.shown(batch.targets[place]), self._classes)
        return rows


def drawn(task: Any, sample: Any, outputs: Any, classes: Sequence[str]) -> Tensor:
    """What `draw` of a task gives, uint8 (3, H, W), of a sample with pixels; `UserError` if it fails or gives anything else."""
    with explaining("task", "its draw cannot take a sample: "):
        picture = task.draw(sample, outputs, **({"classes": classes} if takes(task, "draw", "classes") else {}))
    if not isinstance(picture, Tensor) or picture.dtype != torch.uint8 or picture.shape[:-2] != (3,):
        raise UserError("task", f"its draw gives no image, but {str(picture)[:80]}", "a tensor, uint8 (3, H, W)")
    return picture


def with_pixels(data: Any, config: Train) -> Any:
    """The data of a batch with images as RGB, uint8 (B, 3, H, W), without normalisation: the first 3 channels, or the first."""
    normalize, names = config.data.normalize, config.data.images
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (normalize.mean or [0.0], normalize.std or [1.0]))

    def undone(images: Tensor, *_: Any) -> Tensor:
        pixels = (images.float() * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
        shown = pixels[..., : 3 if pixels.shape[-3] > 2 else 1, :, :]
        return shown.expand(*pixels.shape[:-3], 3, -1, -1)

    return Fields(["0"] if names is None else names, undone)(data, torch.empty(0), 0)  # type: ignore[arg-type]


def pixels_of(pictures: Iterable[Tensor]) -> list[Pixels]:
    """Pictures, each uint8 (3, H, W), as arrays (H, W, 3)."""
    return [each.permute(1, 2, 0).contiguous().numpy() for each in pictures]


class Samples:
    """A callback that lets the task sample after each evaluation: it writes and shows pictures and texts, and adds numbers."""

    def __init__(self, run: Run, loggers: Sequence[Logger]) -> None:
        self._run, self._loggers = run, loggers

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Sample with the weights that were evaluated, so with their average if there is one."""
        run, position, averaged = self._run, loop.state.position, loop.state.averaged
        with averaged.applied() if averaged is not None and averaged.begun else contextlib.nullcontext():
            found = generated(run.task, run.model, run.precision, run.config.seed)
        numbers = {f"val/{name}": value for name, value in found.items() if isinstance(value, float)}
        if taken := numbers.keys() & metrics.keys():
            raise UserError("task", f"its sample gives {min(taken)}, which the evaluation gives, too", "another name")

        def write() -> dict[str, float]:
            files = write_samples(found, loop.directory / "samples", f"_{position.global_step:08}")
            for logger in self._loggers if files else ():
                if isinstance(logger, Background):
                    logger.log("sample", files, position.global_step, position.epoch + (position.batch > 0))
            return numbers

        # Rank 0 writes, and all ranks go on with its numbers
        metrics |= world().decide(write)


def generated(
    task: Any, modules: nn.Module, precision: Precision, seed: int, count: int | None = None
) -> dict[str, Tensor | str | float]:
    """What `sample` of a task returns by name, pictures on the CPU; everything else is left as it is.

    The random generators start from the seed, so results of different weights are comparable. All ranks have to call this
    where the weights are divided among them. `modules` are what `build_modules` returned.

    Raises:
        UserError: if `sample` fails, returns anything else, or takes no `count` where there is one.
    """
    sample: Any = getattr(task, "sample", None)
    parameter = inspect.signature(sample).parameters.get("count") if sample else None
    if count is not None and parameter is None:
        raise UserError("samples", f"{type(task).__name__} has no sample(modules, count)", "a task that has it")
    if parameter is not None and parameter.default is parameter.empty:
        count = count or _COUNT
    # Gathered weights would be tensors of inference mode, so a sharded model does without it
    with evaluating(modules, inference=not is_sharded(modules)):
        seed_everything(seed)
        with precision.autocast(), blame("task", "its sample fails"):
            given = sample(modules_of(modules), **({} if count is None else {"count": count}))
            # Names are those of files, too
            found = {re.sub(r"\W", "_", str(name)): _sample(name, value) for name, value in given.items()}
        reshard(modules)
    return found


def _sample(name: str, value: Any) -> Tensor | str | float:
    if isinstance(value, str):
        return value
    what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    pixels = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim in (3, 4) and value.numel() > 0
    if pixels and value.shape[-3] in (1, 3):
        return value.cpu()  # type: ignore[no-any-return]
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    allowed = "pictures, uint8 (3 or 1, H, W) or (N, 3 or 1, H, W), a text, or a number"
    raise UserError("task", f"its sample gives {what} as {name}", allowed)


def write_samples(found: Mapping[str, Any], folder: Path, ending: str = "") -> dict[str, Path]:
    """Write pictures, several as one grid, and texts, with an ending of their names; returns the files by name.

    Without an ending, each of several pictures is also written into a folder of their name, as `000000.png`.
    """
    from torchvision.utils import make_grid  # takes a second, which only tasks that generate pictures need

    files = {}
    for name, value in found.items():
        if isinstance(value, float):
            continue
        files[name] = folder / f"{name}{ending}.{'txt' if isinstance(value, str) else 'png'}"
        contents = {files[name]: value}
        if isinstance(value, Tensor) and value.ndim == 4 and not ending:
            contents |= {folder / name / f"{place:06}.png": single for place, single in enumerate(value)}
        for path, content in contents.items():
            make_folder(path.parent)
            with replacing(path) as file, writing(path):
                if isinstance(content, str):
                    file.write(content.encode(errors="backslashreplace"))
                else:  # in grey, too, a grid has three channels
                    Image.fromarray(make_grid(content).permute(1, 2, 0).numpy()).save(file, "png")
    return files
