"""Named pipes, links, and files that are too large, where the program lists, opens or writes files: nothing blocks or is lost."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from extended import some
from image_reader import read_image
from PIL import Image

from runner.base.errors import UserError


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
    words = ["data=image_folder", "data.root=photos", "data.image_size=8", "data.num_workers=0", "data.split.val=0"]
    words += ["data.split.test=0", "evaluate.test=false", "model=mlp", "epochs=1", "threads=1", "logger=none"]
    result = run("train", *words, "log.curves=false", f"data.on_error={on_error}")
    assert result.status == (2 if on_error == "raise" else 0), result.err
    assert "pipe.png: it is not a regular file" in result.out + result.err


OUTPUTS = {
    "report csv=named/a.csv": "a.csv",
    "report md=named/a.md": "a.md",
    "report json=named/a.json": "a.json",
    "report html=named/a.html": "a.html",
    "report save_baseline=named/a.json": "a.json",
    "predict input=val output=named/a.csv": "a.csv",
    "predict input=val features=head output=named/a.csv": "a_features.npz",
    "export format=safetensors output=named": "model.safetensors model.json",
    "eval split=val output=named": "eval_val.json",
    "inspect what=layers output=named": "inspect.json",
    "inspect features=[head] output=named/a.npz": "a.npz",
    "find-lr num_steps=10 output=named": "lr_range.json config.yaml",
    "profile steps=2 warmup_steps=1 trace_steps=1 output=named": "profile.json config.yaml ops.txt trace.json",
    "bench vary.threads=[1] budget_s=1 hydra.run.dir=named": "bench.json",
}
"""Commands, and the files that each writes into the folder `named`."""


@pytest.mark.slow
@pytest.mark.parametrize("command", some([*OUTPUTS], *range(len(OUTPUTS) - 1)))
def test_an_output_follows_links_and_is_written_into_a_named_pipe(command: str, trained: Path, accepted: Any) -> None:
    verb, *words = command.split()
    words.append(str(trained) if verb == "report" else f"ckpt_path={trained}")
    for folder in ("named", "elsewhere"):
        Path(folder).mkdir()
    names, received = OUTPUTS[command].split(), dict[str, bytes]()
    for name in names:
        Path("elsewhere", name).write_text("old")
        Path("named", name).symlink_to(Path("..", "elsewhere", name))
    accepted(verb, *words)
    for name in names:
        assert Path("named", name).is_symlink()
        assert len(Path("elsewhere", name).read_bytes()) > 60, name
    if "profile" in command:  # torch writes its trace itself
        return

    def receive(name: str) -> None:
        received[name] = Path("named", name).read_bytes()

    readers = [threading.Thread(target=receive, args=(name,), daemon=True) for name in names]
    for name, reader in zip(names, readers, strict=True):
        Path("named", name).unlink()
        os.mkfifo(Path("named", name))
        reader.start()
    accepted(verb, *words)
    for name, reader in zip(names, readers, strict=True):
        reader.join(20)
        assert Path("named", name).is_fifo()
        assert len(received[name]) > 60, name
