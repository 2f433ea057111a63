"""A model for the Hugging Face Hub: a checkpoint of nothing but its weights, its config, a model card, and the upload."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.base.files import write_atomically
from runner.base.reading import read_overrides, read_summary
from runner.checkpoint import file, find
from runner.checkpoint.hub import FILE, asking
from runner.lab.export.formats import Inputs, Writer
from runner.run.from_checkpoint import ResolvedCheckpoint, run_directory_of
from runner.run.model import DataFacts, model_of
from runner.tracking.formats import markdown_table, number


def format_of(resolved: ResolvedCheckpoint[Any], data: DataFacts) -> tuple[str, Writer]:
    """The file of the hub and what writes it: a checkpoint with the selected weights, without what only training needs."""
    contents, (weights, kind) = resolved.found.contents, resolved.weights
    metrics = {name: value for name, value in contents["metrics"].items() if name != "terms"} | {"callbacks": {}}
    kept = contents | {"model": weights, "metrics": metrics, "scaler": None, "averaged": None}
    kept |= {"optimizer": {}, "scheduler": {}, "rng": {}}
    kept |= {"loss": loss} if (loss := (contents if kind == "raw" else contents["averaged"]).get("loss")) else {}

    def write(model: nn.Module, example: Inputs, path: Path) -> nn.Module:
        file.write(path, kept)
        again = dataclasses.replace(resolved, found=find.load(str(path), path.parent, "best"), which="auto")
        loaded: Any = model_of(again.restore_model(data, torch.device("cpu"))[1])
        return loaded.export_model() if hasattr(loaded, "export_model") else loaded

    return FILE, write


def describe(resolved: ResolvedCheckpoint[Any], record: dict[str, Any], folder: Path, named: bool) -> list[Path]:
    """Write the config, and a model card for `record`, the content of `model.json`; for `named` see `replacing`."""
    contents, place = resolved.found.contents, f"hf://{resolved.config.hub}"
    run, words = run_directory_of(resolved.found.path) or Path(), list[str]()
    summary = read_summary(run) or {}
    with contextlib.suppress(OSError, ValueError):  # a checkpoint may have been moved out of its run
        words = ["## Training", "```bash", shlex.join(["python", "-m", "runner", "train", *read_overrides(run)]), "```"]
    metrics = {"val": contents["metrics"].get("last") or {}}
    # The test may be of other weights than those that are exported
    if (summary.get("test_step"), summary.get("test_weights", "raw")) == (record["global_step"], record["weights"]):
        metrics["test"] = summary["test"]
    metrics |= {record["split"]: record["metrics"]["model"]} if "split" in record else {}
    samples = ", ".join(f"{split['samples']:,} {name}" for name, split in contents["metrics"]["data"].items())
    facts = [
        ["model, task", f"{record['model']}, {record['task']}"],
        ["data", f"{resolved.config.data.name}, samples: {samples}"],
        ["weights", f"{record['weights']}, step {record['global_step']}, SHA-256 {record['weights_sha256']}"],
        [FILE, f"SHA-256 {record['files']['safetensors']['sha256']}"],
        ["model.json", "classes, preprocessing of images, inputs and outputs"],
        ["versions", ", ".join(map(" ".join, contents["versions"].items()))],
        *([f"{name}, {split}", number(value)] for split, found in metrics.items() for name, value in found.items()),
    ]
    python = ["```python", "import runner", "", f'print(runner.load("{place}").predict("photo.jpg"))', "```"]
    page = ["---", "library_name: runner", "tags: [runner]", "---", f"# {resolved.config.hub}", "## Use", "```bash"]
    page += [f"python -m runner predict ckpt_path={place} input=photos/", f"python -m runner train init_from={place}", "```"]
    page += [*(python if resolved.config.data.images is None else []), *words, "## Facts", *markdown_table(["", ""], facts)]
    written = {folder / "config.yaml": contents["config"], folder / "README.md": "\n".join([*page, ""])}
    for path, text in written.items():
        write_atomically(path, text.encode(errors="replace"), named=named)
    return [*written]


def push(repository: str, paths: Sequence[Path]) -> str:
    """Create a repository on the hub, upload files to it in one commit, and give its address; raises `UserError`."""
    from huggingface_hub import CommitOperationAdd, HfApi

    allowed = f"another name, or to upload what was written: hf upload {repository} {paths[0].parent}"
    with asking("hub", repository, allowed):
        address = HfApi().create_repo(repository)
        parts = [part for path in paths for part in (path, path.with_name(f"{path.name}.data")) if part.exists()]  # of ONNX
        files = [CommitOperationAdd(part.name, part) for part in parts]
        HfApi().create_commit(repository, files, commit_message="Export by runner")
    return str(address)
