"""Lets Hydra 1.3 take `zero=2` and `lora: off` as choices of a config group; importing this module is enough.

The option of a group is the name of a file, always text. But the override grammar reads `2` as a number and YAML reads
`off` as false, and Hydra refuses both ("Config group override must be a string or a list. Got int"). It makes choices
in two places, the command line (`Overrides`) and defaults lists (`ConfigRepository`): before either sees them, a number
or a truth value is replaced by the option of that group that YAML reads as the same value.
"""

from __future__ import annotations

import functools
import posixpath
from typing import Any

import yaml
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra.core.override_parser.types import Override
from omegaconf import ListConfig, OmegaConf


def option_name(repository: IConfigRepository, group: str, choice: Any) -> Any:
    """The name in `group` of `choice`; what is text already (or null, or an unknown option) comes back as text."""
    if isinstance(choice, list):
        return [option_name(repository, group, item) for item in choice]
    if not isinstance(choice, (bool, int)):
        return choice
    for name in repository.get_group_options(group):
        value = yaml.safe_load(name)
        if type(value) is type(choice) and value == choice:
            return name
    return str(choice).lower()  # Hydra then lists the options there are


def _name_in_override(repository: IConfigRepository, override: Override) -> None:
    if override.is_sweep_override() or not repository.group_exists(override.key_or_group):
        return
    choice = override.value()
    if isinstance(choice, (bool, int, list)):
        override._value = option_name(repository, override.key_or_group, choice)


def _name_in_defaults(repository: IConfigRepository, config_path: str, item: Any) -> Any:
    """`item` of the defaults list of `config_path`: `{"override /zero@package: 2}` becomes `{...: "2"}`."""
    if not isinstance(item, dict) or len(item) != 1:
        return item
    ((key, choice),) = item.items()
    group = key.split(" ")[-1].split("@")[0]
    if not group.startswith("/"):
        group = posixpath.join(posixpath.dirname(config_path), group)
    return {key: option_name(repository, group.lstrip("/"), choice)}


def _install() -> None:
    overrides_init = Overrides.__init__
    create_defaults_list = ConfigRepository._create_defaults_list

    @functools.wraps(overrides_init)
    def init(self: Overrides, repo: IConfigRepository, overrides_list: list[Override]) -> None:
        for override in overrides_list:
            _name_in_override(repo, override)
        overrides_init(self, repo, overrides_list)

    @functools.wraps(create_defaults_list)
    def create(self: ConfigRepository, config_path: str, defaults: ListConfig) -> list:
        items = OmegaConf.to_container(defaults, resolve=False)
        assert isinstance(items, list)
        named = [_name_in_defaults(self, config_path, item) for item in items]
        return create_defaults_list(self, config_path, OmegaConf.create(named))

    Overrides.__init__ = init
    ConfigRepository._create_defaults_list = create


_install()
