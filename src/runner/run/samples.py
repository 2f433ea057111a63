"""What a task generates to show what its weights can do: pictures, texts and numbers, by its method `sample`."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError, blame
from runner.base.files import make_folder, write_atomically
from runner.checkpoint.rng import seed_everything
from runner.distributed.sharding import is_sharded, reshard
from runner.distributed.world import world
from runner.instrument.no_trace import evaluating
from runner.run.model import modules_of
from runner.run.run import Run
from runner.runtime.precision import Precision
from runner.tracking.loggers import Logger

_NAME = re.compile(r"\w[\w .-]{0,99}", re.ASCII)  # of a file on any system
_COLUMNS = ("loss", "global_step", "epoch", "split")  # of a log line
_COUNT = 16  # of samples while training, if `count` has no default
_ALLOWED = "a dict of pictures, uint8 (3 or 1, H, W) or (N, 3 or 1, H, W), texts, and numbers"


def generated(
    task: Any, modules: nn.Module, precision: Precision, seed: int, count: int | None = None
) -> dict[str, Tensor | str | float]:
    """What `sample` of a task returns by name, pictures on the CPU; everything else is left as it is.

    The random generators start from the seed, so results of different weights are comparable. All ranks have to call this
    where the weights are divided among them. `modules` are what `build_modules` returned.

    Raises:
        UserError: if `sample` fails, or returns anything else.
    """
    named = modules_of(modules, nn.Identity())
    del named["loss"]  # is not built where a model is only used
    parameter = inspect.signature(task.sample).parameters.get("count")
    if parameter is not None and count is None and parameter.default is parameter.empty:
        count = _COUNT
    # Gathered weights would be tensors of inference mode, so a sharded model does without it
    with evaluating(modules, inference=not is_sharded(modules)):
        seed_everything(seed)
        with precision.autocast(), blame("task", "its sample fails"):
            found = task.sample(named, **({} if count is None else {"count": count}))
        reshard(modules)
        if not isinstance(found, Mapping):
            raise UserError("task", f"its sample gives a {type(found).__name__}", _ALLOWED)
        return {name: _checked(name, value) for name, value in found.items()}


def _checked(name: Any, value: Any) -> Tensor | str | float:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        allowed = "at most 100 letters, digits, spaces and _ - . with a letter, a digit or _ at the start"
        raise UserError("task", f"its sample gives the name {name!r}, which is not a file name", allowed)
    if isinstance(value, str):
        return value
    if isinstance(value, Real) or (isinstance(value, Tensor) and not value.ndim and not value.is_complex()):
        return float(value)
    channels = value.shape[-3] if isinstance(value, Tensor) and value.ndim in (3, 4) and value.numel() else 0
    if isinstance(value, Tensor) and value.dtype == torch.uint8 and channels in (1, 3):
        return value.cpu()
    what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UserError("task", f"its sample gives {what} as {name}", _ALLOWED)


def write_samples(found: Mapping[str, Any], folder: Path, singles: bool = False) -> dict[str, Path]:
    """Write pictures, several as one grid, and texts; returns the files by name.

    With `singles`, each of several pictures is also written into a folder of their name, as `000000.png`.
    """
    # Only tasks that generate something need the second that this import takes
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import make_grid

    files = {}
    for name, value in found.items():
        if isinstance(value, str):
            contents = {f"{name}.txt": value.encode(errors="backslashreplace")}
        elif isinstance(value, Tensor):
            pictures = {f"{name}.png": make_grid(value)}
            if singles and value.ndim == 4:
                pictures |= {f"{name}/{number:06}.png": picture for number, picture in enumerate(value)}
            contents = {}
            for file, picture in pictures.items():
                to_pil_image(picture).save(buffer := io.BytesIO(), "png")
                contents[file] = buffer.getvalue()
        else:
            continue
        files[name] = folder / next(iter(contents))
        for file, content in contents.items():
            make_folder((folder / file).parent)
            write_atomically(folder / file, content)
    return files


def evaluated_and_sampled(
    run: Run, evaluate: Callable[[], dict[str, float]], directory: Path, loggers: Sequence[Logger]
) -> dict[str, float]:
    """The metrics of an evaluation, with the numbers that the task's `sample`, if any, gives for the evaluated weights.

    These are their average, if there is one. Pictures and texts are written into the run directory, and shown by loggers.
    """
    metrics, averaged, position = evaluate(), run.state.averaged, run.state.position
    if not callable(getattr(run.task, "sample", None)):
        return metrics
    applied = averaged.applied() if averaged is not None and averaged.begun else contextlib.nullcontext()
    with applied:
        found = generated(run.task, run.model, run.precision, run.config.seed)
    numbers = {f"val/{name}": value for name, value in found.items() if isinstance(value, float)}
    if taken := [name for name in numbers if name in metrics or name.removeprefix("val/") in _COLUMNS]:
        problem = f"its sample gives a number as {taken[0].removeprefix('val/')}, which the evaluation has, too"
        raise UserError("task", problem, "another name")

    def write() -> dict[str, float]:
        files = write_samples(found, directory / "samples" / f"step_{position.global_step:08}")
        for logger in loggers if files else ():
            if hasattr(logger, "show"):
                logger.show(files, position.global_step, position.epoch + (position.batch > 0))
        return numbers

    # Rank 0 writes, and all ranks go on with its numbers
    return metrics | world().decide(write)
