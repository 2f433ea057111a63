"""What a task generates to show what its weights can do: pictures, texts and numbers, by its method `sample`."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from runner.base.errors import UserError, blame
from runner.base.files import make_folder, replacing, writing
from runner.checkpoint.rng import seed_everything
from runner.distributed.sharding import is_sharded, reshard
from runner.distributed.world import world
from runner.engine.loop import Loop
from runner.instrument.no_trace import evaluating
from runner.run.model import modules_of
from runner.run.run import Run
from runner.runtime.precision import Precision
from runner.tracking.loggers import Background, Logger

_COUNT = 16  # of samples while training, if `count` has no default


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
        if taken := [name for name in numbers if name in metrics]:
            problem = f"its sample gives a number as {taken[0].removeprefix('val/')}, which the evaluation has, too"
            raise UserError("task", problem, "another name")

        def write() -> dict[str, float]:
            files = write_samples(found, loop.directory / "samples", position.global_step)
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
    parameter = inspect.signature(task.sample).parameters.get("count") if hasattr(task, "sample") else None
    if count is not None and parameter is None:
        raise UserError("samples", f"{type(task).__name__} has no sample(modules, count)", "a task that has it")
    if parameter is not None and parameter.default is parameter.empty:
        count = count or _COUNT
    named = modules_of(modules, nn.Identity())
    del named["loss"]  # is not built where a model is only used
    # Gathered weights would be tensors of inference mode, so a sharded model does without it
    with evaluating(modules, inference=not is_sharded(modules)):
        seed_everything(seed)
        with precision.autocast(), blame("task", "its sample fails"):
            found = task.sample(named, *([] if count is None else [count]))
        reshard(modules)
        if not isinstance(found, Mapping):
            raise UserError("task", f"its sample gives a {type(found).__name__}", "a dict by name")
        return {name: _checked(name, value) for name, value in found.items()}


def _checked(name: Any, value: Any) -> Tensor | str | float:
    if not (isinstance(name, str) and re.fullmatch(r"\w[\w -]{0,99}", name, re.ASCII)):  # of a file on any system
        allowed = "at most 100 letters, digits, spaces and _ - with a letter, a digit or _ at the start"
        raise UserError("task", f"its sample gives the name {name!r}, which is not a file name", allowed)
    if isinstance(value, str):
        return value
    what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    if isinstance(value, Tensor) and value.ndim in (3, 4) and value.numel():
        if value.dtype == torch.uint8 and value.shape[-3] in (1, 3):
            return value.cpu()
    else:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return float(value)
    allowed = "pictures, uint8 (3 or 1, H, W) or (N, 3 or 1, H, W), a text, or a number"
    raise UserError("task", f"its sample gives {what} as {name}", allowed)


def write_samples(found: Mapping[str, Any], folder: Path, step: int | None = None) -> dict[str, Path]:
    """Write pictures, several as one grid, and texts, with the step in their names; returns the files by name.

    Without a step, each of several pictures is also written into a folder of their name, as `000000.png`.
    """
    from torchvision.utils import make_grid  # takes a second, which only tasks that generate pictures need

    files = {}
    for name, value in found.items():
        if isinstance(value, float):
            continue
        stem, ending = name if step is None else f"{name}_{step:08}", "txt" if isinstance(value, str) else "png"
        files[name] = folder / f"{stem}.{ending}"
        contents = {files[name]: value}
        if step is None and isinstance(value, Tensor) and value.ndim == 4:
            contents |= {folder / name / f"{number:06}.png": picture for number, picture in enumerate(value)}
        for path, content in contents.items():
            make_folder(path.parent)
            with replacing(path) as file, writing(path):
                if isinstance(content, str):
                    file.write(content.encode(errors="backslashreplace"))
                else:  # in grey, too, a grid has three channels
                    Image.fromarray(make_grid(content).permute(1, 2, 0).numpy()).save(file, "png")
    return files
