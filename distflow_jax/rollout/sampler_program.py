"""How a sampler's functions become programs."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from distflow_jax.programs.xla_options import compiler_options
from distflow_jax.rollout.decode_state import StateShapes


def sampler_program(
    shapes: StateShapes, function: Callable, *bound: Any, out: Any = None, donate: Any = ()
) -> Callable:
    """jax.jit of `function(shapes, *bound, ...)` with a sampler's compiler options.

    `donate` counts the arguments behind `bound`. `out`: shardings of the results; a state that
    changed its layout between two programs would recompile them.
    """
    return jax.jit(
        functools.partial(function, shapes, *bound),
        out_shardings=out,
        donate_argnums=donate,
        compiler_options=compiler_options(shapes.mesh, sampler=True),
    )
