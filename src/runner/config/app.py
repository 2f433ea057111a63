"""Hydra as this program uses it: a verb as an application, config files checked before they are read, errors with their key."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import os
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.base.errors import ConfigError, Problem, UserError, nearest
from runner.config.keys import ANY_KEY, closest
from runner.config.sources import Sources, shipped, text_of
from runner.config.yaml_files import compose, refusing, walk

# Hydra 1.4 deprecates the argument; 1.3 warns without it.
_VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
_DETAIL = re.compile(
    r"full_key:|object_type=|reference_type=|Config search path|provider=|In '.*while composing config:$"
)
_PLACE = re.compile(r"In '(.*?)': ?")
_UNKNOWN = re.compile(r"Key '(.*?)' (?:is )?not in (?:struct|'\w+')")
_ABSENT = re.compile(r"Could not delete from config\. '(.*)' does not exist")

REFUSALS = (HydraException, OmegaConfBaseException, ValueError, RecursionError)
"""What Hydra raises for a mistake of the user's; ValueError is for a list of defaults."""
REPLACED = {"joblib": "pool", "submitit_local": "pool", "submitit_slurm": "slurm"}
"""Launchers of plugins of Hydra, and the launcher of this program that replaces each."""


@contextlib.contextmanager
def application(verb: str, sources: Sources) -> Iterator[None]:
    """Inside, Hydra composes configs from the shipped files and those of the user, see `runner.config.load.compose`."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    with (
        hydra.initialize_config_dir(config_dir=str(shipped()), job_name=verb.replace("-", "_"), **_VERSION_BASE),
        files_checked(),
    ):
        # As `--config-dir` does; an override of `hydra.searchpath` would not find a primary config.
        loader: Any = GlobalHydra.instance().config_loader()
        path = loader.get_search_path()
        last = path.get_path().pop()  # has to stay the last
        for folder in sources.extra:
            path.append("command-line", f"file://{folder}")
        path.append(last.provider, last.path)
        loader.repository.initialize_sources(path)
        yield


@contextlib.contextmanager
def files_checked() -> Iterator[None]:
    """Hydra reads no file that is special or large, and mistakes of YAML have the file and a line."""
    Plugins.instance()  # registers the sources of configs
    source: Any = SourcesRegistry.instance().resolve("file")
    load_config = source.load_config

    def check_and_load(self: Any, config_path: str) -> Any:
        path = Path(self.path, self._normalize_file_name(config_path))
        text_of(path)
        if not path.is_relative_to(shipped()):
            _check_defaults(path)
        with refusing(path):
            return load_config(self, config_path)

    source.load_config = check_and_load
    try:
        yield
    finally:
        source.load_config = load_config


def _check_defaults(path: Path) -> None:
    """Raise a `ConfigError` with the place of a list of defaults that is none, as Hydra names no file."""
    for name, _, node in walk(compose(path)):
        items = node.value if isinstance(node, yaml.SequenceNode) else [None]
        fits = all(isinstance(each, yaml.MappingNode) or getattr(each, "tag", "").endswith("str") for each in items)
        if name == "defaults" and not fits:
            place = f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
            allowed = "lines such as '- override /model: mlp'"
            raise ConfigError([Problem(place, "defaults is not a list of options", allowed)])


@contextlib.contextmanager
def merged_once() -> Iterator[None]:
    """Compositions inside that select the same options take their files from a copy of what was merged before.

    Hydra applies the other overrides to that copy, as it does without this. A file that changes meanwhile has no effect.
    """
    lists: dict[Any, Any] = {}
    merged: dict[int, bytes] = {}  # by the identity of a list of defaults, which `lists` keeps
    loader: Any = config_loader_impl
    list_defaults, merge = loader.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list

    # Overrides that only set values do not change which files are merged
    @functools.wraps(list_defaults)
    def list_defaults_once(repo: Any, overrides_list: list[Any], **others: Any) -> Any:
        plain = [override for override in overrides_list if not override.is_sweep_override()]
        selected = [one for one in plain if repo.group_exists(one.key_or_group) and not isinstance(one.value(), dict)]
        folders = tuple((source.provider, source.path) for source in repo.get_sources())
        key = (folders, *(one.input_line for one in selected), *sorted(others.items()))
        if key not in lists:
            lists[key] = list_defaults(repo, overrides_list=selected, **others)
        found = copy.copy(lists[key])
        found.config_overrides = [override for override in plain if override not in selected]
        return found

    def merge_once(self: Any, defaults: list[Any], repo: Any) -> Any:
        # Each composition changes its config, so it gets a copy, which a pickle makes faster than a deep copy
        if id(defaults) not in merged:
            merged[id(defaults)] = pickle.dumps(merge(self, defaults, repo), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(merged[id(defaults)])

    # Hydra has no hook for this, so two of its functions are replaced while the block lasts
    implementation: Any = ConfigLoaderImpl
    loader.create_defaults_list = list_defaults_once
    implementation._compose_config_from_defaults_list = merge_once
    try:
        yield
    finally:
        loader.create_defaults_list = list_defaults
        implementation._compose_config_from_defaults_list = merge


def show(flags: argparse.Namespace, primary: str, overrides: Sequence[str]) -> None:
    """Let Hydra show what its flags ask for, inside `application`.

    Raises:
        ConfigError: if Hydra refuses it.
    """
    app: Any = GlobalHydra.instance().hydra
    try:
        if flags.hydra_help:
            app.hydra_help(primary, get_args_parser(), flags)
        elif sum(map(bool, (flags.cfg, flags.info, flags.multirun, flags.shell_completion))) > 1:
            raise UserError("only one of --multirun, --cfg and --info can be given")
        elif flags.cfg:
            app.show_cfg(primary, list(overrides), flags.cfg, flags.package, flags.resolve)
        elif flags.info:
            app.show_info(flags.info, primary, list(overrides))
        else:
            app.shell_completion(primary, list(overrides))
    except REFUSALS as error:
        raise ConfigError([as_problem(error)]) from error


def complete(verb: str, argv: Sequence[str]) -> None:
    """Let Hydra answer a query of tab completion; what options have in common is not an option.

    The verb `show` takes what `train` takes, but keys without values.
    """
    answer, flags, sources = io.StringIO(), get_args_parser().parse_args(argv), Sources()
    primary = "train" if verb == "show" else verb
    with contextlib.redirect_stdout(answer), application(primary, sources):
        show(flags, primary, flags.overrides)
    text = answer.getvalue()
    if verb == "show":
        text = re.sub(r"([\w./]+)=(?!\S)", lambda found: found[0] if found[1] in sources.groups() else found[1], text)
    if any(word.startswith("query=") for word in argv):
        text = re.sub(r"(?<!\S)\w+=_\w+(\s|$)", "", text)
    sys.stdout.write(text)


def as_problem(error: BaseException, known: Sequence[str] = ()) -> Problem:
    """The problem behind an error of Hydra or OmegaConf; `known` are the keys of the config, for a name that is none of them."""
    group, _, option = str(getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if group.startswith("hydra/"):
        others = getattr(error, "options", None) or []
        close = REPLACED.get(option) or nearest(option, others)
        return Problem(group, f"there is no '{option}'", ", ".join(others), close)
    inner = error
    while inner.__cause__ is not None:  # the innermost says what is wrong, the outer ones in which file
        inner = inner.__cause__
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    text = " ".join(line for line in lines if not _DETAIL.match(line))
    if absent := _ABSENT.search(text):
        return Problem(absent[1], "cannot be deleted, because it does not exist", ANY_KEY, closest(absent[1], known))
    if _UNKNOWN.search(text):
        if named.startswith("hydra."):
            return Problem(named, "is not a key", "a key of Hydra (--cfg hydra prints them all)")
        return Problem(named, "is not a key", ANY_KEY, closest(named, known))
    file = _PLACE.search(f"{error} {inner}")
    return Problem(named or (file[1] if file else "config"), _PLACE.sub("", text).rstrip(".") or type(inner).__name__)
