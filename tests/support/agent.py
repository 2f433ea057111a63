"""Starts ranks as torchrun does."""

from __future__ import annotations

import os
from unittest import mock

import torch.distributed as dist
from forked import ForkedProgram


class Agent:
    """What torchrun does, without its imports: it has the store, and starts the ranks."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._restarts = 0

    def __call__(self, *command_lines: tuple[str, ...]) -> list[tuple[int, str, str]]:
        """Start a rank with each command line; returns status, output and errors of each."""
        ranks, count = [], str(len(command_lines))
        for rank, words in enumerate(command_lines):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self._store.port)}
            environment |= {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            }
            with mock.patch.dict(os.environ, environment):
                ranks.append(ForkedProgram(words))
        self._restarts += 1
        try:
            return [(rank.wait(240), *rank.communicate()) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
