"""The flags among the words after a verb: those of Hydra."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence

from runner.base.errors import UserError
from runner.config.overrides import flag_meant


def parse(argv: Sequence[str], known: Sequence[str] = ()) -> argparse.Namespace:
    """Hydra's flags and the overrides among the words after a verb; `known` lists the keys, for a flag that means one.

    Raises:
        UserError: for a flag that Hydra does not have, or one that is refused.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            flags = parser.parse_intermixed_args(list(argv))
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        options = [option for action in parser._actions for option in action.option_strings]
        raise _wrong_flag(complaint.getvalue(), argv, options, known) from None
    # Flags of Hydra that would bypass the checks of this program
    refused = {
        "--experimental-rerun": "it reads a pickle, which could run anything; use ckpt_path= instead",
        "--config-path": "it would replace the configs of the program; add yours with --config-dir",
        "--package": "it would move all keys; select an option with group=option, such as model=mlp",
    }
    for name, fix in refused.items():
        if getattr(flags, name.lstrip("-").replace("-", "_")):
            raise UserError(f"{name} is refused: {fix}")
    return flags


def _wrong_flag(complaint: str, argv: Sequence[str], options: Sequence[str], known: Sequence[str]) -> UserError:
    """The mistake behind a complaint of argparse's."""
    wrong = [at for at, word in enumerate(argv) if word.startswith("-") and word.split("=")[0] not in options]
    if not wrong:
        reason = complaint.strip().splitlines()[-1].partition("error: ")[2]
        return UserError(reason, "", "python -m runner VERB --help lists the flags")
    flag, _, value = argv[wrong[0]].partition("=")
    follows = "".join(argv[wrong[0] + 1 : wrong[0] + 2])
    value = value or ("" if "=" in follows or follows.startswith("-") else follows)
    allowed = (
        "--multirun, --config-dir DIR, --config-name NAME, --cfg job, --info, --help; a key has no dashes: key=value"
    )
    return UserError(f"there is no flag {flag}", "", allowed, flag_meant(flag, value, known, options))
