"""The places in a user's own code where an error was raised, without the frames of this program and of libraries."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}
_GENERATED = ("<", "torchinductor_")  # how names of files begin that no user has written
_MOST_FRAMES = 3
_HINT = "    HYDRA_FULL_ERROR=1 shows the whole traceback"


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
    """The short notes of an error, the innermost frames of user code, and longer notes; only the latter without frames."""
    cause: BaseException | None = error
    frames, notes = own_frames(error)[-_MOST_FRAMES:], list[str]()
    while cause is not None:
        notes += getattr(cause, "__notes__", ())
        cause = cause.__cause__
    short, long = ([note for note in notes if ("\n" in note) is wanted] for wanted in (False, True))
    places = [line.rstrip() for line in traceback.format_list(frames)]
    return [*(f"    {note}" for note in short), *places, *long, _HINT] if frames else long
