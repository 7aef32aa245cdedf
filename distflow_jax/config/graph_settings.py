"""The settings of a graph in the config, with lower precedence than the user's values.

An algorithm is a graph and a few numbers, for instance DAPO's clip of 0.28. A graph file lists
these under `settings`; command-line flags override them, and so does a config value that differs
from the default.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from distflow_jax.config.config_dict import edited, to_config_dict, unknown_key
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
    for key in values:
        _check_key(config, key, where)
    if not values:
        return config
    try:
        return edited(config, values)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error


def _check_key(config: Config, key: str, where: str) -> None:
    section: Any = config
    for part in key.split("."):
        has_keys = isinstance(section, Mapping)
        if part not in (section if has_keys else getattr(section, "__dataclass_fields__", ())):
            raise ValueError(f"{where}{unknown_key(to_config_dict(config), key)}")
        section = value_at(section, part)
    if dataclasses.is_dataclass(section):
        raise ValueError(f"{where}{key} is a section of the config; name a value in it")


def value_at(config: Any, key: str) -> Any:
    """The config's value at a key, "training.steps"."""
    for part in key.split("."):
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return config
