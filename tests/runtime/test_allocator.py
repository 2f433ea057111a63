"""Freed memory is kept for the next step."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from runner.runtime.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(2**23).add_(1)  # 32 MiB: 8192 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.zeros(2**23)
usual = faults()
assert keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.extended
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_the_system_is_not_asked_for_the_same_memory_at_every_step() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert kept * 20 < usual
