"""`copy`: a shipped option as a file to change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.base.errors import UserError
from runner.base.files import write_atomically
from runner.config.sources import Sources, text_of
from runner.verbs._folders import split_words
from runner.verbs.show import option_named


def main(argv: Sequence[str]) -> int:
    """Copy an option to your config folder: `copy model=vit_tiny my_conf`.

    The copy is named `my_vit_tiny`, or as `--name NAME` says: of two files with one name, the shipped one is read.
    """
    words, flags = split_words("copy", argv, {"--name": "NAME", "--config-dir": "DIR"})
    given = dict(flags)
    sources = Sources([Path(given["--config-dir"])] if "--config-dir" in given else [])
    if len(words) != 2 or "=" not in words[0]:
        raise UserError("copy", "needs an option and a folder", "copy model=vit_tiny my_conf")
    group, _, name = words[0].partition("=")
    option, new = option_named("copy", group, name, sources), given.get("--name", f"my_{name}")
    # Two options of one name would hide each other
    if sources.option(group, new) is not None:
        raise UserError("copy", f"{group} has an option '{new}' already", "another name, with --name NAME")
    path = Path(words[1]) / group / f"{new}.yaml"
    if path.exists():
        raise UserError("copy", f"{path} exists already", "another name, with --name NAME")
    # The header of the file shows how the option is selected, so it gets the new name
    text = text_of(option.path).replace(f"{group}={name}", f"{group}={new}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError("copy", f"cannot write {path}: {error.strerror}", "another folder") from error
    print(f"change {path}, then: python -m runner train --config-dir {words[1]} {group}={new}")
    print(path)
    return 0
