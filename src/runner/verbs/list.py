"""`list`: config groups and their options."""

from __future__ import annotations

from collections.abc import Sequence

from runner.base.errors import UserError, nearest
from runner.verbs._folders import sources_and_words


def main(argv: Sequence[str]) -> int:
    """Print all groups with their options, or only the groups named."""
    sources, words = sources_and_words("list", argv)
    groups = sources.groups()
    for word in words:
        if word not in groups:
            raise UserError("list", f"there is no group '{word}'", ", ".join(groups), nearest(word, groups))
    for group in words or groups:
        print(group)
        options = sources.options(group)
        width = max((len(option.name) for option in options), default=0)
        for option in options:
            print(f"  {option.name:<{width}}  {option.description}".rstrip())
    return 0
