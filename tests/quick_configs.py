"""Hydra composes in a fraction of its time, to the same configs: the suite composes thousands, of the same files."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import version
from hydra._internal import defaults_list
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import InputDefault
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import AnyNode, BooleanNode, DictConfig, FloatNode, IntegerNode, ListConfig, StringNode, grammar_parser
from omegaconf.base import Box, Metadata, Node


def install(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone.

    A loader copies the places of its files each time, as another composition might add to them, which none does here.
    A table for choices that name other choices (`${...}` in a list of defaults) is made at every file. The rest is
    files that are read and parsed at every composition, interpolations too, and nodes that are copied and told of
    their parents, one by one, again and again.
    """
    patch.setattr(CachingConfigRepository, "__init__", _uncopied)
    patch.setattr(defaults_list, "_create_interpolation_map", _where_one_is_named)
    patch.setattr("omegaconf.omegaconf.yaml", SimpleNamespace(**{**vars(yaml), "load": _parsed_once}))
    patch.setattr(version, "_get_version", functools.cache(version._get_version))
    _read_once(patch)
    patch.setattr("omegaconf.base.parse", functools.cache(grammar_parser.parse))
    patch.setattr(InputDefault, "__deepcopy__", _copied_default, raising=False)
    patch.setattr(Box, "_re_parent", _next_of_kin)
    patch.setattr(Metadata, "__deepcopy__", _copied_facts, raising=False)
    for kind in (AnyNode, BooleanNode, FloatNode, IntegerNode, StringNode):
        patch.setattr(kind, "__deepcopy__", _copied_value)
    for kind in (DictConfig, ListConfig):
        patch.setattr(kind, "__deepcopy__", _copied_container)


def _uncopied(self: CachingConfigRepository, delegate: Any) -> None:
    self.delegate, self.cache = delegate, {}


_table = defaults_list._create_interpolation_map


def _where_one_is_named(overrides: Any, defaults: Any, self_added: bool) -> Any:
    named = any(not each.is_self() and each.is_interpolation() for each in defaults)
    return _table(overrides, defaults, self_added) if named else None


_parsed: dict[str, Any] = {}


def _parsed_once(stream: Any, Loader: Any) -> Any:
    text = stream if isinstance(stream, str) else stream.read()
    if text not in _parsed:
        _parsed[text] = yaml.load(text, Loader=Loader)
    return copy.deepcopy(_parsed[text])


def _read_once(patch: pytest.MonkeyPatch) -> None:
    """The files of packages, which no test changes, and their lists of defaults."""
    Plugins.instance()
    source = SourcesRegistry.instance().resolve("pkg")  # Hydra loads its plugins anew: not the class that is imported
    is_config, is_group = source.is_config, source.is_group
    configs = functools.cache(lambda path, provider, name: is_config(source(provider, f"pkg://{path}"), name))
    groups = functools.cache(lambda path, provider, name: is_group(source(provider, f"pkg://{path}"), name))

    load, results = ConfigRepository.load_config, dict[tuple[str, str, str], ConfigResult]()

    def own(self: ConfigRepository, config_path: str) -> ConfigResult | None:
        found = self._find_object_source(config_path, ObjectType.CONFIG)
        if type(found) is not source:
            return load(self, config_path)
        key = found.path, found.provider, config_path
        if key not in results:
            results[key] = load(self, config_path)
        result = copy.copy(results[key])  # its list of defaults is copied by whoever changes it
        result.config = copy.deepcopy(result.config)
        result.header = dict(result.header)
        return result

    patch.setattr(ConfigRepository, "load_config", own)
    patch.setattr(source, "is_config", lambda self, config_path: configs(self.path, self.provider, config_path))
    patch.setattr(source, "is_group", lambda self, config_path: groups(self.path, self.provider, config_path))


def _next_of_kin(self: Box) -> None:
    """After a merge: what lies deeper was told by its own merge, or has stood in its parent all along."""
    content = self.__dict__["_content"]
    if isinstance(content, Node):
        content._set_parent(self)
    elif isinstance(content, dict | list):
        for each in content.values() if isinstance(content, dict) else content:
            if each is not None:
                each._set_parent(self)


def _copied_facts(self: Metadata, memo: dict[int, Any]) -> Metadata:
    twin = object.__new__(type(self))
    twin.__dict__.update(self.__dict__)
    twin.flags = dict(self.flags) if self.flags is not None else None
    cache = self.resolver_cache
    twin.resolver_cache = copy.deepcopy(cache, memo) if cache else defaultdict(dict)
    return twin


def _copied_default(self: InputDefault, memo: dict[int, Any]) -> InputDefault:
    """Its fields are texts, switches, and of options a list of texts."""
    twin = object.__new__(type(self))
    twin.__dict__.update({name: list(each) if isinstance(each, list) else each for name, each in vars(self).items()})
    return twin


def _copied_value(self: Any, memo: dict[int, Any]) -> Any:
    twin = object.__new__(type(self))
    twin.__dict__["_flags_cache"] = None
    self._deepcopy_impl(twin, memo)
    return twin


def _copied_container(self: Any, memo: dict[int, Any]) -> Any:
    """Parents are kept, and not copied."""
    twin = object.__new__(type(self))
    inside, content = twin.__dict__, self.__dict__["_content"]
    inside["_metadata"] = copy.deepcopy(self.__dict__["_metadata"], memo)
    inside["_flags_cache"] = copy.copy(self.__dict__["_flags_cache"])
    inside["_parent"] = self.__dict__["_parent"]
    if isinstance(content, dict):
        content = {key: _child(value, twin, memo) for key, value in content.items()}
    elif isinstance(content, list):
        content = [_child(value, twin, memo) for value in content]
    inside["_content"] = content
    return twin


def _child(node: Any, parent: Any, memo: dict[int, Any]) -> Any:
    kept, node.__dict__["_parent"] = node.__dict__["_parent"], None
    try:
        twin = copy.deepcopy(node, memo)
    finally:
        node.__dict__["_parent"] = kept
    twin.__dict__["_parent"] = parent
    return twin
