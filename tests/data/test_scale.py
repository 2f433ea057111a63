"""A billion samples cost what a batch of them costs: at the start, in an epoch and at a resume in the middle of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.data.sampler import EpochOrder

pytestmark = pytest.mark.slow

BILLION = 10**9
MIDDLE = 15_000_000  # batches into the epoch, most of a billion samples
BATCH = 64

VAST = """
import torch
from torch.utils.data import Dataset, get_worker_info


class Vast(Dataset):
    classes = ("even", "odd")

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        if get_worker_info() is not None:
            with open("read.txt", "a") as file:
                print(index, file=file)
        return torch.full((1, 4, 4), index % 251, dtype=torch.uint8), index % 2


def vast(**settings):
    return {"train": Vast()}
"""
RUN = f"""
import resource, sys
from pathlib import Path

import torch
import runner.train
from runner.checkpoint.file import read, write
from runner.cli import main

# Room for a model and batches, but for nothing that has a byte for each of the samples.
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 600 * 2**20,) * 2)
try:
    torch.zeros({BILLION}, dtype=torch.uint8)
except RuntimeError:
    pass
else:
    sys.exit("there is no limit, and nothing was tested")

common = ["threads=1", "logger=none", "log.progress=false", "log.curves=false", "trust=[vast]"]
assert main([
    "train", *common, "data=synthetic", "data.dataset._target_=vast.vast", "data.batch_size={BATCH}",
    "data.num_workers=1", "data.prefetch=1", "data.split.val=0", "data.split.test=0", "data.name=vast", "name=vast",
    "model=mlp", "model.hidden=[4]", "transform=none", "epochs=1", "max_steps=2", "data.on_error=skip",
]) == 0
Path("read.txt").unlink()
path = next(Path("outputs/vast").glob("*/checkpoints/last.safetensors"))
contents = read(path)
contents["position"] |= {{"batch": {MIDDLE}, "global_step": {MIDDLE}}}
write(path, contents)
assert main(["train", *common, f"ckpt_path={{path}}", "max_steps={MIDDLE + 2}"]) == 0
"""


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is measured from what Linux says")
def test_a_run_on_a_billion_samples_and_a_resume_inside_its_epoch_fit_into_little_memory(workdir: Path) -> None:
    (workdir / "vast.py").write_text(VAST)
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    read = [int(line) for line in (workdir / "read.txt").read_text().splitlines()]
    expected = EpochOrder(BILLION, 0, 0).slice(MIDDLE * BATCH, (MIDDLE + 2) * BATCH).tolist()
    assert read[: 2 * BATCH] == expected
    assert len(set(read)) == len(read)
