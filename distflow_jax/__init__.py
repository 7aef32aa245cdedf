"""Reinforcement-learning post-training of language models in JAX, without a central node.

In a notebook `import distflow_jax as df` is enough: see distflow_jax/notebook.py, whose functions
are also here. They are loaded when one of them is first used, so that importing the package costs
nothing; a watchdog and reward workers do it too.
"""

import importlib
from typing import Any

__all__ = ["compare", "load_config", "load_run", "make_plan", "train", "try_reward"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("distflow_jax.notebook"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
