"""Self-check and trial of an implementation on a device: agreement with float32, and seconds."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

# largest error, relative to the largest entry or 1: rounding to bfloat16, in which accelerators
# multiply float32 too unless they are told otherwise
TOLERANCE = 0.02
_CALLS = 3  # timed; the fewest seconds count
_FAILURES = (  # of kernels and libraries that do not serve this device
    *(ArithmeticError, AssertionError, AttributeError, ExceptionGroup, ImportError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)


class Tried(NamedTuple):
    """The result of trying an implementation on a device."""

    seconds: float  # of a call; 0: not timed
    failure: str = ""  # why it cannot be used; "" if it agrees with float32


def tried(
    run: Callable[..., Any],
    exact: Callable[..., Any],
    arguments: Sequence[Any],
    timed: tuple[Callable[..., Any], Sequence[Any]] | None = None,
) -> Tried:
    """Compares `run(*arguments)` with `exact` of them in float32, on the default device.

    Both return arrays in a tree. `timed`: a function and its arguments, of which the fewest seconds
    of a few calls are taken, compilation excluded.
    """
    with jax.default_matmul_precision("highest"):
        wanted = jax.device_get(jax.jit(exact)(*arguments))
    try:
        mine = jax.device_get(jax.jit(run)(*arguments))
        pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(wanted), strict=True)
        error = max(_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)
        if error > TOLERANCE:
            return Tried(0.0, f"it differs from float32 by {error:.2g}, more than {TOLERANCE:g}")
        return Tried(_seconds(*timed) if timed else 0.0)
    except _FAILURES as error:
        return Tried(0.0, f"{type(error).__name__}: {error}".splitlines()[0])


def _error(mine: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference relative to the largest entry or 1, infinite for NaN; any shape."""
    error = np.abs(mine - wanted).max() / max(1.0, np.abs(wanted).max())
    return float(np.nan_to_num(error, nan=np.inf))


def _seconds(run: Callable[..., Any], arguments: Sequence[Any]) -> float:
    compiled, found = jax.jit(run).lower(*arguments).compile(), []
    for _ in range(1 + _CALLS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        found.append(time.perf_counter() - began)
    return min(found[1:])


def fastest(setting: str, found: Sequence[Mapping[str, Tried]]) -> tuple[str, str]:
    """(name, reason) of the fastest implementation that no process has found wrong.

    `found`: of every process, with the same names in the order of preference; a name's seconds are
    those of its slowest process. Raises ValueError if none can be used.
    """
    names = list(found[0])
    wrong = {n: next((f[n].failure for f in found if f[n].failure), "") for n in names}
    right = [name for name in names if not wrong[name]]
    reasons = [f"not {name}: {why}" for name, why in wrong.items() if why]
    if not right:
        raise ValueError(f"{setting}: nothing serves these devices; {'; '.join(reasons)}")
    seconds = {name: max(f[name].seconds for f in found) for name in right}
    best = min(right, key=lambda name: seconds[name])
    if len(right) > 1:
        times = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in right)
        reasons.insert(0, f"fastest of a trial: {times}")
    return best, "; ".join(["agrees with float32 here", *reasons])
