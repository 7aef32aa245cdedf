"""Initial parameters of a model on its devices."""

import dataclasses
from typing import Any

import jax

from distflow_jax.models.parameters import (
    completed,
    init_params,
    param_shardings,
    place_params,
)
from distflow_jax.models.weights.source import ModelSource


def load_or_init_params(source: ModelSource, seed: int, mesh: jax.sharding.Mesh) -> Any:
    """Sharded parameters from the source; random ones for `random:` and for a new tower."""
    shardings = param_shardings(source.config, mesh)
    arrays = source.params()
    if arrays is None:
        return init_params(source.config, seed, shardings)
    if source.new_tower:
        text = dataclasses.replace(source.config, vision=None)
        placed = place_params(text, arrays, param_shardings(text, mesh))
        return completed(placed, source.config, seed, mesh)
    return place_params(source.config, arrays, shardings)
