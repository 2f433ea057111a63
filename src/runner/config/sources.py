"""The sources of configuration: the shipped `conf/` tree and the user's own folders, read as plain text.

Nothing here imports Hydra or torch, so that `list`, `show` and completion answer at once.
"""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass, field
from pathlib import Path

from runner.base.errors import UserError
from runner.base.reading import read_regular

_LARGEST = 2**20  # bytes; the longest of ours has ten thousand


def shipped() -> Path:
    """The `conf/` folder that comes with the program: inside an installed wheel, or beside `src/` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parents[1] / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise UserError(f"the config tree is missing: neither {package / 'conf'} nor {package.parents[1] / 'conf'} has it")


def text_of(path: Path) -> str:
    """The text of a config file.

    Raises:
        UserError: if it cannot be read, or is not a small regular file of UTF-8 text.
    """
    try:
        return read_regular(path, _LARGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the config file {path}: {reason}") from error


@dataclass(frozen=True)
class Option:
    """One option of a config group: a YAML file."""

    group: str
    name: str
    path: Path

    @property
    def comments(self) -> list[str]:
        """The comment lines at the top of the file, without their marks."""
        lines = itertools.takewhile(lambda line: line.startswith("#"), text_of(self.path).splitlines())
        return [line.lstrip("# ").rstrip() for line in lines if not line.startswith(("# @", "# yaml-language-server"))]

    @property
    def description(self) -> str:
        """The first comment line of the file; a file that cannot be read hides no other option."""
        try:
            return next(iter(self.comments), "")
        except UserError:
            return "(cannot be read)"

    @property
    def is_global(self) -> bool:
        """Tell whether the file sets keys at the top level instead of under its group."""
        return "@package _global_" in text_of(self.path)


@dataclass
class Sources:
    """The folders that configuration is searched in, first match first: the shipped one, and those of the user, `extra`."""

    extra: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.extra = [path.absolute() for path in self.extra]
        for path in self.extra:
            if not any(path.rglob("*.yaml")):
                what = "has no .yaml file" if path.is_dir() else "is not a folder"
                raise UserError("--config-dir", f"{path} {what}", "a folder with files such as experiment/mine.yaml")
        self.folders = [shipped(), *self.extra]
        self._groups = list[str]()
        self.found = dict[str, tuple[str, ...]]()  # what paths of `data=PATH` are, for all jobs of a command

    def hidden(self) -> list[Path]:
        """Files of the user's folders that are never read, because a shipped file of the same name comes first."""
        found = ((folder, path) for folder in self.extra for path in sorted(folder.rglob("*.yaml")))
        return [path for folder, path in found if (self.folders[0] / path.relative_to(folder)).is_file()]

    def groups(self) -> list[str]:
        """Names of all config groups, sorted; nested ones as `a/b`."""
        if not self._groups:
            found = {path.parent.relative_to(folder) for folder in self.folders for path in folder.rglob("*.yaml")}
            own = [group for group in found if group.parts and group.parts[0] not in ("local", "hydra")]
            self._groups = sorted(group.as_posix() for group in own if not group.parts[0].startswith((".", "_")))
        return self._groups

    def options(self, group: str) -> list[Option]:
        """Options of `group` in order of name; those whose names start with `_` are parts of others and not listed."""
        names = {path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")}
        options = (self.option(group, name) for name in sorted(names) if not name.startswith("_"))
        return [option for option in options if option is not None]

    def option(self, group: str, name: str) -> Option | None:
        """The option `name` of `group`, parts included, or None."""
        for folder in self.folders:
            path = folder / group / f"{name.removesuffix('.yaml')}.yaml"
            if path.is_file() and path.stat().st_size <= _LARGEST:
                return Option(group, path.stem, path)
        return None

    def primary(self, name: str) -> Path | None:
        """The file of the primary config `name` (such as `train`), or None."""
        return option.path if (option := self.option("", name)) else None


def searchpath_folder(entry: str) -> Path | None:
    """The folder behind one entry of `hydra.searchpath`, or None where it is not a folder on disk."""
    if entry.startswith("pkg://"):
        module, _, rest = entry.removeprefix("pkg://").replace("/", ".").partition(".")
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(spec.submodule_search_locations[0], *filter(None, rest.split(".")))
    else:
        path = Path(entry.removeprefix("file://"))
    return path if path.is_dir() else None
