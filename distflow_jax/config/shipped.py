"""The configs shipped with the package, by name: --config=tiny, or qwen25_7b:v5p-128,8k.

The text after the colon is the argument of the config's `get_config`. A user's own .py file can
start from a shipped config, in a checkout as in an installed package:

    from distflow_jax.config.shipped import open_config

    def get_config():
        config = open_config("tiny")
        config.training.steps = 10
        return config
"""

import inspect
import os
import pathlib

import ml_collections

from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.paths import named_path, refuse_bucket
from distflow_jax.user_functions import load_function, shipped_folder


def shipped_configs() -> dict[str, pathlib.Path]:
    """{name: file} of the configs that come with the package."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.py"))}


def config_file(source: str | os.PathLike) -> str:
    """The path of a config, with its argument: "tiny" -> ".../tiny.py", "file.py:x" as it is.

    Raises ValueError, with the nearest name, for a name that no shipped config has.
    """
    refuse_bucket("config file", os.fspath(source))
    name, colon, argument = os.fspath(source).partition(":")
    if name.endswith(".py"):
        return f"{named_path('config file', name)}{colon}{argument}"
    known = shipped_configs()
    if name not in known:
        raise ValueError(f"unknown config {name!r} ({hint(name, known)}); or give a .py file")
    return f"{known[name]}{colon}{argument}"


def open_config(source: str | os.PathLike) -> ml_collections.ConfigDict:
    """The config of a name or a .py file, with the argument after a colon.

    Raises ValueError or FileNotFoundError for one that does not exist or cannot be loaded, and
    ValueError for an argument that it does not take, or needs.
    """
    path, colon, argument = config_file(source).partition(":")
    get_config = load_function(f"{path}:get_config", "config")
    arguments = [argument] if colon else []
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError:
        name = os.fspath(source).partition(":")[0]
        problem = (
            f"takes no argument, got {argument!r}"
            if colon
            else f"needs an argument: {name}:ARGUMENT"
        )
        raise ValueError(f"config {name!r} {problem}") from None
    return get_config(*arguments)
