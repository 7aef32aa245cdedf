"""Initial parameters of a model on its devices."""

from typing import Any

import jax

from distflow_jax.models.parameters import init_params, param_shardings, place_params
from distflow_jax.models.weights.source import ModelSource


def load_or_init_params(source: ModelSource, seed: int, mesh: jax.sharding.Mesh) -> Any:
    """Sharded parameters from the source, or random ones for a source `random:`."""
    shardings = param_shardings(source.config, mesh)
    arrays = source.params()
    if arrays is None:
        return init_params(source.config, seed, shardings)
    return place_params(source.config, arrays, shardings)
