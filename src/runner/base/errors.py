"""Errors of users and how they are reported, with the places in their own code, and the exit codes of jobs."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib.util
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.base.secrets import MASK, is_secret, mask_word

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
_NO_MEMORY = ("failed to map segment", "Cannot allocate memory", "can't start new thread")
_REJECTED = re.compile(r"(?<=cannot be ).*")  # how messages show a value that is not allowed
_INSTALLED = {"site-packages", "dist-packages"}
_GENERATED = ("<", "torchinductor_")  # how names of files begin that no user has written
_MOST_FRAMES, _LONGEST = 3, 300  # frames, and letters of another library's message
_HINT = "    HYDRA_FULL_ERROR=1 shows the whole traceback"

OK, FAILED, USAGE, DIVERGED, WORSE, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 4, 75, 130
"""Exit codes of all verbs: `WORSE` than a baseline (report)."""


@dataclass(frozen=True)
class Problem:
    """One mistake in the configuration."""

    key: str  # dotted key, verb or file that the problem is about
    message: str  # a clause without a full stop
    allowed: str = ""  # what would be right
    nearest: str = ""  # the closest valid spelling
    origin: str = ""  # the override or file that it came from
    kind: str = ""  # `key` if nothing knows it, `argument` if the target of a component takes none of that name

    def lines(self) -> list[str]:
        """The problem as lines of text, the key first."""
        secret = is_secret(self.key.rpartition(".")[2])
        text = _REJECTED.sub(MASK, self.message) if secret else self.message
        head = f"{mask_word(self.key)}: {text}" if self.key else text
        head += f"; did you mean '{self.nearest}'?" if self.nearest else ""
        rest = {"allowed": self.allowed, "from": mask_word(self.origin)}
        return [head, *(f"    {name}: {line}" for name, line in rest.items() if line)]


class UserError(Exception):
    """A mistake that the user can fix: shown as its message alone, without a traceback; exit status 2."""

    problems: tuple[Problem, ...]  # several only where all mistakes of a config are reported together
    exit_code = USAGE

    def __init__(self, key: str, problem: str = "", allowed: str = "", suggestion: str = "") -> None:
        """Describe one mistake, see `Problem`; `UserError("sentence")` where no key is to blame."""
        if not problem:
            key, problem = "", key
        self.problems = (Problem(key, problem, allowed, suggestion),)
        super().__init__("\n".join(self.problems[0].lines()))


class DataFailed(UserError):
    """Reading the data failed during a sound run: a worker process died or hangs. What was trained so far can be saved."""

    exit_code = FAILED


class DiskFull(UserError):
    """A disk is full, or a quota used up: the same command works once there is space."""

    exit_code = FAILED


class ConfigError(UserError):
    """All problems of one configuration, reported together."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        title = f"{len(problems)} problem{'s' * (len(problems) != 1)} in the configuration"
        lines = [f"  {line}" for problem in problems for line in problem.lines()]
        Exception.__init__(self, "\n".join([title, *lines]))


def nearest(word: str, choices: Iterable[str], alike: float = 0.6) -> str:
    """The choice spelled most like `word`, or the only one that begins with it; an empty string if none comes close."""
    pool = list(choices)
    # Letters in another order are the likeliest mistake
    if word and (swapped := [choice for choice in pool if sorted(choice.lower()) == sorted(word.lower())]):
        return swapped[0]
    longer = [choice for choice in pool if len(word) > 1 and choice.lower().startswith(word.lower())]
    if len(longer) == 1:
        return longer[0]
    by_lower = {choice.lower(): choice for choice in pool}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=alike)
    return by_lower[found[0]] if found else ""


def nearest_path(path: Path) -> str:
    """The path in the same folder that is spelled most like a missing one, or an empty string."""
    names = [other.name for other in path.parent.iterdir() if other.exists()] if path.parent.is_dir() else []
    close = nearest(path.name, names)
    return str(path.parent / close) if close else ""


def require(key: str, package: str, *modules: str, otherwise: str = "") -> None:
    """Raise `UserError` unless there are all of some modules; `package` is what pip installs for them."""
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        problem = f"needs packages that are not installed: {', '.join(missing)}"
        raise UserError(key, problem, f"pip install {package!r}{otherwise}")


@contextlib.contextmanager
def blame(key: str, problem: str, allowed: str = "", *others: type[Exception]) -> Iterator[None]:
    """Turn what code of users or other libraries raises into a mistake of a key; its own, `MemoryError` and `others` pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (UserError, MemoryError, *others)):
            raise
        raise UserError(key, f"{problem}: {first_line(error)[:_LONGEST]}", allowed) from error


def system_limit(error: BaseException, files: bool = True) -> str:
    """The sentence for an error caused by a limit of the system on open files, names or memory, or an empty string.

    With `files` also for a file or folder that the system refuses.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(cause):
            return (
                "there are too many open files: the limit of this process (ulimit -n) or of the system is reached\n"
                "    allowed: a larger limit, such as ulimit -n 4096, or fewer workers, such as data.num_workers=0"
            )
        if isinstance(cause, OSError) and number == errno.ENAMETOOLONG:
            name = f"{str(cause.filename)[:60]}..."
            return f"{name}: the name is too long for a file or folder\n    allowed: a shorter one, such as 50 letters"
        if type(cause) is MemoryError or any(said in str(cause) for said in _NO_MEMORY):
            return f"there is not enough memory, or a limit on it (ulimit -v) is too small: {first_line(cause)}"
        cause = cause.__cause__ or cause.__context__
    if not (files and isinstance(error, OSError) and error.errno in _REFUSED):
        return ""
    if error.filename is not None:
        allowed = "another folder (output_root=, hydra.run.dir=, hydra.sweep.dir=), or the permission to write there"
        return f"{error.filename}: {str(error.strerror).lower()}\n    allowed: {allowed}"
    full = "no space left on the disk; free some space or choose another output directory"
    return full if error.errno == errno.ENOSPC else ""


def explain(error: BaseException) -> tuple[int, str, str]:
    """Exit code, a sentence, and the text to show for what ended a job.

    Expected errors of the program carry an `exit_code`, and may carry a `prefix` and a `hint` around their message. What user
    code raised is shown with the frames of user code; any other unexpected error with its traceback.
    """
    code = getattr(error, "exit_code", None)
    if code is None or type(error).__module__.partition(".")[0] != __name__.partition(".")[0]:
        sentence = f"{type(error).__name__}: {error}"
        own = bool(own_frames(error)) and os.environ.get("HYDRA_FULL_ERROR") != "1"
        first, *others = sentence.split("\n")
        trace = "".join(traceback.format_exception(error)).rstrip()
        text = "\n".join([first, *located(error), *others]) if own else trace
        return FAILED, sentence, system_limit(error, files=not own) or text
    sentence = f"{getattr(error, 'prefix', '')}{error}"
    lines = located(error) if isinstance(error, UserError) else []
    return code, sentence, "\n".join([f"{sentence}{getattr(error, 'hint', '')}", *lines])


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def with_place(error: BaseException) -> str:
    """The class and the first line of an error, with the last line of user code in its traceback."""
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in own_frames(error)[-1:])
    return f"{type(error).__name__}: {first_line(error)}{place}"


@functools.cache
def is_own(file: str) -> bool:
    """Tell whether a source file is user code: neither of this program, nor installed, nor generated."""
    program = Path(__file__).resolve().parents[1]
    library = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    path = Path(file).resolve()
    generated = any(part.startswith(_GENERATED) for part in Path(file).parts)
    return not generated and _INSTALLED.isdisjoint(path.parts) and {program, *library}.isdisjoint(path.parents)


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of user code that an error passed through, the innermost one last; or those of what caused it."""
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
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
