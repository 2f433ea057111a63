"""One measurement of one contender in this process: `python -m peers.measure JOB`. `runner` has its own command line."""

from __future__ import annotations

import importlib
import sys

import torch

from peers.cases import Job
from peers.clock import Clock
from peers.work import work_of


def main() -> None:
    """Train, and write what it took."""
    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    loop = importlib.import_module(f"peers.{job.contender}_loop")
    work, clock = work_of(job), Clock()
    clock.write(work, loop.train(work, clock))


if __name__ == "__main__":
    main()
