"""`task=FILE.py:CLASS`: the words that train a class of one Python file, with the file's `data` and `model` if it has them.

The file is parsed and not imported, so that mistakes in other words are still found without torch.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.base.errors import UserError, nearest
from runner.config.keys import key_of, says, within

_WORD = re.compile(r"task=([^=,'\"\[\]{}]+\.py)(?::(\w*))?")
_STEPS = {"training_step", "optimizer_steps"}


def with_task_file(words: Sequence[str]) -> list[str]:
    """The words of a command with `task=FILE.py:CLASS` written out; words that select other data or another model stay.

    Raises:
        UserError: if there is no such file or class, or Python could not import the file by its path.
    """
    found = list[str]()
    for word in words:
        match = _WORD.fullmatch(word)
        found += _written_out(Path(match[1]), match[2], words) if match else [word]
    return found


def _written_out(file: Path, name: str | None, words: Sequence[str]) -> list[str]:
    module = ".".join(file.with_suffix("").parts)
    if not all(part.isidentifier() for part in module.split(".")):
        allowed = "a path below the current folder, of names that Python can import, such as my_folder/my_task.py"
        raise UserError("task", f"{file} cannot be imported by its path", allowed)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError("task", f"cannot read {file}: {error}") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not name:  # of several, the class is meant that no other one builds on
        bases = {base for each, node in classes.items() for base in _bases(node) if base != each}
        steps = [each for each in classes if _STEPS & _methods(classes, each) and each not in bases]
        if len(steps) != 1:
            allowed = (
                ", ".join(f"task={file}:{each}" for each in steps) or "a class with training_step(self, modules, batch)"
            )
            raise UserError("task", f"{file} has {len(steps)} classes with a step", allowed)
        [name] = steps
    if name not in classes:
        allowed = ", ".join(f"task={file}:{each}" for each in classes)
        raise UserError("task", f"{file} has no class '{name}'", allowed, nearest(name, classes))
    top = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    # Other names of functions and classes: `data = Views`, and `from my_data import data`
    top |= {each.asname or each.name for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names}
    assigned = dict(pair for node in tree.body for pair in _assigned(node))
    top |= assigned.keys()
    # Who names the file runs it; a checkpoint has everything else
    written = {"task._target_": f"{module}.{name}", "name": file.stem, "trust": f"[{module.split('.')[0]}]"}
    given, defaults = {key_of(word) for word in words}, list[str]()
    if all(word in ("ckpt_path=", "ckpt_path=null") for word in words if key_of(word) == "ckpt_path"):
        if "defaults" in assigned:
            defaults = [word for word in _words(assigned["defaults"], file) if not within(key_of(word), given)]
            given |= {key_of(word) for word in defaults}
        written, own = {"task": "null", **written}, _methods(classes, name)
        if own & _STEPS and not says("loss", given):
            written["loss"] = "none"
        for each in {"data", "model"} & top - given:
            if each in assigned and not isinstance(assigned[each], ast.Name | ast.Attribute):
                raise UserError("task", f"'{each}' of {file} is a value", f"a function or a class: def {each}(): ...")
        if "model" in top - given:
            written |= {"model": "null", "model._target_": f"{module}.model"}
        if "data" in top - given:
            written |= {"data": "own", "data.dataset._target_": f"{module}.data", "transform": "none"}
            written |= {"data.images": "[]"} if own & _STEPS else {}
    return [*(f"{key}={value}" for key, value in written.items() if key == "task" or key not in given), *defaults]


def _words(value: ast.expr, file: Path) -> list[str]:
    """The words of `defaults = [...]`, which those of the command replace."""
    with contextlib.suppress(ValueError, TypeError):
        if isinstance(words := ast.literal_eval(value), list | tuple) and all(isinstance(word, str) for word in words):
            return [*words]
    raise UserError(
        "task", f"'defaults' of {file} is not a list of words", 'such as ["optimizer.lr=0.001", "epochs=20"]'
    )


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement assigns, with their values: also `data, model = Views, Net`, and with annotations."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for place in node.targets if isinstance(node, ast.Assign) else [node.target]:
        several = isinstance(place, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(place.elts, node.value.elts, strict=False) if several else [(place, node.value)]  # type: ignore[attr-defined]
        yield from ((ast.unparse(name), value) for name, value in pairs)


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _methods(classes: dict[str, ast.ClassDef], name: str) -> set[str]:
    """Names of the methods of a class and of those in the same file that it builds on."""
    if name not in classes:
        return set()
    node = classes[name]
    own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    others = {each: classes[each] for each in classes if each != name}  # a class may have the name of its imported base
    return own.union(*(_methods(others, base) for base in _bases(node)))
