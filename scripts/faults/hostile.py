"""Files from somebody who means harm: nothing runs, nothing is written elsewhere, memory has bounds, and a sentence says why."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.hostile_files import CASES, HARMLESS, Arena, Case
from faults.jobs import directory, whole
from faults.lives import live
from faults.table import Bench, Row

_MEMORY = 2**30  # bytes that a run may take beyond what the program has when it starts


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    refused, harmless = (
        Row("hostile", "refused in a sentence, status 2"),
        Row("hostile", "used without effect, status 0"),
    )
    words = whole(("epochs=2", "max_steps=3", "callbacks=none"))
    first = live([*words, directory(bench.folder / "ours")], bench.folder / "ours.log")
    assert first.status == 0, first.said()[-2000:]
    count = bench.counts["hostile"]
    chosen = bench.draw.sample(CASES, count) if count else CASES
    for number, case in enumerate(chosen):
        if number % 20 == 19:
            bench.say(
                f"  hostile: {refused.kept + harmless.kept} of {refused.injected + harmless.injected} as promised"
            )
        for verb, status in (("train", case.train), ("eval", case.eval)):
            if status is not None:
                row = harmless if status == HARMLESS else refused
                broken = _try(case, verb, status, bench.folder / f"case_{number}_{verb}", bench.folder / "ours")
                row.count(f"{verb} of {case.what}: {broken}" if broken else "", bench.say)
    harmless.note = f"{len(chosen)} kinds of files in all, by train and by eval"
    return [refused, harmless]


def _try(case: Case, verb: str, status: int, folder: Path, ours: Path) -> str:
    """Use a malicious file; gives what was not as it should be, or an empty string."""
    from runner.checkpoint.file import read

    arena = Arena(
        folder / "untrusted", folder / "outside", folder / "outside" / "ran", folder / "untrusted" / "run", {}
    )
    for path in (arena.untrusted, arena.outside, folder / "home", folder / "user"):
        path.mkdir(parents=True)
    (arena.outside / "precious.txt").write_text("precious\n")
    shutil.copytree(ours, arena.run)
    arena.contents = read(arena.run / "checkpoints" / "last.safetensors")
    words = case.make(arena)
    watched = [arena.outside, folder / "user"]
    if not any(word.startswith("hydra.run.dir=") for word in words):
        watched.append(arena.untrusted)
    if verb == "eval":
        words += [f"output={folder / 'home' / 'evaluation'}", "split=val"]
    before = [_listing(path) for path in watched]
    life = live(words, folder / "log", _bounded(folder), verb)
    after = [_listing(path) for path in watched]
    said = life.said()
    strange = sorted(
        path.name for path in folder.iterdir() if path.name not in ("untrusted", "outside", "home", "user", "log")
    )
    if arena.canary.exists() or strange or (folder / "home" / "canary").exists():
        return f"its code was run: {strange}"
    if before != after:
        names = {name for old, new in zip(before, after, strict=True) for name in old.keys() ^ new.keys()}
        return f"files elsewhere were changed: {sorted(names)}"
    if life.status != status or "Traceback" in said or (status and "error: " not in said):
        return f"status {life.status} instead of {status}: {said[-1500:]}"
    if any(letter in said for letter in ("\x1b", "\x07", "\x9b")):
        return "control characters reached the terminal"
    return "" if len(said) < 2**22 else f"{len(said)} characters were printed"


def _bounded(folder: Path) -> Callable[[], None]:
    """Bound the memory of the process, and let it start in an empty folder, of an empty home."""

    def prepare() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        os.environ["HOME"] = str(folder / "user")
        os.environ["MPLCONFIGDIR"] = str(folder.parent / "matplotlib")  # fonts are looked for once
        os.chdir(folder / "home")

    return prepare


def _listing(folder: Path) -> dict[str, Any]:
    """Every path in a folder with a digest of its contents."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else str(path.is_symlink())
    return found
