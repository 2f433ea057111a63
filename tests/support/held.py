"""A callback that writes what each rank holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.distributed.sharding import local
from runner.distributed.world import world
from runner.instrument.nested import tensors_in


class Held:
    """Writes the bytes of this rank's weights and optimizer state to `rank_<number>.json` in a folder."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / f"rank_{world().rank}.json"

    def on_end(self, loop: Any) -> None:
        state = [dict(each) for each in loop.state.optimizer.state.values()]
        held = [loop.state.model.parameters(), tensors_in(state)]
        self._path.write_text(json.dumps([sum(local(tensor).nbytes for tensor in tensors) for tensors in held]))
