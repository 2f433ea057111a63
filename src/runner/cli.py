"""The command line: finds the verb, shows help, and hands over. Nothing heavy is imported here."""

from __future__ import annotations

import gc
import os
import re
import sys
import traceback
from collections.abc import Sequence

from runner import __version__
from runner.base.errors import FAILED, INTERRUPTED, OK, UserError, nearest, system_limit
from runner.base.signals import interruptible
from runner.verbs._launch import exit_status, launch_verb
from runner.verbs._table import VERBS, print_error

_MEANT = {"test": "eval", "evaluate": "eval", "validate": "eval", "val": "eval", "fit": "train", "infer": "predict"}
_MEANT |= {"-V": "--version", "-v": "--version", "version": "--version"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process; returns its exit status, see `runner.base.errors`."""
    words = list(sys.argv[1:] if argv is None else argv)
    # The shell waits for completion at each key, so nothing else may be loaded before
    if not {"-sc", "--shell-completion"}.isdisjoint(words):
        return _complete(words)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return OK
    if words[0] == "--version":
        print(f"runner {__version__}")
        return OK
    # Importing torch leaves no garbage, and looking for it takes a quarter of the start; a job enables it again.
    gc.disable()
    try:
        with interruptible():
            if words[0] not in VERBS:
                allowed = f"{', '.join(VERBS)} (python -m runner --help)"
                # Users often forget the verb, and type the overrides of train
                meant = f"train {words[0]}" if "=" in words[0] else _MEANT.get(words[0]) or nearest(words[0], VERBS)
                raise UserError(f"'{words[0]}' is not a verb", "", allowed, meant)
            return launch_verb(VERBS[words[0]], words[1:])
    except SystemExit as stop:  # of a job that failed
        return exit_status(stop)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    # Limits of the system are not bugs of the program, so they get a sentence instead of a traceback
    except (ImportError, MemoryError, OSError, RuntimeError, UserError) as error:
        if not (text := str(error) if isinstance(error, UserError) else system_limit(error)):
            raise
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        print_error(text)
        return error.exit_code if isinstance(error, UserError) else FAILED
    finally:
        gc.enable()


def _help() -> str:
    *others, last = [verb.name for verb in VERBS.values() if verb.takes_config]
    return "\n".join(
        [
            "runner trains PyTorch models: classification, segmentation, detection, regression and custom training steps.",
            "",
            "  python -m runner VERB [key=value ...] [group=option ...] [Hydra flags]",
            "",
            "verbs",
            *(f"  {verb.name:<10} {verb.help.rstrip('.')}" for verb in VERBS.values()),
            "",
            "examples",
            "  python -m runner train                                    digits, no download needed",
            "  python -m runner train data=fashion_mnist model=small_cnn amp=true seed=1",
            "  python -m runner train --multirun optimizer.lr=0.1,0.01 seed=0,1,2",
            "  python -m runner train ckpt_path=last epochs=60           resume the newest run",
            "  python -m runner eval ckpt_path=outputs/digits/<run>",
            "  python -m runner list model                               the options of a group",
            "",
            f"flags of {', '.join(others)} and {last}: "
            "--multirun --cfg job --info --config-dir DIR --config-name NAME --resolve --help",
            'tab completion: eval "$(runner -sc install=bash)"',
            "exit status: 0 success, 1 failed, 2 user error, 3 diverged, 4 worse than a baseline, 75 preempted",
        ]
    )


def _complete(words: list[str]) -> int:
    """Tab completion: this completes verbs, and Hydra, which does not know of verbs, the rest."""
    verb = VERBS["train"]
    if any(word.startswith("query=") for word in words):
        line = os.environ.get("COMP_LINE", "")
        match = re.match(r"(\s*\S+(?:\s+-m\s+runner)?\s+)(\S*)(\s*)(.*)", line)
        if match is None or not match[3]:
            prefix = match[2] if match else ""
            between = "\n" if "query=fish" in words else " "  # as Hydra answers each shell
            print(between.join(name for name in VERBS if name.startswith(prefix)))
            return OK
        if match[2] != "show" and (match[2] not in VERBS or not VERBS[match[2]].takes_config):
            return OK
        # The words of `show` are not overrides: earlier ones select nothing
        verb, rest = VERBS[match[2]], match[4].rpartition(" ")[2] if match[2] == "show" else match[4]
        first, space, others = rest.partition(" ")
        os.environ["COMP_LINE"] = f"runner {others if space and first in verb.aliases else rest}"
    elif words[0] in VERBS:
        verb, words = VERBS[words[0]], words[1:]
    from runner.config.app import complete

    complete(verb.name, words)
    return OK
