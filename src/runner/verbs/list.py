"""List what can be selected: config groups, their options, one line each."""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.errors import UserError, nearest
from runner.verbs._folders import sources_and_words


def main(argv: Sequence[str]) -> int:
    """Print all groups with their options, or those of the groups named."""
    sources, words = sources_and_words("list", argv)
    groups = sources.groups()
    for word in words:
        if word not in groups:
            close = nearest(word, groups)
            raise UserError(
                f"list: there is no group '{word}'"
                + (f"; did you mean '{close}'?" if close else "")
                + f"\n    allowed: {', '.join(groups)}"
            )
    for group in words or groups:
        print(group)
        options = sources.options(group)
        width = max((len(option.name) for option in options), default=0)
        for option in options:
            print(f"  {option.name:<{width}}  {option.description}".rstrip())
    return 0
