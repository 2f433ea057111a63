"""Named pipes, sockets, devices, folders, links and huge files in every place that is listed or opened: nothing blocks."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.disk import pictures
from faults.jobs import directory, whole
from faults.lives import begin
from faults.table import Bench, Row

_LONGEST_S = 60.0
_MEMORY = 2**31  # bytes that a run may take beyond what the program has when it starts
_WORDS = whole(("max_steps=2", "callbacks=none", "name=n", "output_root=outputs"))
_RESUMED = (*_WORDS, "resume=auto")
_IMAGES = (
    "data=image_folder", "data.root=pictures", "data.image_size=16", "data.split.val=0", "data.split.test=0",
    "data.batch_size=8", "epochs=1", "max_steps=null",
)  # fmt: skip
_OTHER = "outputs/n/9999-01-01_00-00-00"
"""A run that was stopped, and that was started with the words of `_RESUMED`."""


@dataclass
class Place:
    """A place that a special file is put in.

    Attributes:
        what: what it is.
        path: relative to the folder that the program is started in.
        words: of the command line.
        statuses: the exit statuses that are as promised.
        verb: the verb.
    """

    what: str
    path: str
    words: tuple[str, ...]
    statuses: tuple[int, ...]
    verb: str = "train"


def _places() -> list[Place]:
    here = (*_WORDS, f"ckpt_path={_OTHER}", directory(Path(_OTHER)))
    files = ("overrides.yaml", "config.yaml", "summary.json", "environment.json", "run.log", "metrics.jsonl", ".lock")
    data = "pictures/train/cats/special.png"
    sweep = (*_WORDS, "--multirun", "seed=0", "hydra.sweep.dir=sweep")
    return [
        *(Place(f"{name} of another run, resume=auto", f"{_OTHER}/{name}", _RESUMED, (0,)) for name in files),
        Place("checkpoints of another run, resume=auto", f"{_OTHER}/checkpoints", _RESUMED, (0,)),
        *(Place(f"{name} of another run, resume=auto", f"{_OTHER}/checkpoints/{name}.safetensors", _RESUMED, (0, 2))
          for name in ("last", "best", "step_0000000009")),
        Place("another run, resume=auto", "outputs/n/9999-09-09_00-00-00", _RESUMED, (0,)),
        Place("last.safetensors of another run, ckpt_path=last", "outputs/n/9999/checkpoints/last.safetensors",
              (*_WORDS, "ckpt_path=last"), (0,)),
        *(Place(f"{name} of the run itself", f"{_OTHER}/{name}", here, (0, 2)) for name in files),
        *(Place(f"{name} of the run itself", f"{_OTHER}/checkpoints/{name}.safetensors", here, (0, 2))
          for name in ("last", "best")),
        Place("config.yaml of a run to evaluate", f"{_OTHER}/config.yaml", (f"ckpt_path={_OTHER}", "split=val"), (0,), "eval"),
        Place("best.safetensors of a run to evaluate", f"{_OTHER}/checkpoints/best.safetensors",
              (f"ckpt_path={_OTHER}", "split=val"), (0, 2), "eval"),
        Place("an image to train on", data, (*_WORDS, *_IMAGES), (0, 1, 2)),
        Place("an image to train on, data.on_error=skip", data, (*_WORDS, *_IMAGES, "data.on_error=skip"), (0,)),
        Place("a class of images", "pictures/train/special", (*_WORDS, *_IMAGES), (0, 2)),
        Place("an image to predict", data, (f"ckpt_path={_OTHER}", "input=pictures", "output=rows.csv"), (0,), "predict"),
        Place("an input of predict", "special.png", (f"ckpt_path={_OTHER}", "input=special.png", "output=rows.csv"), (0, 1, 2),
              "predict"),
        *(Place(f"init_from, {name}", name, (*_WORDS, f"init_from={name}"), (2,))
          for name in ("weights.pth", "weights.safetensors")),
        Place("ckpt_path", "sent.safetensors", (*_WORDS, "ckpt_path=sent.safetensors"), (2,)),
        Place("an option of a group", "conf/model/special.yaml", (*_WORDS, "--config-dir=conf"), (0,)),
        Place("an option of a group that is selected", "conf/model/special.yaml",
              (*_WORDS, "--config-dir=conf", "model=special"), (2,)),
        Place("a primary config", "conf/special.yaml", (*_WORDS, "--config-dir=conf", "--config-name=special"), (2,)),
        *(Place(f"{name} in the folder of a sweep", f"sweep/{name}", sweep, (0, 2))
          for name in ("sweep.jsonl", "sweep.json", "0/summary.json", "0/overrides.yaml")),
    ]  # fmt: skip


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    except OSError:
        path.symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _unreadable(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


_KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": _pipe,
    "a socket": _socket,
    "a device": _device,
    "a folder": Path.mkdir,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a huge file": _huge,
    "an unreadable file": _unreadable,
}


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    base = _base(bench.folder / "base")
    chosen = [(place, kind) for place in _places() for kind in _KINDS]
    if bench.counts["special"]:
        chosen = bench.draw.sample(chosen, bench.counts["special"])
    rows = {kind: Row("special", kind) for kind in _KINDS}
    for number, (place, kind) in enumerate(chosen):
        broken = _try(place, kind, base, bench.folder / f"case_{number}")
        rows[kind].count(f"as {place.what}: {broken}" if broken else "", bench.say)
        if number % 20 == 19:
            bench.say(f"  special: {sum(row.kept for row in rows.values())} of {number + 1} as promised")
    return [row for row in rows.values() if row.injected]


def _base(folder: Path) -> Path:
    """A folder with a run that was stopped, some pictures, and a config of the user's."""
    folder.mkdir(parents=True)
    life = begin(_RESUMED, folder / "log", _inside(folder))
    assert life.wait() == 0, life.said()[-2000:]
    [run] = (folder / "outputs" / "n").iterdir()
    run = run.rename(folder / _OTHER)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(
        json.dumps(summary | {"status": "preempted", "started": "9000-01-01T00:00:00+00:00"})
    )
    pictures(folder / "pictures")
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "mine.yaml").write_text("# Mine.\n_target_: runner.models.mlp.MLP\n")
    return folder


def _inside(folder: Path) -> Callable[[], None]:
    def prepare() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        os.chdir(folder)

    return prepare


def _try(place: Place, kind: str, base: Path, folder: Path) -> str:
    """Put a special file there and run the program; gives what was not as it should be, or an empty string."""
    shutil.copytree(base, folder)
    path = folder / place.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    _KINDS[kind](path)
    life = begin(place.words, folder / "log", _inside(folder), place.verb)
    status, said = life.wait(_LONGEST_S), life.said()
    with contextlib.suppress(OSError):
        path.chmod(0o600)
    shutil.rmtree(folder, ignore_errors=True)
    # A folder, a link to nothing and a file that root can read may be what belongs there, or as good as absent.
    harmless = (0,) if kind in ("a folder", "a dangling link", "an unreadable file") else ()
    if status not in (*place.statuses, *harmless, *((2,) if harmless else ())):
        return f"status {status}: {said[-1500:]}"
    if "Traceback" in said or (status != 0 and "error: " not in said):
        return f"no sentence: {said[-1500:]}"
    return ""
