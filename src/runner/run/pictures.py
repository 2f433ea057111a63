"""Pictures of a run while it trains: its first training batch, and predictions of the best evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.base.errors import with_place
from runner.base.files import make_folder
from runner.data.loaders import Batch
from runner.distributed.world import world
from runner.engine.loop import Loop
from runner.engine.metrics import class_numbers
from runner.instrument.nested import mapped_items, parts_of_rows, rows_of, tensors_moved
from runner.run.evaluation import Predictions, drawn, with_pixels
from runner.run.run import Run
from runner.tracking.plots import Tile, caption_of, image_grid

_TRAINED, _PREDICTED = 16, 9  # most samples of a picture
_PAUSE_FACTOR = 100  # between pictures, as a multiple of the time that the last one took


class _Kept(NamedTuple):
    """Copies of samples, of their targets and perhaps outputs (`values`), or of what the task has drawn of their outputs."""

    rows: int
    data: Any
    values: Sequence[Any] = ()
    pictures: Sequence[Tensor] = ()


class Pictures:
    """A callback that draws into a folder on the first rank, in about 1% of the time, and what then waits when it is closed.

    No bit of the run depends on it. What cannot be drawn causes one warning, after which nothing is drawn.
    """

    def __init__(self, run: Run, folder: Path, warn: Callable[[str], None]) -> None:
        self._run, self._folder, self._warn = run, folder, warn
        wanted, data, draws = run.config.log.pictures, run.data, hasattr(run.task, "draw")
        images = data.examples["train"][0].ndim == 3 if data.pairs else bool(run.config.data.images)
        if wanted is True and not images:
            warn("log.pictures=true has no effect: the samples have no images")
        self._on = world().first and wanted is not False and images
        self._shows, self._predicts = draws and hasattr(run.task, "shown"), draws and hasattr(run.task, "predict_step")
        self._latest: _Kept | None = None
        self._waiting: dict[str, tuple[str, _Kept]] = {}
        self._next = 0.0

    def on_first_batch(self, loop: Loop, batch: Batch) -> None:
        """Keep samples of the first batch of the run."""
        if loop.state.position.global_step == loop.state.position.batch == 0:
            self._attempt(self._keep_trained, batch.data, len(batch.indices))

    def watch(self, data: Any, found: Mapping[str, Any], rows: int) -> None:
        """Keep the first samples of an evaluation, in its mode, with what it `found` for this batch of so many `rows`."""
        self._attempt(self._keep_predicted, data, found, rows)

    def on_log(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Draw if it is time: the loss has been read, so that nothing waits for the device here."""
        if self._waiting and time.perf_counter() >= self._next:
            loop.paused_s += self._draw()

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Draw an evaluation that is the best, or any where no metric says which is best."""
        position = loop.state.position
        if self._latest is not None and (loop.improved or not loop.monitor[0]):
            where = f"epoch {position.epoch + (position.batch > 0)}, step {position.global_step}"
            self._waiting["predictions"] = f"predictions for validation samples, {where}", self._latest
            self.on_log(loop, metrics)

    def close(self) -> None:
        """Draw what waits."""
        self._draw()

    def _attempt(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            if self._on:
                function(*arguments)
        except Exception as error:  # pictures must not cost a run
            self._on = False
            self._warn(f"log.pictures: nothing is drawn any more: {with_place(error)}")

    def _keep_trained(self, data: Any, rows: int) -> None:
        kept = _copied(data, rows, _TRAINED)
        values = [kept[1]] if self._shows or self._run.data.pairs else []
        title = "the first training batch as the model sees it, normalisation undone"
        self._waiting["train_batch"] = title, _Kept(min(rows, _TRAINED), kept, values)

    def _keep_predicted(self, data: Any, found: Mapping[str, Any], rows: int) -> None:
        run, kept = self._run, _Kept(min(rows, _PREDICTED), _copied(data, rows, _PREDICTED))
        if self._shows or (run.data.pairs and not self._predicts and isinstance(found.get("outputs"), Tensor)):
            values = [_copied(found[name], rows, _PREDICTED) for name in ("targets", "outputs")]
            self._latest = kept._replace(values=values)
        # One rank cannot compute what is divided among several, and compiled code would be compiled again for fewer samples
        elif self._predicts and world().size == 1 and not run.config.compile:
            predict = Predictions(run.config, run.task, run.model, True, run.data.classes)
            pictures = [row["picture"] for row in predict(Batch(kept.data, torch.arange(kept.rows)))]
            self._latest = kept._replace(pictures=pictures)

    def _draw(self) -> float:
        """Draw what waits; returns the seconds that it took."""
        began = time.perf_counter()
        for name, waiting in self._waiting.items():
            self._attempt(self._write, self._folder / f"{name}.png", *waiting)
        self._waiting = {}
        took = time.perf_counter() - began
        self._next = began + _PAUSE_FACTOR * took
        return took

    def _write(self, target: Path, title: str, kept: _Kept) -> None:
        task, classes = self._run.task, self._run.data.classes
        tiles, values = [], tensors_moved(kept.values, "cpu")
        data = with_pixels(tensors_moved(kept.data, "cpu"), self._run.config)
        for place, sample in enumerate(parts_of_rows(data, kept.rows, kept.rows)):
            own, image = [value[place] for value in values], self._image_of(sample)
            if self._shows:
                pictures = [drawn(task, sample, task.shown(value), classes) for value in own]
                tiles += [_tile(*pair) for pair in zip(pictures, (["truth"], ["prediction"]), strict=False)]
            elif kept.pictures:
                tiles += [_tile(image, ["sample"]), _tile(kept.pictures[place], ["prediction"])]
            else:
                tiles.append(_tile(image, *self._captions(*own)))
        several = len(tiles) > kept.rows  # truth and prediction are side by side
        make_folder(self._folder)
        legend = task.legend(classes) if hasattr(task, "legend") else {}
        image_grid(tiles, target, title, min(6, len(tiles)) if several else None, legend)

    def _image_of(self, sample: Any) -> Tensor:
        """The first image of a batch of one, or its first frame, uint8 (3, H, W)."""
        name = (self._run.config.data.images or ["0"])[0]
        images = sample[name if isinstance(sample, Mapping) else int(name)]
        return images[0].reshape(-1, *images[0].shape[-3:])[0]  # type: ignore[no-any-return]

    def _captions(self, target: Tensor | None = None, output: Tensor | None = None) -> tuple[list[str], list[str]]:
        """Lines for a target and an output, and their colours: green and red say whether a class is right."""
        classes, activation = self._run.data.classes, getattr(self._run.task, "activation", "")
        lines = [] if target is None else caption_of(target, classes)
        colours = ["#222222"] * len(lines)
        if target is not None and output is not None:
            output = output.float()
            output = output.softmax(0) if activation == "softmax" else output.sigmoid() if activation else output
            right = activation != "softmax" or int(output.argmax()) == int(class_numbers(target[None]))
            said = caption_of(output, classes)
            lines, colours = [*lines, *said], colours + ["#228833" if right else "#bb3344"] * len(said)
        return lines, colours


def _copied(value: Any, rows: int, most: int) -> Any:
    """The first samples of a batch, copied: later steps may use its memory again."""
    return mapped_items(rows_of(value, rows, slice(most)), Tensor, Tensor.clone)


def _tile(picture: Tensor, lines: Sequence[str], colours: Sequence[str] = ()) -> Tile:
    return Tile(picture.permute(1, 2, 0).numpy() / 255, lines, colours)
