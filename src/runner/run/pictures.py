"""Pictures of a run while it trains: its first training batch, and predictions of the best evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.base.errors import with_place
from runner.base.files import make_folder
from runner.data.loaders import Batch
from runner.distributed.world import world
from runner.engine.loop import Loop
from runner.engine.metrics import class_numbers
from runner.instrument.nested import mapped_items, parts_of_rows, rows_of, tensors_moved
from runner.run.evaluation import drawn, with_pixels
from runner.run.run import Run
from runner.tracking.plots import Tile, caption_of, image_grid, pixels_of

_TRAINED, _PREDICTED = 16, 9  # most samples of a picture
_PAUSE_FACTOR = 100  # between pictures, as a multiple of the time that the last ones took


class Pictures:
    """A callback that draws into a folder on the first rank, in about 1% of the time; `draw` draws what waits at the end.

    No bit of the run depends on it. What cannot be drawn causes one warning, after which nothing is drawn.
    """

    def __init__(self, run: Run, folder: Path, warn: Callable[[str], None]) -> None:
        self._run, self._folder, self._warn = run, folder, warn
        wanted, data = run.config.log.pictures, run.data
        images = data.examples["train"][0].ndim == 3 if data.pairs else bool(run.config.data.images)
        if wanted is True and not images:
            warn("log.pictures=true has no effect: the samples have no images")
        self._on = world().first and wanted is not False and images
        self._shows = hasattr(run.task, "shown") and hasattr(run.task, "draw")
        # Of an evaluation, then by the name of a picture and with its title: data, targets and outputs, and how many samples
        self._latest: tuple[()] | tuple[list[Any], int] | None = None
        self._waiting: dict[str, tuple[str, list[Any], int]] = {}
        self._next = 0.0

    def on_first_batch(self, loop: Loop, batch: Batch) -> None:
        """Keep samples of the first batch of the run."""
        if loop.state.position.global_step == loop.state.position.batch == 0:
            self._attempt(self._keep_trained, batch.data, len(batch.indices))

    def on_log(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Draw if it is time: the loss has been read, so that nothing waits for the device here."""
        if self._waiting and time.perf_counter() >= self._next:
            loop.paused_s += self.draw()

    def watched(self, evaluated: Callable[[Any], Any], rows: int) -> Callable[[Any], Any]:
        """`evaluated` of an evaluation, whose first batch has so many `rows`; the first samples and their outputs are kept."""
        self._latest = None

        def call(data: Any) -> Any:
            found = evaluated(data)
            if self._latest is None:
                self._latest = ()
                self._attempt(self._keep_predicted, data, found, rows)
            return found

        return call

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Draw an evaluation that is the best, or any where no metric says which is best."""
        position = loop.state.position
        if self._latest and (loop.improved or not loop.monitor[0]):
            title = f"validation, epoch {position.epoch + (position.batch > 0)}, step {position.global_step}"
            self._waiting["predictions"] = title, *self._latest
            self.on_log(loop, metrics)

    def draw(self) -> float:
        """Draw what waits; returns the seconds that it took."""
        began = time.perf_counter()
        for name, waiting in self._waiting.items():
            self._attempt(self._write, name, *waiting)
        self._waiting = {}
        took = time.perf_counter() - began
        self._next = began + _PAUSE_FACTOR * took
        return took

    def _attempt(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            if self._on:
                function(*arguments)
        except Exception as error:  # pictures must not cost a run
            self._on = False
            self._warn(f"log.pictures: nothing is drawn any more: {with_place(error)}")

    def _keep_trained(self, data: Any, rows: int) -> None:
        kept = [data, data[1]] if self._shows or self._run.data.pairs else [data]
        title = "first training batch as the model sees it, normalisation undone"
        self._waiting["train_batch"] = title, _copied(kept, rows, _TRAINED), min(rows, _TRAINED)

    def _keep_predicted(self, data: Any, found: Mapping[str, Any], rows: int) -> None:
        if self._shows or (self._run.data.pairs and isinstance(found.get("outputs"), Tensor)):
            kept = _copied([data, found["targets"], found["outputs"]], rows, _PREDICTED)
            self._latest = kept, min(rows, _PREDICTED)

    def _write(self, name: str, title: str, kept: list[Any], rows: int) -> None:
        task, classes, tiles = self._run.task, self._run.data.classes, list[Tile]()
        data, *values = tensors_moved(kept, "cpu")
        for place, sample in enumerate(parts_of_rows(with_pixels(data, self._run.config), rows, rows)):
            own = [value[place] for value in values]
            if self._shows:
                pictures = [pixels_of(drawn(task, sample, task.shown(value), classes)) for value in own]
                tiles += map(Tile, pictures, (["truth"], ["prediction"]))
            else:
                tiles.append(self._with_captions(sample, *own))
        legend = task.legend(classes) if hasattr(task, "legend") else {}
        make_folder(self._folder)
        image_grid(tiles, self._folder / f"{name}.png", title, 6 if len(tiles) > rows else None, legend)

    def _with_captions(self, sample: Any, target: Tensor | None = None, output: Tensor | None = None) -> Tile:
        """The first image of a batch of one, or its first frame, with target and output; colours say whether a class is right."""
        classes, activation = self._run.data.classes, getattr(self._run.task, "activation", "")
        name = (self._run.config.data.images or ["0"])[0]
        image = sample[name if isinstance(sample, Mapping) else int(name)][0]
        lines = [] if target is None else caption_of(target, classes)
        colours = ["#222222"] * len(lines)
        if target is not None and output is not None:
            output = output.float()
            output = output.softmax(0) if activation == "softmax" else output.sigmoid() if activation else output
            right = activation != "softmax" or int(output.argmax()) == int(class_numbers(target[None]))
            lines = lines + caption_of(output, classes)
            colours += ["#228833" if right else "#bb3344"] * 2
        return Tile(pixels_of(image.reshape(-1, *image.shape[-3:])[0]), lines, colours)


def _copied(values: list[Any], rows: int, most: int) -> list[Any]:
    """The first samples of a batch, copied, because later steps may use its memory again."""
    return [mapped_items(rows_of(value, rows, slice(most)), Tensor, Tensor.clone) for value in values]
