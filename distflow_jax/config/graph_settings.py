"""The settings of a graph in the config, with lower precedence than the user's values.

An algorithm is a graph and a few numbers, for instance DAPO's clip of 0.28. A graph file lists
these under `settings`; command-line flags override them, and so does a config value that differs
from the default.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from distflow_jax.config.config_dict import from_config_dict, to_config_dict, unknown_key
from distflow_jax.config.run_config import Config


def with_settings(
    config: Config, settings: Mapping[str, Any], *, chosen: Collection[str] = (), where: str = ""
) -> Config:
    """The config with a graph's settings, {"algorithm.clip_high": 0.28}.

    `chosen` are the keys that the command line gives: they win, as does a value of the config that
    is not the default. Raises ValueError, which begins with `where`, for a key that the config does
    not have, or a value of another type.
    """
    default = Config()
    for key in settings:
        _check_key(config, key, f"{where}settings: ")
    kept = {
        key: value
        for key, value in settings.items()
        if key not in chosen and value_at(config, key) == value_at(default, key)
    }
    return with_values(config, kept, where)


def with_values(config: Config, values: Mapping[str, Any], where: str = "") -> Config:
    """The config with values at their keys, {"training.steps": 5}.

    Raises ValueError, which begins with `where`, for a key that the config does not have (the
    nearest is named) or that is a whole section, and for a value of another type.
    """
    tree = to_config_dict(config)
    for key, value in values.items():
        _check_key(config, key, where)
        *parents, last = key.split(".")
        section = tree
        for parent in parents:
            section = section[parent]
        with section.unlocked(), section.ignore_type():
            section[last] = value  # its type is checked below, with its path
    if not values:
        return config
    try:
        return from_config_dict(Config, tree)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error


def _check_key(config: Config, key: str, where: str) -> None:
    if problem := unknown_key(to_config_dict(config), key):
        raise ValueError(f"{where}{problem}")
    if dataclasses.is_dataclass(value_at(config, key)):
        raise ValueError(f"{where}{key} is a section of the config; name a value in it")


def value_at(config: Any, key: str) -> Any:
    """The config's value at a key, "training.steps"."""
    for part in key.split("."):
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config
