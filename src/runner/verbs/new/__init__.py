"""Write a scaffold of a model, data set, task, callback or project that trains as it is: `new model MyNet`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.errors import UserError

if TYPE_CHECKING:
    from runner.verbs.new.plan import Plan


def main(argv: Sequence[str]) -> int:
    """Write the files and say what to run next.

      python -m runner new model MyNet            a network, its option model=my_net, and a test
      python -m runner new data MyImages          a data set
      python -m runner new task MyTask            metrics, and what is best
      python -m runner new callback MyCallback    something that happens while training goes on
      python -m runner new project my_project     a folder with a package, a network, data, an experiment and tests

    --package NAME    package that the code goes into: the one in this folder, or my_package, unless given
    --config-dir DIR  folder that the option goes into: conf if it is there, or my_conf, unless given

    A file that is there is never overwritten.
    """
    plan = _plan(argv, Path.cwd())
    plan.write()
    print(
        "\n".join(["written:", *(f"  {path}" for path in plan.files), "", "try:", *(f"  {c}" for c in plan.commands)])
    )
    return 0


def _plan(argv: Sequence[str], folder: Path) -> Plan:
    from runner.verbs.new.plan import KINDS, kind_of, planned

    words: list[str] = []
    flags: dict[str, str] = {}
    rest = iter(argv)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            words.append(word)
            continue
        if flag not in ("--package", "--config-dir"):
            raise UserError(f"new: unknown flag '{flag}'\n    allowed: --package NAME, --config-dir DIR")
        value = value if equals else next(rest, "")
        if not value:
            raise UserError(f"new: {flag} needs a {'name' if flag == '--package' else 'folder'}")
        flags[flag] = value
    if len(words) != 2:
        raise UserError(
            f"new: takes what to write and its name, got {len(words)} word{'' if len(words) == 1 else 's'}\n"
            f"    allowed: {', '.join(f'{kind} NAME' for kind in KINDS)}"
        )
    kind, name = words
    return planned(kind_of(kind), name, folder, flags.get("--package"), flags.get("--config-dir"))
