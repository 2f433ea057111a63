"""Where in a user's own code an error was raised, without the frames of this program and of libraries."""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}
_GENERATED = ("<", "torchinductor_")  # how names of files begin that no user has written
_MOST_FRAMES = 3
_HINT = "    HYDRA_FULL_ERROR=1 shows the whole traceback"


def wants_all() -> bool:
    """Whether the user asked for whole tracebacks."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


@functools.cache
def _is_own(file: str) -> bool:
    program = Path(__file__).resolve().parents[1]
    library = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    path = Path(file).resolve()
    generated = any(part.startswith(_GENERATED) for part in Path(file).parts)
    return not generated and _INSTALLED.isdisjoint(path.parts) and {program, *library}.isdisjoint(path.parents)


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of user code that an error passed through, the innermost one last; or those of what caused it."""
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return found or (own_frames(error.__cause__) if error.__cause__ is not None else [])


def located(error: BaseException) -> list[str]:
    """What the program was doing, the innermost frames of user code, and longer notes; no lines without such frames.

    What the program was doing are the notes of an error (`BaseException.add_note`).
    """
    frames, notes = own_frames(error), [note for each in _causes(error) for note in getattr(each, "__notes__", ())]
    hidden = len(frames) - _MOST_FRAMES
    places = [f"  ... {hidden} frames of user code"] if hidden > 1 else []
    for frame in frames[-_MOST_FRAMES if hidden > 1 else 0 :]:
        places.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        places += [f"    {frame.line}"] if frame.line else []
    short, long = ([note for note in notes if ("\n" in note) is wanted] for wanted in (False, True))
    return [*(f"    {note}" for note in short), *places, *long, _HINT] if frames else long


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
