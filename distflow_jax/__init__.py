"""Reinforcement-learning post-training of language models in JAX, without a central node.

In a notebook, `import distflow_jax as df` gives the functions of distflow_jax/notebook.py. They are
loaded at first use: `distflow --help`, watchdogs and reward workers import the package too, and
must start fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distflow_jax.notebook import (
        compare,
        load_config,
        load_run,
        make_plan,
        train,
        try_reward,
    )

__version__ = "0.2.0"
__all__ = ["compare", "load_config", "load_run", "make_plan", "train", "try_reward"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("distflow_jax.notebook"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
