"""A cache of what Hydra composes from the shipped YAML: composing takes most of the time of a short run.

Only the groups of a command decide which files are merged, so commands that select the same options share the merged
config. The other overrides are applied to a copy by Hydra, as without the cache. Folders of users are never cached.
Each override is parsed once, where a run parses it five times.
Copies are made by pickle, which takes half of the time of a deep copy.
"""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, _utils, base, grammar_parser

from runner.config.sources import shipped


def install(patch: pytest.MonkeyPatch) -> None:
    """Let Hydra take merged configs from the cache until the patch is undone."""
    known_lists: dict[Any, DefaultsList] = {}
    known_configs: dict[int, bytes] = {}
    compose = ConfigLoaderImpl._compose_config_from_defaults_list

    def only_shipped(repo: IConfigRepository) -> bool:
        return {source.path for source in repo.get_sources() if source.scheme() == "file"} == {str(shipped())}

    def cached_list(repo: IConfigRepository, overrides_list: list[Override], **others: Any) -> DefaultsList:
        if not only_shipped(repo):
            return create_defaults_list(repo, overrides_list=overrides_list, **others)
        single = [override for override in overrides_list if not override.is_sweep_override()]
        selected = [one for one in single if repo.group_exists(one.key_or_group) and not isinstance(one.value(), dict)]
        key = (*(override.input_line for override in selected), *sorted(others.items()))
        if key not in known_lists:
            known_lists[key] = create_defaults_list(repo, overrides_list=selected, **others)
        found = copy.copy(known_lists[key])
        found.config_overrides = [override for override in single if override not in selected]
        return found

    def cached_config(self: ConfigLoaderImpl, defaults: list[Any], repo: IConfigRepository) -> DictConfig:
        if not any(known.defaults is defaults for known in known_lists.values()):
            return compose(self, defaults, repo)
        if id(defaults) not in known_configs:  # kept alive by known_lists
            with patch.context() as inner:
                inner.setattr(ConfigLoaderImpl, "_load_single_config", cached_single)
                known_configs[id(defaults)] = pickle.dumps(compose(self, defaults, repo), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(known_configs[id(defaults)])

    load_anew = CachingConfigRepository.load_config
    known_results: dict[str, ConfigResult | None] = {}

    def cached_result(self: CachingConfigRepository, config_path: str) -> ConfigResult | None:
        if not only_shipped(self):
            return load_anew(self, config_path)
        if config_path not in known_results:  # which nobody changes
            known_results[config_path] = load_anew(self, config_path)
        return known_results[config_path]

    load_single = ConfigLoaderImpl._load_single_config
    known_singles: dict[str, bytes] = {}

    def cached_single(self: ConfigLoaderImpl, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        key = repr(default)
        if key not in known_singles:
            known_singles[key] = pickle.dumps(load_single(self, default, repo), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(known_singles[key])

    interpolations = defaults_list._create_interpolation_map

    def needed_interpolations(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
        needed = any(not default.is_self() and default.is_interpolation() for default in defaults)
        return interpolations(overrides, defaults, self_added) if needed else DictConfig({})

    Plugins.instance()  # executes the modules of all plugins again, which replaces their classes
    file_source: Any = SourcesRegistry.instance().resolve("file")
    known_files: dict[str, bytes] = {}
    load = file_source.load_config

    def cached_file(self: ConfigSource, config_path: str) -> ConfigResult:
        if self.path != str(shipped()):
            return load(self, config_path)
        if config_path not in known_files:
            known_files[config_path] = pickle.dumps(load(self, config_path), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(known_files[config_path])

    copy_slowly = DictConfig.__deepcopy__

    def quick_copy(self: DictConfig, memo: dict[int, Any]) -> DictConfig:
        if memo:
            return copy_slowly(self, memo)
        parent = self.__dict__["_parent"]  # kept, but not copied
        try:
            self.__dict__["_parent"] = None
            text = pickle.dumps(self, pickle.HIGHEST_PROTOCOL)
        finally:
            self.__dict__["_parent"] = parent
        copied: DictConfig = pickle.loads(text)
        copied.__dict__["_parent"] = parent
        return copied

    parse_rule = OverridesParser.parse_rule
    known_rules: dict[tuple[str, str], bytes] = {}

    def cached_rule(self: OverridesParser, s: str, rule_name: str) -> Any:
        if (s, rule_name) not in known_rules:
            known_rules[s, rule_name] = pickle.dumps(parse_rule(self, s, rule_name), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(known_rules[s, rule_name])

    patch.setattr(CachingConfigRepository, "load_config", cached_result)
    patch.setattr(defaults_list, "_create_interpolation_map", needed_interpolations)
    patch.setattr(OverridesParser, "parse_rule", cached_rule)
    patch.setattr(overrides_parser, "create_functions", functools.cache(overrides_parser.create_functions))
    patch.setattr(DictConfig, "__deepcopy__", quick_copy)
    parse = functools.cache(grammar_parser.parse)  # of interpolations; nothing changes a tree
    patch.setattr(base, "parse", parse)
    patch.setattr(_utils, "parse", parse)
    patch.setattr(file_source, "load_config", cached_file)
    patch.setattr(config_loader_impl, "create_defaults_list", functools.wraps(create_defaults_list)(cached_list))
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", cached_config)
