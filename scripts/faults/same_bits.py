"""Settings that must not change a bit of the final weights."""

from __future__ import annotations

from faults.jobs import directory, known, whole
from faults.lives import fingerprint, live
from faults.table import Bench, Row

_BASE = ("transform=strong", "data.shift=0.125", "model.dropout=0.2", "epochs=2", "accumulate=2")
_DISK = "data.placement=disk"
SETTINGS: dict[str, tuple[str, ...]] = {
    "workers 0": (_DISK, "data.num_workers=0"),
    "workers 1, prefetch 1": (_DISK, "data.num_workers=1", "data.prefetch=1"),
    "workers 2, prefetch 8": (_DISK, "data.num_workers=2", "data.prefetch=8"),
    "workers 3": (_DISK, "data.num_workers=3", "data.persistent_workers=false"),
    "pinned memory": (_DISK, "data.num_workers=1", "data.pin_memory=true"),
    "not pinned": (_DISK, "data.num_workers=1", "data.pin_memory=false", "data.non_blocking=false"),
    "progress and logs at every step": ("log.progress=true", "log.every_steps=1", "logger=all"),
    "logs seldom": ("log.every_steps=1000",),
    "evaluation at every step": ("evaluate.every_steps=1", "evaluate.batch_size=7"),
    "no evaluation": ("evaluate.every_epochs=null",),
    "test at the end": ("evaluate.test=true", "callbacks=none"),
    "checkpoint at every step": ("checkpoint.every_steps=1", "checkpoint.keep=1"),
    "checkpoint at the end": ("checkpoint.every_steps=null", "checkpoint.every_epochs=null"),
    "synchronous checkpoints": ("checkpoint.async=false",),
    "synchronous, at every step": ("checkpoint.async=false", "checkpoint.every_steps=1"),
}


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    row = Row(
        "same_bits", "a setting that must not matter: workers, prefetching, pinning, logs, evaluations, checkpoints"
    )
    base = whole(_BASE)
    first = live([*base, directory(bench.folder / "reference")], bench.folder / "reference.log")
    assert first.status == 0, first.said()[-2000:]
    expected = fingerprint(bench.folder / "reference")
    settings = {name: words for name, words in SETTINGS.items() if known(words)}
    names = list(settings)[: bench.counts["settings"] or None]
    for number, name in enumerate(names):
        run = bench.folder / f"run_{number}"
        life = live([*base, *settings[name], directory(run)], run.with_suffix(".log"))
        found = fingerprint(run) if life.status == 0 else f"status {life.status}: {life.said()[-1500:]}"
        row.count("" if found == expected else f"{name}: {found} instead of {expected}", bench.say)
    return [row]
