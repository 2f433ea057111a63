"""Pictures of a run while it trains: its first training batch, and predictions of the best evaluation."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import with_place
from runner.base.files import make_folder
from runner.checkpoint.async_writer import AsyncWriter
from runner.data.loaders import Batch
from runner.distributed.world import world
from runner.engine.loop import Loop
from runner.engine.metrics import class_numbers
from runner.instrument.nested import mapped_items, parts_of_rows, rows_of
from runner.instrument.no_trace import preserved_rng
from runner.run.evaluation import drawn, pixels_of, with_pixels
from runner.run.run import Run
from runner.tracking.plots import Tile, caption_of, image_grid, prepare_images

_TRAINED, _PREDICTED = 16, 9  # most samples of a picture
_PAUSE_FACTOR = 100  # between pictures, as a multiple of the time that the last ones took


class Pictures:
    """A callback that draws into a folder on the first rank, in about 1% of the time; `close` draws what waits at the end.

    A thread composes and writes pictures, so that other ranks do not wait for it. No bit of the run depends on them. What
    cannot be drawn causes one warning, after which nothing is drawn.
    """

    def __init__(self, run: Run, folder: Path, warn: Callable[[str], None]) -> None:
        self._run, self._folder, self._warn, data = run, folder, warn, run.data
        images = data.examples["train"][0].ndim == 3 if data.pairs else bool(run.config.data.images)
        if run.config.log.pictures is True and not images:
            warn("log.pictures=true has no effect: the samples have no images")
        self._on = world().first and run.config.log.pictures is not False and images
        self._shows = hasattr(run.task, "shown") and hasattr(run.task, "draw")
        self._latest: tuple[list[Any], int] | None = None  # of the latest evaluation: data, targets, outputs; samples
        self._waiting: dict[str, tuple[str, list[Any], int]] = {}  # by name of the picture, with its title
        self._writer, self._next = AsyncWriter(), 0.0

    def on_first_batch(self, loop: Loop, batch: Batch) -> None:
        """Keep samples of the first batch of the run."""
        if self._on and loop.state.position.global_step == loop.state.position.batch == 0:
            with self._sheltered():
                paired = isinstance(batch.data, tuple | list) and (self._shows or self._run.data.pairs)
                given = [batch.data, batch.data[1]] if paired else [batch.data]
                title = "first training batch as the model sees it, normalisation undone"
                self._waiting["train_batch"] = title, *_first(given, len(batch.indices), _TRAINED)

    def watched(self, evaluated: Callable[[Any], Any], rows: int) -> Callable[[Any], Any]:
        """`evaluated` of an evaluation, which keeps what it finds for its first batch of so many `rows`."""
        self._latest, waits = None, self._on

        def call(data: Any) -> Any:
            nonlocal waits
            found = evaluated(data)
            drawable = self._shows or (self._run.data.pairs and isinstance(found.get("outputs"), Tensor))
            if waits and drawable and found.keys() >= {"targets", "outputs"}:
                with self._sheltered():
                    self._latest = _first([data, found["targets"], found["outputs"]], rows, _PREDICTED)
            waits = False
            return found

        return call

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Draw an evaluation that is the best, or any where no metric says which is best."""
        position = loop.state.position
        if self._latest and (loop.improved or not loop.monitor[0]):
            title = f"validation, epoch {position.epoch + (position.batch > 0)}, step {position.global_step}"
            self._waiting["predictions"] = title, *self._latest
            self.on_log(loop, metrics)

    def on_log(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Draw if it is time: the loss has been read, so what was copied from the device has arrived."""
        began = time.perf_counter()
        if self._waiting and began >= self._next:
            self._draw()
            loop.paused_s += time.perf_counter() - began

    def close(self) -> None:
        """Draw what waits, and wait until it is written."""
        with self._sheltered():
            if self._on and self._run.device.type != "cpu":  # a run that failed may not have waited for the copies
                torch.accelerator.synchronize(self._run.device)
        self._draw()
        with self._sheltered():
            self._writer.wait()
        self._writer.close()

    def _draw(self) -> None:
        waiting, self._waiting, began = self._waiting, {}, time.perf_counter()
        if not self._on or not waiting:
            return
        # A task may draw random numbers
        with self._sheltered(), preserved_rng():
            grids = [self._grid(name, *of) for name, of in waiting.items()]
            prepare_images()
            self._next = math.inf
            self._writer.start(functools.partial(self._write, grids, began))

    def _write(self, grids: list[Callable[[], None]], began: float) -> None:
        make_folder(self._folder)
        for grid in grids:
            grid()
        self._next = time.perf_counter() + _PAUSE_FACTOR * (time.perf_counter() - began)

    @contextlib.contextmanager
    def _sheltered(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # pictures must not cost a run
            if self._on:
                self._warn(f"log.pictures: nothing is drawn any more: {with_place(error)}")
            self._on = False

    def _grid(self, name: str, title: str, kept: list[Any], rows: int) -> Callable[[], None]:
        """What writes a picture of samples, with their pairs of truth and prediction if the task shows these."""
        classes, tiles = self._run.data.classes, list[Tile]()
        task: Any = self._run.task
        data, *values = kept
        for place, sample in enumerate(parts_of_rows(with_pixels(data, self._run.config), rows, rows)):
            own = [value[place] for value in values]
            if self._shows and own:
                pictures = [drawn(task, sample, task.shown(value), classes) for value in own]
                tiles += map(Tile, pixels_of(pictures), (["truth"], ["prediction"]))
            else:
                tiles.append(self._with_captions(sample, *own))
        legend = [*task.legend(classes).items()] if hasattr(task, "legend") else []
        columns = 6 if len(tiles) > rows else None
        return functools.partial(image_grid, tiles, self._folder / f"{name}.png", title, columns, legend)

    def _with_captions(self, sample: Any, target: Tensor | None = None, output: Tensor | None = None) -> Tile:
        """The image of a batch of one, or its first frame, with target and output, green or red if a class is right or wrong."""
        classes, activation = self._run.data.classes, getattr(self._run.task, "activation", "")
        name = (self._run.config.data.images or ["0"])[0]
        image = sample[name if isinstance(sample, Mapping) else int(name)][0]
        lines, colours = [] if target is None else caption_of(target, classes)[:2], ["#222222"] * 2
        if target is not None and output is not None:
            output = output.float()
            output = output.softmax(0) if activation == "softmax" else output.sigmoid() if activation else output
            right = activation != "softmax" or int(output.argmax()) == int(class_numbers(target[None]))
            colours = colours[: len(lines)] + ["#228833" if right else "#bb3344"] * 2
            lines += caption_of(output, classes)
        return Tile(pixels_of(image.reshape(-1, *image.shape[-3:]))[0], lines, colours)


def _first(values: list[Any], rows: int, most: int) -> tuple[list[Any], int]:
    """The first samples of a batch and how many they are, copied to the host without waiting for the copy."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", non_blocking=True, copy=True)  # later steps may use its memory again

    return [mapped_items(rows_of(value, rows, slice(most)), Tensor, copied) for value in values], min(rows, most)
