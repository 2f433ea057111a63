"""Models are computed by one thread, with random numbers from a seed."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest import mock

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network; gives the folder, still empty, that takes the place of torch.hub's."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=OSError("the network is off in this test")))
    return tmp_path
