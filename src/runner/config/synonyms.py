"""Names that other programs have for keys and options of this one, for messages only: none of them is a key here."""

from __future__ import annotations

from pathlib import Path

_TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()[1:]
MEANINGS = {name: meaning for meaning, _, names in (line.partition(": ") for line in _TABLE) for name in names.split()}
"""The meaning here of each name of other programs: a key, `key=value`, or several words."""


def plain(word: str) -> str:
    """A name in the spelling of the table: `--Learning-Rate` as `learning_rate`."""
    return word.lstrip("-+~").replace("-", "_").lower()


def key_meant(key: str) -> str:
    """The meaning of a dotted key that other programs have, whole or by its last part; an empty string if nothing is known."""
    word = plain(key)
    return MEANINGS.get(word) or MEANINGS.get(word.rpartition(".")[2], "")


def value_meant(key: str, value: object) -> str:
    """The value of a key or option of a group that is meant by one of other programs, maybe with keys after it; or nothing."""
    meaning = MEANINGS.get(f"{key}={plain(str(value))}", "").removeprefix(f"{key}=")
    return f"ckpt_path={value}" if not meaning and key == "resume" else meaning


def by_class(group: str, name: str) -> str:
    """The words that choose a class where an option of a group is expected: one of a library by its name, or any by its path."""
    if "." in name and all(part.isidentifier() for part in name.split(".")) and not name.endswith((".yaml", ".yml")):
        words = f"{group}._target_={name}"
        return f"'~{group}' '+{words}'" if group in ("callbacks", "logger") else words
    if name[:1].islower() and group != "model":
        return ""
    ways = {
        "model": f"model=torchvision model.name={plain(name)}",
        "scheduler": f"scheduler=torch scheduler.name={name}",
        "optimizer": f"optimizer._target_=torch.optim.{name}",
        "loss": f"loss._target_=torch.nn.{name}",
    }
    return ways.get(group, "")
