"""The folder of a sweep: the one that is named, that of the newest sweep of the same command, or a new one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from runner.base.errors import UserError
from runner.base.files import make_folder, writing
from runner.base.truth import is_true
from runner.config.keys import key_of, within
from runner.config.output_folders import holds_run
from runner.config.stored import differences
from runner.run.directory import Occupied, claim, hold, timestamp
from runner.sweeps.ledger import NAME, Ledger, Records
from runner.sweeps.plan import Plan


def base_changed(records: Records, plan: Plan) -> list[tuple[str, str, str]]:
    """Keys whose values differ from those of a sweep, except where it has several: (key, before, now)."""
    swept = [key.replace("/", ".") for launch in records.launches for key in launch["swept"]] + list(plan.swept)
    found = differences(records.launches[-1]["base"], plan.base)
    return [each for each in found if not within(each[0], [key.replace("/", ".") for key in swept])]


@contextlib.contextmanager
def opened_folder(root: Path, plan: Plan) -> Iterator[Path]:
    """Find or make the folder of a sweep, and hold it: the one that is named, or that of the newest sweep of the same command.

    Args:
        root: of the sweeps of this verb and name.
        plan: what will be done there.

    Raises:
        UserError: another process runs the sweep, or the folder holds something else.
    """
    named, new = plan.command.place, is_true(plan.command.composition.values["sweep"]["new"])
    # Hydra's key works too, but two folders cannot both be meant
    places = [key for key in ("sweep.dir", "hydra.sweep.dir") if key in map(key_of, plan.command.accepted)]
    if len(places) > 1:
        raise UserError("sweep.dir", "and hydra.sweep.dir are both given", "one of them")
    if named and new:
        raise UserError("sweep.dir", f"is {named}, and sweep.new is given too", "one of them")
    # Two processes with the same command at the same time must find one folder, not make two
    with contextlib.nullcontext() if named else _one_at_a_time(root):
        folder = named or (None if new else _same_sweep(root, plan)) or claim(root, timestamp())
        if holds_run(folder):
            raise UserError("sweep.dir", f"cannot be {folder}: it holds a run", "another folder")
        make_folder(folder)
        try:
            # The lock says that a sweep runs here, and is gone with the process
            lock = hold(folder)
        except Occupied as error:
            runs = f"{str(error).partition(';')[0].replace('written', 'run')}: python -m runner sweep {folder} shows it"
            allowed = "wait for it, end it with kill, or sweep.new=true for another one"
            raise UserError("sweep.dir", runs, allowed) from None
    try:
        yield folder
    finally:
        if lock is not None:
            os.close(lock)


def _same_sweep(root: Path, plan: Plan) -> Path | None:
    """The folder of the newest sweep of the same command."""
    same = []
    for path in root.glob(f"*/{NAME}"):
        records = Ledger(path.parent).read()
        if records.launches and records.launches[-1]["swept"] == list(plan.swept) and not base_changed(records, plan):
            same.append((records.launches[0]["time"], path.parent))
    return max(same)[1] if same else None


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Let other processes with the same command wait until this one holds its folder, so that they find it and get no other."""
    try:
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
            folder = os.open(root, os.O_RDONLY)
    except UserError as error:
        raise UserError("output_root", str(error)) from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
