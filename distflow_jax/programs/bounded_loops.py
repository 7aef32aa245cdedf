"""Data-dependent work annotated with its amount: loops with their bounds, shares of devices.

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
_BOUND = re.compile(r"at_most_(\d+)\)*$")


def bounded_loop(
    trips: jax.Array, body: Callable[[jax.Array, Carry], Carry], init: Carry, *, most: int
) -> Carry:
    """`fori_loop(0, trips, body, init)` with trips <= `most`, which is known at compile time.

    `trips`: a scalar. The bound is part of the loop's name, where jaxpr, HLO and profiles show it.
    It is not enforced.
    """
    with jax.named_scope(f"at_most_{most}"):
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


def sharing(name: str) -> int:
    """Number of devices that share work of that name stack, 1 outside `share`; see bound_of."""
    return math.prod(map(int, _SHARE.findall(name)))


def bound_of(name: str) -> int | None:
    """The bound in a while loop's name; None if it has none.

    `name`: the name stack of a jaxpr equation, or the op_name of an HLO instruction.
    """
    found = _BOUND.search(name.removesuffix("/while"))
    return int(found[1]) if found else None
