"""A model for the Hugging Face Hub: a checkpoint of nothing but weights, its config, a model card, and the upload."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import __version__
from runner.base.files import write_atomically
from runner.base.reading import read_overrides, read_summary
from runner.checkpoint import file, find
from runner.lab.export.formats import Inputs, Normalizing, Writer
from runner.run.from_checkpoint import ResolvedCheckpoint, run_directory_of
from runner.run.hub import asking
from runner.run.model import DataFacts, model_of
from runner.tracking.formats import markdown_table, number


def writer(resolved: ResolvedCheckpoint[Any], data: DataFacts) -> Writer:
    """Writes a checkpoint with the selected weights, without what only training needs."""
    contents, (weights, kind) = resolved.found.contents, resolved.weights
    kept = contents | {"model": weights, "metrics": contents["metrics"] | {"callbacks": {}, "train": {}, "terms": {}}}
    kept |= {"optimizer": {}, "scheduler": {}, "scaler": None, "averaged": None, "rng": {}}
    kept |= {"loss": loss} if (loss := (contents if kind == "raw" else contents["averaged"]).get("loss")) else {}

    def write(model: nn.Module, example: Inputs, path: Path) -> nn.Module:
        file.write(path, kept)
        again = dataclasses.replace(resolved, found=find.load(str(path), path.parent, "best"), which="auto")
        loaded: Any = model_of(again.restore_model(data, torch.device("cpu"))[1])
        loaded = loaded.export_model() if hasattr(loaded, "export_model") else loaded
        return Normalizing(loaded, model.scale, model.shift).eval() if isinstance(model, Normalizing) else loaded

    return write


def describe(resolved: ResolvedCheckpoint[Any], record: dict[str, Any], folder: Path, named: bool) -> list[Path]:
    """Write the config, and a model card for `record`, the content of model.json; for `named` see `replacing`."""
    contents, repository = resolved.found.contents, resolved.config.hub
    place, run = f"hf://{repository}", run_directory_of(resolved.found.path) or resolved.found.path
    page = ["---", "library_name: runner", "tags: [runner]", "---", f"# {repository}"]
    page += [f"With `runner` {__version__} or newer and its extra `huggingface`:", "", "```bash"]
    page += [f"python -m runner predict ckpt_path={place} input=photos/"]
    page += [f"python -m runner train init_from={place}", "```"]
    if resolved.config.data.images is None:  # which `load` is for
        page += ["```python", "import runner", "", f'runner.load("{place}").predict("photo.jpg")', "```"]
    if commands := _commands(run):
        page += ["## Training", "```bash", *commands, "```"]
    saved, step, kind, summary = contents["metrics"], record["global_step"], record["weights"], read_summary(run) or {}
    facts = {name: str(record[name]) for name in ("model", "task", "weights", "global_step", "weights_sha256")}
    facts |= {"data": resolved.config.data.name, "runner": __version__, "torch": str(contents["versions"].get("torch"))}
    facts |= {f"{name} samples": str(split["samples"]) for name, split in saved["data"].items()}
    # The last evaluation was of these weights at the step of the best one, and has metrics of raw and averaged weights
    note = "" if (saved["best"] or {}).get("global_step") == step else " (last evaluation)"
    average = f"val/{(contents['averaged'] or {}).get('kind')}_"
    own = [name for name in saved.get("last", {}) if name.startswith(average) == (kind != "raw")]
    facts |= {f"{name}{note}": number(saved["last"][name]) for name in own}
    if (summary.get("test_step"), summary.get("test_weights", "raw")) == (step, kind):  # others were not tested
        facts |= {f"test/{name}": number(value) for name, value in summary["test"].items()}
    measured = record["metrics"]["model"] if "split" in record else {}
    facts |= {f"{record['split']}/{name}": number(value) for name, value in measured.items()}
    page += ["## Facts", *markdown_table(["", ""], [*map(list, facts.items())]), "", "model.json has more.", ""]
    for name, text in (("config.yaml", contents["config"]), ("README.md", "\n".join(page))):
        write_atomically(folder / name, text.encode(errors="replace"), named=named)
    return [folder / "config.yaml", folder / "README.md"]


def _commands(run: Path) -> list[str]:
    """The command of a run, after those of the runs that it resumes, as far as their directories are there."""
    found = dict[Path, str]()
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        while run.absolute() not in found:  # a run may continue in its own directory
            found[run.absolute()] = shlex.join(["python", "-m", "runner", "train", *read_overrides(run)])
            run = Path((read_summary(run) or {})["resumed_from"]).parents[1]
    return [*found.values()][::-1]


def push(repository: str, files: Sequence[Path]) -> str:
    """Create a repository on the hub, upload files in one commit, and give its address; raises `UserError` about `hub`."""
    with asking("hub", repository, f"another name, or hf upload {repository} {files[0].parent}") as hub:
        address = hub.HfApi().create_repo(repository)
        added = [hub.CommitOperationAdd(path.name, path) for path in files]
        hub.HfApi().create_commit(repository, added, commit_message="Export by runner")
        return str(address)
