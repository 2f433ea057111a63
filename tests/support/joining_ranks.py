"""What ranks do in tests of how they meet."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from runner.distributed.world import joined


def meet_without_one(folder: Path) -> None:
    """Join the others for 2 s, but for rank 1, which sleeps before."""
    if os.environ["RANK"] == "1":
        time.sleep(300)
    with joined(2, torch.device("cpu")):
        (folder / "met").touch()
