"""Data-dependent work annotated with its amount: loops with their bounds, shares of devices,
branches that are seldom taken.

The annotations are name scopes, which jaxpr_flops.py and hlo.py read when they count costs.
"""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import jax

Carry = TypeVar("Carry")

# the scope's name is the last before that of the loop; jvp(...), vmap(...) may enclose it
_SHARE = re.compile(r"\bone_of_(\d+)\b")
_SELDOM = re.compile(r"\bseldom\)*$")
_BOUND = re.compile(r"at_most_(\d+)(?:_but_once_in_(\d+))?\)*$")


def bounded_loop(
    trips: jax.Array,
    body: Callable[[jax.Array, Carry], Carry],
    init: Carry,
    *,
    most: int,
    idle_once_in: int | None = None,
) -> Carry:
    """`fori_loop(0, trips, body, init)` with trips <= `most`, which is known at compile time.

    `trips`: a scalar. `idle_once_in`: the loop runs so many times in an enclosing one, in one of
    which it makes no trip. Both bounds are part of the loop's name, where jaxpr, HLO and profiles
    show them. They are not enforced.
    """
    idle = "" if idle_once_in is None else f"_but_once_in_{idle_once_in}"
    with jax.named_scope(f"at_most_{most}{idle}"):
        return jax.lax.fori_loop(0, trips, body, init)


def bounded_while(
    cond: Callable[[Carry], jax.Array], body: Callable[[Carry], Carry], init: Carry, *, most: int
) -> Carry:
    """`while_loop(cond, body, init)` that runs at most `most` times; see `bounded_loop`.

    `cond` returns a bool scalar.
    """
    with jax.named_scope(f"at_most_{most}"):
        return jax.lax.while_loop(cond, body, init)


def share(devices: int) -> AbstractContextManager[None]:
    """Marks work whose shapes have room for the total of `devices` devices.

    Each device does a share of that total, an equal one if the data are distributed evenly.
    """
    return jax.named_scope(f"one_of_{devices}")


def seldom() -> AbstractContextManager[None]:
    """Marks a conditional whose most expensive branch few runs take: it counts by its cheapest."""
    return jax.named_scope("seldom")


def is_seldom(name: str) -> bool:
    """Whether a conditional is marked by `seldom`; `name` as of bound_of."""
    return _SELDOM.search(name.removesuffix("/cond")) is not None


def sharing(name: str) -> int:
    """Number of devices that share work of that name stack, 1 outside `share`; see bound_of."""
    return math.prod(map(int, _SHARE.findall(name)))


def bound_of(name: str) -> float | None:
    """The bound in a while loop's name, the mean over the runs of an idle loop; None: no bound.

    `name`: the name stack of a jaxpr equation, or the op_name of an HLO instruction.
    """
    found = _BOUND.search(name.removesuffix("/while"))
    if found is None:
        return None
    most, runs = int(found[1]), found[2]
    return most if runs is None else most * (int(runs) - 1) / int(runs)
