"""Names that other programs have for keys and options of this one, for messages only: none of them is a key here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()[1:]
MEANINGS = {name: meaning for meaning, _, names in (line.partition(": ") for line in _TABLE) for name in names.split()}
"""What a name of other programs means here, by the name: a key, `key=value`, or several words."""

_CLASSES = {"optimizer": ("torch.optim", "torch/optim/*.py"), "loss": ("torch.nn", "torch/nn/modules/*.py")}


def plain(word: str) -> str:
    """A name in the spelling of the table: `--Learning-Rate` as `learning_rate`."""
    return word.lstrip("-+~").replace("-", "_").lower()


def key_meant(key: str) -> str:
    """What a dotted key means that other programs have, whole or by its last part; an empty string if nothing is known."""
    word = plain(key)
    return MEANINGS.get(word) or MEANINGS.get(word.rpartition(".")[2], "")


def value_meant(key: str, value: object) -> str:
    """The value of a key or option of a group that is meant by one of other programs, maybe with keys after it; or nothing."""
    meaning = MEANINGS.get(f"{key}={plain(str(value))}", "").removeprefix(f"{key}=")
    if not meaning and key == "resume":
        return f"ckpt_path={value}"
    if not meaning and key == "model" and _defines("torchvision/models/*.py", plain(str(value))):
        return f"torchvision model.name={plain(str(value))}"
    return meaning


def target_meant(group: str, name: str) -> str:
    """The words that select a class of torch or of another package, where an option is expected; empty if it is not such a name."""
    if group == "scheduler":
        name = name.removeprefix("torch.optim.lr_scheduler.")
        if _defines("torch/optim/lr_scheduler.py", name):
            return f"scheduler=torch scheduler.name={name}"
    if "." in name and all(part.isidentifier() for part in name.split(".")) and not name.endswith((".yaml", ".yml")):
        words = f"{group}._target_={name}"
        return f"'~{group}' '+{words}'" if group in ("callbacks", "logger") else words
    module, files = _CLASSES.get(group, ("", ""))
    return f"{group}._target_={module}.{name}" if files and name[:1].isupper() and _defines(files, name) else ""


def _defines(files: str, name: str) -> bool:
    """Tell whether files of an installed package define a class or function; importing torch to see takes seconds."""
    package, _, pattern = files.partition("/")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    definition = re.compile(rf"^(?:class|def) (?!_){re.escape(name)}\b", re.MULTILINE)
    return any(definition.search(path.read_text()) for each in folders or () for path in Path(each).glob(pattern))
