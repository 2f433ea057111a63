"""The files that `new` writes: checks names, fills in templates, and overwrites nothing. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path
from string import Template

from runner.base.errors import UserError
from runner.base.files import write_atomically, writing
from runner.config.sources import Sources, shipped

# The config group of the option of each kind.
KINDS = {"model": "model", "data": "data", "task": "task", "callback": "callbacks", "project": "experiment"}
_NOT_TEXT = ("on", "off", "yes", "no", "true", "false", "null", "y", "n")  # YAML reads these as other types


def write_files(files: dict[str, str], folder: Path) -> None:
    """Write every file, by path relative to `folder`, or none if one of them exists.

    Raises:
        UserError: if a file exists, or cannot be written.
    """
    _refuse_existing([path for path in files if (folder / path).exists()])
    for path, text in files.items():
        target = folder / path
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text.encode())


def _refuse_existing(paths: list[str]) -> None:
    if paths:
        exist = "exists" if len(paths) == 1 else "exist"
        problem = f"{', '.join(paths)} already {exist}, and nothing is overwritten"
        raise UserError("new", problem, "another name, or another folder")


def scaffold_plan(
    kind: str, name: str, folder: Path, package: str | None, conf: str | None
) -> tuple[dict[str, str], list[str]]:
    """The files to write, by path relative to `folder`, and the commands to try them with.

    `package` is for the code and `conf` for the option; None for those in `folder`, or `my_package` and `my_conf`.

    Raises:
        UserError: if a name cannot be used.
    """
    if kind == "project":
        if package is not None or conf is not None:
            raise UserError("new", "a project has its own package and folder of options", "no flags")
        return _project(name, folder)
    package = _checked_package(package or _package_in(folder), folder)
    conf = _checked_conf(conf or _conf_in(folder))
    written = _component(kind, name, package, conf, folder)
    option, group = _snake(name), KINDS[kind]
    if not (folder / package / "__init__.py").exists():
        written = {f"{package}/__init__.py": _from_template("init.py", {}), **written}
    commands = [
        f"python -m runner train --config-dir {conf} {group}={option}",
        f"python -m pytest tests/test_{option}.py",
    ]
    return written, commands


def _component(kind: str, name: str, package: str, conf: str, folder: Path) -> dict[str, str]:
    """The module, the option and the test of one component."""
    option, group = _snake(name), KINDS[kind]
    _check_name(name, option)
    _check_option(group, option)
    if option == package:
        raise UserError("new", f"'{name}' has the name of the package", "another name")
    words = {"Class": _camel(name), "option": option, "module": option, "package": package, "conf": conf}
    return {
        f"{package}/{option}.py": _from_template(f"{kind}.py", words),
        f"{conf}/{group}/{option}.yaml": _from_template(f"{kind}.yaml", words),
        f"tests/test_{option}.py": _from_template(f"{kind}_test.py", words),
    }


def _project(name: str, folder: Path) -> tuple[dict[str, str], list[str]]:
    _checked_package(name, folder)
    option = name.lower()
    _check_option("experiment", option)
    _refuse_existing([name] if (folder / name).exists() else [])
    conf, model, data = "conf", "net", "squares"
    words = {"package": name, "conf": conf, "option": option, "model": model, "data": data}
    inside = {
        "README.md": _from_template("README.md", words),
        "pyproject.toml": _from_template("pyproject.toml", words),
        ".github/workflows/runner.yml": _from_template("workflow.yml", words),
        f"{name}/__init__.py": _from_template("init.py", words),
        **_component("model", model, name, conf, folder),
        **_component("data", data, name, conf, folder),
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


def _check_name(name: str, option: str) -> None:
    fine = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) and not name.endswith("_") and "__" not in name
    if not fine or keyword.iskeyword(option) or keyword.iskeyword(_camel(name)) or option in _NOT_TEXT:
        raise UserError("new", f"'{name}' cannot be the name of a class", "letters, digits and _, such as MyNet")


def _check_option(group: str, option: str) -> None:
    """Refuse the name of a shipped option, which would come first."""
    found = Sources().option(group, option)
    if found is not None:
        raise UserError("new", f"{group}={option} already exists, in {found.path}", "another name")


def _checked_package(package: str, folder: Path) -> str:
    fine = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", package) and not keyword.iskeyword(package)
    if not fine or package.lower() in _NOT_TEXT:
        allowed = "letters, digits and _, such as my_package"
        raise UserError("new", f"'{package}' cannot be the name of a package", allowed)
    if package in ("tests", "conf") or package in sys.stdlib_module_names or _is_elsewhere(package, folder):
        raise UserError("new", f"it would hide another package '{package}'", "another name")
    return package


def _is_elsewhere(package: str, folder: Path) -> bool:
    """Tell whether an import of that name finds something outside this folder."""
    spec = importlib.util.find_spec(package)
    places = [*(spec.submodule_search_locations or []), spec.origin] if spec is not None else []
    found = [Path(place).resolve() for place in places if place is not None]
    return bool(spec) and not any(place.is_relative_to(folder.resolve()) for place in found)


def _checked_conf(conf: str) -> str:
    path = Path(conf)
    if path.is_absolute() or ".." in path.parts or not re.fullmatch(r"[\w./-]+", conf) or path == Path():
        raise UserError("new", f"--config-dir cannot be '{conf}'", "a folder below this one")
    return path.as_posix()


def _package_in(folder: Path) -> str:
    """The only package in a folder, or `my_package`."""
    there = [path.parent.name for path in folder.glob("*/__init__.py") if path.parent.name not in ("tests", "conf")]
    return there[0] if len(there) == 1 else "my_package"


def _conf_in(folder: Path) -> str:
    conf = folder / "conf"
    return "conf" if conf.is_dir() and conf.resolve() != shipped().resolve() else "my_conf"
