"""From the objects of a run to the contents of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from runner.base.errors import UserError
from runner.checkpoint import file, rng
from runner.checkpoint.async_writer import mapped
from runner.checkpoint.find import LoadedCheckpoint
from runner.distributed.sharding import gathered
from runner.distributed.world import world

T = TypeVar("T")


def contents(state: Any, callbacks: dict[str, Any], texts: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Everything that a checkpoint holds, see `runner.checkpoint.file.KEYS`; of several ranks, the first has the tensors.

    Args:
        state: a `runner.engine.state.TrainState`: model, optimizer, schedule, scaler, position and metrics.
        callbacks: by name; those with a `state_dict` are saved.
        texts: `config`, resolved, as YAML; `classes`, their names; `versions` of packages.
        known: `data`, a fingerprint, see `runner.data.dataset_fingerprint`; `images`, channels, height and width, so that
            the model can be used where the data are not; `sources`, digests of custom files, see `runner.run.saving`.
    """
    saved: dict[str, Any] = state.state_dict()
    ranks = world()
    # Divided tensors are put together for the file, in which every rank has to take part
    if ranks.size > 1:
        saved = _collected(saved, state, partial(gathered, world=ranks))
    # Callbacks of the user are saved if they have a state
    saved["metrics"]["callbacks"] = {
        name: callback.state_dict() for name, callback in callbacks.items() if hasattr(callback, "state_dict")
    }
    saved["metrics"] |= known
    return saved | {"format": file.FORMAT, "rng": rng.capture(), **texts}


def _collected(saved: dict[str, Any], state: Any, collect: Callable[[Tensor], Any]) -> dict[str, Any]:
    """A state with what `collect` makes of its tensors; tied weights stay one, as do those no optimizer has and their average."""
    first: dict[nn.Parameter, str] = {}
    # Tied weights are one tensor with several names: gathering each name would make copies of it
    tied = {name: first.setdefault(each, name) for name, each in state.model.named_parameters(remove_duplicate=False)}
    frozen = {*first.values()} - {first.get(each) for group in state.optimizer.param_groups for each in group["params"]}
    once: dict[tuple[str, str], Any] = {}

    def collect_once(tensor: Tensor, place: str) -> Any:
        container, _, name = place.rpartition("/")
        name = tied.get(name, name)
        key = "/model" if name in frozen and container == "/averaged/weights" else container, name
        if key not in once:
            once[key] = collect(tensor)
        return once[key]

    whole: dict[str, Any] = mapped(saved, collect_once)
    return whole


def copied(value: Any) -> Any:
    """A copy of a checkpoint's contents in the memory of the CPU, which training leaves alone."""
    return mapped(value, lambda tensor, _: tensor.to("cpu", copy=True))


def made_of(found: LoadedCheckpoint, key: str, kind: Callable[..., T]) -> T:
    """The object that a part of a checkpoint describes, such as its position.

    Raises `UserError` if it describes something else.
    """
    try:
        return kind(**found.contents[key])
    except TypeError as error:
        raise UserError(str(found.path), f"{key} does not fit this version of the program: {error}") from error


def restore(found: LoadedCheckpoint, state: Any, callbacks: dict[str, Any]) -> None:
    """Put a run back to where a checkpoint was written.

    Raises `UserError` if the checkpoint is of another model or optimizer, or a callback cannot load its state.
    """
    if not found.contents["optimizer"]:
        raise UserError("ckpt_path", f"{found.path} has no state of a training", "a checkpoint of a run, or init_from=")
    try:
        state.load_state_dict(found.contents)
        # A callback that is new or gone on resuming keeps its fresh state, or loses its saved one
        for name, saved in found.contents["metrics"]["callbacks"].items():
            callback: Any = callbacks.get(name)
            if hasattr(callback, "load_state_dict"):
                try:
                    callback.load_state_dict(saved)
                except Exception as error:  # of a custom class, or of a state in a file from somebody else
                    keys = ", ".join(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
                    problem = f"{type(callback).__name__} cannot load its state from {found.path}: {file.reason(error)}"
                    allowed = "a load_state_dict that takes it, or callbacks=none or an option without this callback"
                    raise UserError(
                        f"callbacks.{name}", f"{problem}; saved are: {keys or 'nothing'}", allowed
                    ) from error
        # Last, so that random numbers drawn while loading leave no trace
        rng.restore(found.contents["rng"])
    except UserError:
        raise
    except Exception as error:  # a file made by hand can raise anything in the objects of a run
        raise UserError(str(found.path), f"does not fit this run: {file.reason(error)}") from error
