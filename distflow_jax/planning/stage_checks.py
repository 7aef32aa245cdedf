"""Checks of a stage while it is traced: its errors name the node, its fields have known shapes."""

import pathlib
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.batch import ONE_NUMBER
from distflow_jax.dag.plan import Task
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import Layout
from distflow_jax.planning.field_specs import FieldSpecs

# raised by functions that need values before there are any
_NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)


def checked(stage: Stage, task: Task, specs: FieldSpecs, layout: Layout) -> Stage:
    """The stage with errors that name its node, and a check of what it writes, as it is traced.

    ValueError for a function of the user's that cannot be traced, or fields that cannot be moved.
    """
    node = task.node
    moving = {e.field for e in task.edges_out if e.move != "stay"}

    def run(state, fields, options):
        try:
            after, written, metrics = stage(state, fields, options)
        except _NOT_TRACEABLE as error:
            raise ValueError(
                f"node {node.id!r}: {node.fn or 'its stage'} needs the values of its fields, but "
                "functions on a mesh are compiled before values exist: use jax.numpy and no `if` "
                "on values, or run the node on the host, as REWARD COMPUTE "
                f"({_first_line(error)}, {_where(error)})"
            ) from error
        except Exception as error:
            if node.fn is None:
                error.add_note(f"while the stage of node {node.id!r} was traced")
                raise
            raise ValueError(
                f"node {node.id!r}: {node.fn} raised {type(error).__name__}: {_first_line(error)} "
                f"({_where(error)})"
            ) from error
        written = {name: _strong(value) for name, value in written.items()}
        for name, value in written.items():
            field = node.writes.get(name)
            if field in moving and not specs.travels(value, layout):
                kinds = (ONE_NUMBER, None)
                tokens, sequences = (specs.packed(layout, kind).shape for kind in kinds)
                raise ValueError(
                    f"node {node.id!r}: writes {field!r} as {outline(value)}, but a field read "
                    f"elsewhere needs one number per token {list(tokens)}, or per sequence "
                    f"{list(sequences)}"
                )
        metrics = {name: jnp.asarray(value) for name, value in metrics.items()}
        # a number that the function made is an array from the first step on
        state = _strong(after) if after is not state and jnp.isscalar(after) else after
        return state, written, metrics

    return run


def outline(tree: Any) -> str:
    """Shapes and dtypes of a small pytree, or its number of leaves and their total size."""
    leaves = jax.tree.leaves(tree)
    words = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in leaves]
    return ", ".join(words) if len(words) < 8 else f"{words} {jax.tree.structure(tree)}"


def _strong(tree: Any) -> Any:
    """Arrays of the same dtypes, of which none came from a Python number alone."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), tree)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    jax_folder = str(pathlib.Path(jax.__file__).parent)
    own = [frame for frame in frames if not frame.filename.startswith(jax_folder)]
    return f"{own[-1].filename}, line {own[-1].lineno}"
