"""Refuse phrases that read as translated: `python scripts/lint_language.py` lists them with the plain words to use.

It reads Python, Markdown, YAML and template files that git knows. A line that has to quote a phrase ends in `lint: quoted`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".tmpl"}
PHRASES = {
    r"on the way through": "during",
    r"(?:are|is) worth no": "is meaningless",
    r"cannot be had": "is not supported",
    r"of several that": "if several ...",
    r"the last one holds": "the last one wins",
    r"\bof (?:one|your|our|my|his|their|the user)(?:'s)? own\b|\b(?:one|somebody else)'s own\b": "custom, user-defined",
    r"of (?:your|our|my) own\b": "custom, user-defined",
    r"has no end": "can be anything",
    r"left out": "skipped, omitted",
    r"leaves? out|leaving out": "skip, omit",
    r"looked into|looks? into": "inspect, examine",
    r"knows? its data again": "stores a fingerprint of its data",
    r"(?:it|this|that) is (?:said|told)\b|\bis told\b|\bare told\b": "is reported",
    r"the user at hand": "the command line",
    r"on the line\b": "on the command line",
    r"\banew\b": "again",
    r"in (?:the )?place of\b": "instead of",
    r"for good\b": "permanently",
    r"by heart\b": "memorise, overfit",
    r"\bgoes on with\b": "continues, resumes",
    r"\bcomes? of it\b": "result",
    r"\bstrangers?\b": "an untrusted file",
    r"\bmend(?:s|ed)?\b": "fix",
    r"\bfrom the line\b": "from the command line",
    r"\bthe line (?:selects|says|names)\b": "the command line",
    r"\btells? of\b": "reports",
    r"\bwords of the line\b": "overrides",
    r"(?<!there.)\bis no (?!(?:l(?:ong|arg)|small|lat|old|new|furth|fast|bett)er|more|worse|less|job|rea|res)[a-z]": "is not a",
    r"(?<!there.)\bare no (?!(?:l(?:ong|arg)|small|lat|old|new|furth|fast|bett)er|more|worse|less)[a-z]": "are not",
    r"\breads? no \w+ again": "does not read ... again",
    r"\blies? there\b": "it contains",
    r"\bto go on:": "to resume:",
    r"\bclause that people read": "is printed",
    r"\bas the \w+ wants?\b": "as required",
    r"\bwhatever \w+ says\b": "regardless of",
    r"\bin a process of (?:its|their)\b": "in a separate process",
    r"\bto the bit\b": "bit for bit, bit-identical",
}
_PATTERNS = [(re.compile(pattern, re.IGNORECASE), plain) for pattern, plain in PHRASES.items()]


def findings(text: str) -> list[tuple[int, str, str]]:
    """Line number, phrase and plain words of every phrase in a text; phrases that a line break divides are found too."""
    found = []
    for pattern, plain in _PATTERNS:
        spread = re.compile(pattern.pattern.replace(" ", r"\s+(?:#\s*)?"), re.IGNORECASE)
        for match in spread.finditer(text):
            line = text.count("\n", 0, match.start())
            if "lint: quoted" not in text.splitlines()[line]:
                found.append((line + 1, " ".join(match[0].split()), plain))
    return sorted(found)


def main(paths: list[str]) -> int:
    """Check the files given, or all that git knows; returns 1 if any phrase was found."""
    if not paths:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [str(ROOT / name) for name in listed.splitlines()]
    count = 0
    for path in map(Path, paths):
        if path.suffix in SUFFIXES and path.is_file() and path.resolve() != Path(__file__).resolve():
            for line, phrase, plain in findings(path.read_text(encoding="utf-8")):
                print(f"{path}:{line}: '{phrase}': {plain}")
                count += 1
    print(f"{count} phrases" if count else "no phrases to replace")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
