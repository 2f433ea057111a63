"""`new`: a model, data set, task, callback or whole project that trains at once. Imports nothing heavy."""

from __future__ import annotations

import functools
import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from runner.base.errors import UserError, nearest
from runner.base.files import make_folder, write_atomically
from runner.config.sources import Sources, shipped
from runner.tracking.formats import amount
from runner.verbs._table import split_words
from runner.verbs.options import with_modeline

# The config group of the option of each kind.
_KINDS = {"model": "model", "data": "data", "task": "", "callback": "callbacks", "project": "experiment"}
_NOT_TEXT = ("on", "off", "yes", "no", "true", "false", "null", "y", "n")  # YAML reads these as other types


def main(argv: Sequence[str]) -> int:
    """Write the files and print the commands to try them with.

      python -m runner new model MyNet            a network, its option model=my_net, and a test
      python -m runner new data MyImages          a data set
      python -m runner new task MyTask            data, model and training step in one file
      python -m runner new callback MyCallback    something that happens during training
      python -m runner new project my_project     a folder with a package, a network, data, an experiment and tests

    --package NAME    package for the code; default: the one in this folder, or my_package
    --config-dir DIR  folder for the option; default: conf if it exists, or my_conf

    An existing file is never overwritten.
    """
    words, given = split_words("new", argv, {"--package": "NAME", "--config-dir": "DIR"})
    if len(words) != 2:
        allowed = ", ".join(f"{kind} NAME" for kind in _KINDS)
        raise UserError("new", f"takes a kind and a name, got {amount(len(words), 'word')}", allowed)
    kind, name = words
    if kind not in _KINDS:
        raise UserError("new", f"cannot create a '{kind}'", ", ".join(_KINDS), nearest(kind, _KINDS))
    write = {"project": _project, "task": _task}.get(kind, functools.partial(_part, kind))
    written, commands = write(name, dict(given))
    # All files, or none if one of them exists
    if there := [path for path in ([name] if kind == "project" else written) if Path(path).exists()]:
        problem = f"{', '.join(there)} already exist{'s' if len(there) == 1 else ''}, and nothing is overwritten"
        raise UserError("new", problem, "another name, or another folder")
    for path, text in written.items():
        make_folder(Path(path).parent)
        if Path(path).suffix == ".yaml":
            text = with_modeline(Path(path).parent.name, text)
        write_atomically(Path(path), text.encode())
    commands[-1:-1] = [] if importlib.util.find_spec("pytest") else ["pip install pytest"]
    print("\n".join(["written:", *(f"  {path}" for path in written), "", "try:", *(f"  {each}" for each in commands)]))
    return 0


def _part(kind: str, name: str, flags: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The files of a component by path, and the commands to try them with."""
    # The only package in this folder, or `my_package`
    there = {path.parent.name for path in Path().glob("*/__init__.py")} - {"tests", "conf"}
    package = _checked_package(flags.get("--package") or (there.pop() if len(there) == 1 else "my_package"))
    own_conf = Path("conf").is_dir() and Path("conf").resolve() != shipped().resolve()
    given = flags.get("--config-dir") or ("conf" if own_conf else "my_conf")
    path = Path(given)
    if path.is_absolute() or ".." in path.parts or not re.fullmatch(r"[\w./-]+", given) or path == Path():
        raise UserError("new", f"--config-dir cannot be '{given}'", "a folder below this one")
    conf, option = path.as_posix(), _snake(name)
    written = _component(kind, name, package, conf)
    if not Path(package, "__init__.py").exists():
        written = {f"{package}/__init__.py": _from_template("init.py", {}), **written}
    train = f"python -m runner train --config-dir {conf} {_KINDS[kind]}={option}"
    return written, [train, f"python -m pytest tests/test_{option}.py"]


def _component(kind: str, name: str, package: str, conf: str) -> dict[str, str]:
    """The module, the option and the test of one component."""
    option, group = _checked_name(name), _KINDS[kind]
    _check_option(group, option)
    if option == package:
        raise UserError("new", f"'{name}' has the name of the package", "another name")
    words = {"Class": _camel(name), "option": option, "module": option, "package": package, "conf": conf}
    return {
        f"{package}/{option}.py": _from_template(f"{kind}.py", words),
        f"{conf}/{group}/{option}.yaml": _from_template(f"{kind}.yaml", words),
        f"tests/test_{option}.py": _from_template(f"{kind}_test.py", words),
    }


def _task(name: str, flags: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The file of a task, and the commands to try it with."""
    if flags:
        raise UserError("new", "a task is one file, without a package and options", "no flags")
    module = _checked_package(_checked_name(name))
    text = _from_template("task.py", {"Class": _camel(name), "module": module})
    predict = f"python -m runner predict task={module}.py ckpt_path=last input=test"
    return {f"{module}.py": text}, [f"python -m runner train task={module}.py", predict]


def _checked_name(name: str) -> str:
    """The name of the module of a class; refuses what cannot be the name of a class."""
    option = _snake(name)
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) and not name.endswith("_") and "__" not in name
    if not plain or keyword.iskeyword(option) or keyword.iskeyword(_camel(name)) or option in _NOT_TEXT:
        raise UserError("new", f"'{name}' cannot be the name of a class", "letters, digits and _, such as MyNet")
    return option


def _project(name: str, flags: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The files of a project by path, and the commands to try them with."""
    if flags:
        raise UserError("new", "a project has its own package and folder of options", "no flags")
    option, conf, model, data = _checked_package(name).lower(), "conf", "net", "squares"
    _check_option("experiment", option)
    words = {"package": name, "conf": conf, "option": option, "model": model, "data": data}
    inside = {
        "README.md": _from_template("README.md", words),
        "pyproject.toml": _from_template("pyproject.toml", words),
        ".github/workflows/runner.yml": _from_template("workflow.yml", words),
        f"{name}/__init__.py": _from_template("init.py", words),
        **_component("model", model, name, conf),
        **_component("data", data, name, conf),
        f"{conf}/experiment/{option}.yaml": _from_template("experiment.yaml", words),
        "tests/test_project.py": _from_template("project_test.py", words),
    }
    commands = [f"cd {name}", f"python -m runner train --config-dir {conf} experiment={option}", "python -m pytest"]
    return {f"{name}/{path}": text for path, text in inside.items()}, commands


def _from_template(template: str, words: dict[str, str]) -> str:
    text = files("runner.verbs.new").joinpath("templates", f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _snake(name: str) -> str:
    """`MyNet`, `myNet` and `my_net` as `my_net`; `ResNet18` as `res_net18`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _camel(name: str) -> str:
    """`my_net` as `MyNet`; a name with a capital letter is not changed."""
    return name if any(letter.isupper() for letter in name) else "".join(part.capitalize() for part in name.split("_"))


def _check_option(group: str, option: str) -> None:
    """Refuse the name of a shipped option, which would come first."""
    found = Sources().option(group, option)
    if found is not None:
        raise UserError("new", f"{group}={option} already exists, in {found.path}", "another name")


def _checked_package(package: str) -> str:
    fine = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", package) and not keyword.iskeyword(package)
    if not fine or package.lower() in _NOT_TEXT:
        allowed = "letters, digits and _, such as my_package"
        raise UserError("new", f"'{package}' cannot be the name of a package", allowed)
    # An import of that name must find nothing outside this folder
    spec = importlib.util.find_spec(package)
    places = [*(spec.submodule_search_locations or []), spec.origin] if spec is not None else []
    here = any(Path(place).resolve().is_relative_to(Path.cwd()) for place in places if place is not None)
    if package in ("tests", "conf") or package in sys.stdlib_module_names or (spec is not None and not here):
        raise UserError("new", f"it would hide another package '{package}'", "another name")
    return package
