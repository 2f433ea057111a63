"""What ranks whose clocks differ agree on."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch

from runner.distributed.agreement import Agreement
from runner.distributed.world import joined


def on_a_rank(folder: Path) -> None:
    """Write the times of the common clock, and the reason to stop, to `RANK.json`."""
    with joined(60, torch.device("cpu")) as world:
        times = (100.0 * world.rank + step for step in range(5, 99))
        with mock.patch("runner.distributed.agreement.time.monotonic", side_effect=times):
            agreement = Agreement(world, lambda: "SIGTERM" if world.rank == 1 else "", 60.0)
            found = [agreement.clock(), agreement.reason()]
            agreement.confirm()
        (folder / f"{world.rank}.json").write_text(json.dumps([*found, agreement.clock(), agreement.reason()]))
