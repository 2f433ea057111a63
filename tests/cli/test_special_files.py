"""Named pipes, and files that are too large, where the program lists or opens files: nothing blocks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import forked
import numpy as np
import pytest
from PIL import Image

from runner.base.errors import UserError
from runner.data.sources.image_io import read_image


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run(words, timeout=60)


def test_a_folder_of_configs_with_special_files_can_be_listed(workdir: Path) -> None:
    group = workdir / "mine" / "model"
    group.mkdir(parents=True)
    os.mkfifo(group / "pipe.yaml")
    with (group / "huge.yaml").open("wb") as file:
        file.truncate(2**40)
    (group / "net.yaml").write_text("# My network.\n_target_: runner.models.mlp.MLP\n")
    (group / "binary.yaml").write_bytes(b"\xff\xfe")
    done = call("list", "model", "--config-dir", "mine")
    assert done.returncode == 0, done.stderr
    listed = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
    assert ["net", "My network."] in listed
    assert ["binary", "(cannot be read)"] in listed
    assert not {"pipe", "huge"} & {name for name, *_ in listed}
    done = call("train", "--config-dir", "mine", "model=pipe")
    assert done.returncode == 2
    assert "model: has no option 'pipe'" in done.stderr


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_named_pipe_in_a_folder_of_images_is_a_sample_that_cannot_be_read(run, workdir: Path, on_error: str) -> None:
    for number in range(12):
        path = workdir / "photos" / "train" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number, dtype=np.uint8)).save(path)
    os.mkfifo(workdir / "photos" / "train" / "cats" / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png: it is not a regular file"):
        read_image(workdir / "photos" / "train" / "cats" / "pipe.png", 8)
    words = [
        "data=image_folder",
        "data.root=photos",
        "data.image_size=8",
        "data.num_workers=0",
        "model=mlp",
        "epochs=1",
    ]
    result = run("train", *words, "data.split.val=0", "data.split.test=0", "evaluate.test=false", "threads=1", "logger=none",
                 "log.curves=false", f"data.on_error={on_error}")  # fmt: skip
    assert result.status == (2 if on_error == "raise" else 0), result.err
    assert "pipe.png: it is not a regular file" in result.out + result.err
