"""The verbs of the command line: a new one is an entry here and the module that it names. Also their words and errors.

Imports nothing heavy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.base.errors import UserError
from runner.base.secrets import mask_text
from runner.config.sources import Sources
from runner.tracking.formats import clean

_NOT_PLAIN = frozenset("[](){}'\"")
_JSON = {"--json": "json=true", "json=-": "json=true"}


@dataclass(frozen=True)
class Verb:
    """One verb."""

    name: str  # as it is typed
    help: str
    module: str  # has `run(composition)`; of a verb that takes no config, `module:function`, which takes the words
    # Folder below `output_root` that gets the sweeps of a verb that takes a config; `{name}` is the run's name
    sweeps: str = ""
    # Whether each job has a run directory, where `run` reports its own errors, and a sweep ends with a table
    keeps_runs: bool = False
    on_ranks: bool = False  # whether several processes can share the work: `devices`, torchrun, SLURM
    # Keys that take one value or a list: `key=a,b` means `key=[a,b]` unless `--multirun` makes it a sweep
    lists: tuple[str, ...] = ()
    # Keys that take nothing but a list: `key=a` means `key=[a]`, and `key=a,b` means `key=[a,b]` with `--multirun` too
    only_lists: tuple[str, ...] = ()
    # Words that stand for others
    aliases: Mapping[str, str] = field(default_factory=_JSON.copy)
    rewrite: Callable[[str], str] = str  # expands further shorthand, one word at a time
    # Variables that are set before a job imports torch, unless the user has set them
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_config(self) -> bool:
        """True if the words after the verb are overrides of a config."""
        return bool(self.sweeps)

    def expand_shorthand(self, argv: Sequence[str]) -> list[str]:
        """The words after the verb in the form that Hydra understands."""
        sweep = not {"--multirun", "-m"}.isdisjoint(argv)
        if self.takes_config and any(word.startswith("task=") and ".py" in word for word in argv):
            from runner.config.task_file import with_task_file  # imports the schema

            argv = with_task_file(argv)
        return [self.rewrite(self._as_list(self.aliases.get(word, word), sweep)) for word in argv]

    def _as_list(self, word: str, sweep: bool) -> str:
        key, _, value = word.partition("=")
        if not value or not _NOT_PLAIN.isdisjoint(value):
            return word
        several = key.lstrip("+") in self.lists and "," in value and not sweep
        only = key.lstrip("+") in ("trust", *self.only_lists) and value != "null"
        return f"{key}=[{value}]" if several or only else word


def _expand_vary(word: str) -> str:
    """`vary=KEY:A,B` as `vary.KEY=[A,B]`."""
    match = re.fullmatch(r"\+*vary=([A-Za-z_][\w.]*):(.+)", word, re.DOTALL)
    if match is None:
        return word
    key, values = match.groups()
    return f"vary.{key}=[{values}]" if "," in values else f"vary.{key}={values}"


_ENTRIES = (
    Verb(
        "audit",
        "Train twice, or with two settings, and name the first step and tensor that differ; or compare two runs or checkpoints.",
        "runner.lab.audit",
        sweeps="audits",
        rewrite=_expand_vary,
    ),
    Verb(
        "bench",
        "Compare the toggles for speed and memory on this machine.",
        "runner.lab.bench",
        sweeps="benchmarks",
    ),
    Verb(
        "check",
        "Find common mistakes in data, model, loss and loop before a run: pass, warn or fail, with evidence and fix.",
        "runner.lab.check.run",
        sweeps="checks",
        only_lists=("only", "skip"),
        aliases={**_JSON, "--strict": "strict=true", "--train": "train=true"},
    ),
    Verb(
        "copy",
        "Copy an option to your config folder: `copy model=vit_tiny my_conf`.",
        "runner.verbs.options:copy",
    ),
    Verb(
        "env", "Show the environment: versions, devices and settings that a run depends on.", "runner.verbs.options:env"
    ),
    Verb(
        "eval",
        "Evaluate a checkpoint on a split: metrics, per-class accuracy, confusion matrix.",
        "runner.verbs.eval",
        sweeps="evaluations",
        on_ranks=True,
        lists=("tta",),
    ),
    Verb(
        "export",
        "Write a checkpoint as safetensors, torch.export, ONNX or TorchScript, each compared with the model.",
        "runner.lab.export.run",
        sweeps="exports",
        lists=("format",),
    ),
    Verb(
        "find-lr",
        "Find a learning rate with a range test: a suggestion and a plot of the loss over the rate.",
        "runner.verbs.find_lr",
        sweeps="find-lr/sweeps",
    ),
    Verb(
        "inspect",
        "Inspect a model: layers, parameters, FLOPs, activations, gradients, features and wrong samples.",
        "runner.lab.inspect.run",
        sweeps="inspections",
        only_lists=("what", "tensors", "features"),
    ),
    Verb("list", "List the config groups and their options, one line each.", "runner.verbs.options:list_options"),
    Verb(
        "new",
        "Generate a working model, data set, task, callback or project: `new model MyNet`.",
        "runner.verbs.new:main",
    ),
    Verb(
        "pack",
        "Pack the images of a data set into tar files, which `data=shards` reads; an interrupted pack goes on.",
        "runner.verbs.pack",
        sweeps="packs",
    ),
    Verb(
        "predict",
        "Predict the classes of images: files, folders or a split, written as CSV or JSON lines.",
        "runner.verbs.predict.run",
        sweeps="predictions",
        on_ranks=True,
        lists=("input", "features", "tta"),
    ),
    Verb(
        "profile",
        "Profile training steps: shares of data, host and device, a trace of torch.profiler, memory.",
        "runner.lab.profile",
        sweeps="profiles/sweeps",
        # torch reads these when it is loaded; without them its profiler writes notes about itself to standard error.
        environment={"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    ),
    Verb(
        "report",
        "Compare runs from their files, also while they run: table, difference, baseline, page with curves.",
        "runner.verbs.report:main",
        aliases={"--json": "json=-", "json=true": "json=-"},
    ),
    Verb(
        "show",
        "Show what an option contains (`show model=vit_tiny`), what a key means (`show optimizer.lr`), or all top-level keys.",
        "runner.verbs.options:show",
    ),
    Verb(
        "sweep",
        "Show the table of a sweep from the files in its folder, also while it runs: `sweep DIR`.",
        "runner.verbs.report:sweep",
    ),
    Verb(
        "train",
        "Train a model: one run, a sweep with --multirun, or a resume with ckpt_path=.",
        "runner.verbs.train",
        sweeps="{name}/sweeps",
        keeps_runs=True,
        on_ranks=True,
    ),
    Verb(
        "watch",
        "Follow a run, a sweep or a folder of runs from its files, live, until no run is active: `watch DIR`.",
        "runner.verbs.report:watch",
    ),
)
VERBS = {verb.name: verb for verb in _ENTRIES}


def split_words(
    verb: str, argv: Sequence[str], flags: Mapping[str, str], other_flags: bool = False
) -> tuple[list[str], list[tuple[str, str]]]:
    """Split the words after a verb that takes no config into those that are not flags, and (flag, value).

    `flags` gives the flags and what their values are, `DIR` or `NAME`; with `other_flags`, others are ignored.
    """
    words: list[str] = []
    given: list[tuple[str, str]] = []
    rest = iter(argv)
    for word in rest:
        flag, _, value = word.partition("=")
        # Both forms are usual: --flag value and --flag=value
        if flag in flags:
            if not (value := value or next(rest, "")):
                raise UserError(verb, f"{flag} needs a {'folder' if flags[flag] == 'DIR' else 'name'}")
            given.append((flag, value))
        elif not word.startswith("-"):
            words.append(word)
        elif not other_flags:
            allowed = ", ".join(f"{name} {value}" for name, value in flags.items() if name.startswith("--"))
            raise UserError(verb, f"unknown flag '{flag}'", allowed)
    return words, given


def sources_and_words(verb: str, argv: Sequence[str], other_flags: bool = False) -> tuple[Sources, list[str]]:
    """The folders to search (`--config-dir DIR`) and the words that are not flags; arguments as `split_words` takes them."""
    words, given = split_words(verb, argv, {"--config-dir": "DIR", "-cd": "DIR"}, other_flags)
    return Sources([Path(folder) for _, folder in given]), words


def print_error(text: str) -> None:
    """Print an error to standard error, without secrets and control characters."""
    print(f"error: {mask_text(clean(text))}", file=sys.stderr)
