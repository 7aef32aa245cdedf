"""What a graph asks of the config: its settings, under what a person has chosen.

An algorithm is a graph and a few numbers, DAPO's clip of 0.28 for instance. A graph file names
them under `settings`; they hold unless the command line, or the config by a value that is not the
default, says otherwise.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from distflow_jax.config import Config
from distflow_jax.config_dict import from_config_dict, to_config_dict, unknown_key


def with_settings(
    config: Config, settings: Mapping[str, Any], *, chosen: Collection[str] = ()
) -> Config:
    """The config with a graph's settings, {"algorithm.clip_high": 0.28}.

    `chosen` are the keys that the command line gives: they win, as does a value of the config that
    is not the default. Raises ValueError for a key that the config does not have, or a value of
    another type.
    """
    if not settings:
        return config
    tree, default = to_config_dict(config), Config()
    for key, value in settings.items():
        if problem := unknown_key(tree, key):
            raise ValueError(f"settings: {problem}")
        if dataclasses.is_dataclass(_at(default, key)):
            raise ValueError(f"settings: {key} is a section of the config; name a value in it")
        if key in chosen or _at(config, key) != _at(default, key):
            continue
        *parents, last = key.split(".")
        section = tree
        for parent in parents:
            section = section[parent]
        with section.unlocked(), section.ignore_type():
            section[last] = value  # its type is checked below, with its path
    return from_config_dict(Config, tree)


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config
