"""`new`: a model, data set, task, callback or whole project that trains at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from runner.base.errors import UserError, nearest
from runner.tracking.formats import amount
from runner.verbs._folders import split_words


def main(argv: Sequence[str]) -> int:
    """Write the files and print the commands to try them with.

      python -m runner new model MyNet            a network, its option model=my_net, and a test
      python -m runner new data MyImages          a data set
      python -m runner new task MyTask            metrics, and what is best
      python -m runner new callback MyCallback    something that happens during training
      python -m runner new project my_project     a folder with a package, a network, data, an experiment and tests

    --package NAME    package for the code; default: the one in this folder, or my_package
    --config-dir DIR  folder for the option; default: conf if it exists, or my_conf

    An existing file is never overwritten.
    """
    from runner.verbs.new.plan import KINDS, scaffold_plan, write_files

    words, given = split_words("new", argv, {"--package": "NAME", "--config-dir": "DIR"})
    if len(words) != 2:
        allowed = ", ".join(f"{kind} NAME" for kind in KINDS)
        raise UserError("new", f"takes a kind and a name, got {amount(len(words), 'word')}", allowed)
    kind, name = words
    if kind not in KINDS:
        raise UserError("new", f"cannot create a '{kind}'", ", ".join(KINDS), nearest(kind, KINDS))
    flags = dict(given)
    files, commands = scaffold_plan(kind, name, Path.cwd(), flags.get("--package"), flags.get("--config-dir"))
    write_files(files, Path.cwd())
    commands[-1:-1] = [] if importlib.util.find_spec("pytest") else ["pip install pytest"]
    print("\n".join(["written:", *(f"  {path}" for path in files), "", "try:", *(f"  {each}" for each in commands)]))
    return 0
