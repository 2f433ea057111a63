"""The command line: finds the verb, shows help, and hands over. Nothing heavy is imported here."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Sequence
from inspect import cleandoc
from types import ModuleType
from typing import Any

from runner import __version__, verbs
from runner.config.errors import UserError, nearest, too_many_files
from runner.config.secrets import mask_text
from runner.tracking.formats import clean

USAGE_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT


def verb_modules() -> dict[str, ModuleType]:
    """Every verb with the module that implements it: one file each in `verbs/`."""
    names = sorted(module.name for module in pkgutil.iter_modules(verbs.__path__) if module.name[0] != "_")
    return {name.replace("_", "-"): importlib.import_module(f"runner.verbs.{name}") for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after the program's name; those of the process if None.

    Returns:
        Exit status: 0 done, 1 failed, 2 a mistake in the call, 3 diverged, 75 preempted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word in ("-sc", "--shell-completion") for word in words):
        return _complete(words)
    modules = verb_modules()
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(modules))
        return 0
    if words[0] == "--version":
        print(f"runner {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in modules:
        close = nearest(verb, modules)
        hint = f"; did you mean '{close}'?" if close else ""
        _complain(f"'{verb}' is not a verb{hint}\n    allowed: {', '.join(modules)} (python -m runner --help)")
        return USAGE_ERROR
    if ("-h" in rest or "--help" in rest) and not hasattr(modules[verb], "complete"):
        print(f"{(modules[verb].__doc__ or '').strip()}\n\n{cleandoc(modules[verb].main.__doc__ or '')}")
        return 0
    try:
        return int(modules[verb].main(rest))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads the output has seen enough (`| head`); Python must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if not (told := too_many_files(error)) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        _complain(told)
        return 1
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        _complain(str(error))
        return USAGE_ERROR


def _complain(text: str) -> None:
    print(f"error: {mask_text(clean(text))}", file=sys.stderr)


def _help(modules: dict[str, ModuleType]) -> str:
    lines = [
        "runner trains PyTorch vision models: one command a run, a sweep or a resume.",
        "",
        "  python -m runner VERB [key=value ...] [group=option ...] [Hydra flags]",
        "",
        "verbs",
    ]
    for verb, module in modules.items():
        lines.append(f"  {verb:<10} {(module.__doc__ or '').splitlines()[0].rstrip('.')}")
    lines += [
        "",
        "examples",
        "  python -m runner train                                    digits, nothing to download",
        "  python -m runner train data=fashion_mnist model=small_cnn +amp=true seed=1",
        "  python -m runner train --multirun optimizer.lr=0.1,0.01 seed=0,1,2",
        "  python -m runner train ckpt_path=last epochs=60           resume the newest run",
        "  python -m runner eval ckpt_path=outputs/digits/<run>",
        "  python -m runner list model                               what can be selected",
        "",
        f"flags of {_listed(modules)}: --multirun --cfg job --info --config-dir DIR --config-name NAME --resolve --help",
        'tab completion: eval "$(runner -sc install=bash)"',
        "exit status: 0 done, 1 failed, 2 a mistake in the call, 3 diverged, 75 preempted",
    ]
    return "\n".join(lines)


def _listed(modules: dict[str, ModuleType]) -> str:
    """The verbs that take a config, as people list things."""
    *others, last = [verb for verb, module in modules.items() if hasattr(module, "complete")]
    return f"{', '.join(others)} and {last}"


def _complete(words: list[str]) -> int:
    """Tab completion: verbs by ourselves, the rest by Hydra, which knows nothing of verbs."""
    modules = verb_modules()
    verb = "train"
    if any(word.startswith("query=") for word in words):
        line = os.environ.get("COMP_LINE", "")
        match = re.match(r"(\s*\S+(?:\s+-m\s+runner)?\s+)(\S*)(\s*)(.*)", line)
        if match is None or not match[3]:
            prefix = match[2] if match else ""
            print(" ".join(name for name in modules if name.startswith(prefix)))
            return 0
        verb = match[2]
        if verb not in modules or not hasattr(modules[verb], "complete"):
            return 0
        os.environ["COMP_LINE"] = f"runner {match[4]}"
    elif words[0] in modules:
        verb, words = words[0], words[1:]
    complete: Any = modules[verb].complete
    return int(complete(words))


if __name__ == "__main__":
    sys.exit(main())
