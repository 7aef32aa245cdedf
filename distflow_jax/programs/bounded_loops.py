"""Work whose amount the data say, and that says itself how much it is: loops, at most; shares of
devices, in the mean."""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import jax

Carry = TypeVar("Carry")

# the scope's name is the last before the loop's own; jvp(...), vmap(...) may be around it
_SHARE = re.compile(r"\bone_of_(\d+)\b")
_BOUND = re.compile(r"at_most_(\d+)\)*$")


def bounded_loop(
    trips: jax.Array, body: Callable[[jax.Array, Carry], Carry], init: Carry, *, most: int
) -> Carry:
    """`fori_loop(0, trips, body, init)` where trips <= `most`, a number known at compile time.

    The bound stands in the loop's name, for whoever reads the jaxpr, the HLO or a profile. It is
    not enforced.
    """
    with jax.named_scope(f"at_most_{most}"):
        return jax.lax.fori_loop(0, trips, body, init)


def bounded_while(
    cond: Callable[[Carry], jax.Array], body: Callable[[Carry], Carry], init: Carry, *, most: int
) -> Carry:
    """`while_loop(cond, body, init)` that runs at most `most` times; see `bounded_loop`."""
    with jax.named_scope(f"at_most_{most}"):
        return jax.lax.while_loop(cond, body, init)


def share(devices: int) -> AbstractContextManager[None]:
    """Within it shapes have room for all that so many devices do together, and each does its share:
    as much as the others, where the data are dealt evenly."""
    return jax.named_scope(f"one_of_{devices}")


def sharing(name: str) -> int:
    """How many devices share the work of that name: 1 outside `share`. See bound_of."""
    return math.prod(map(int, _SHARE.findall(name)))


def bound_of(name: str) -> int | None:
    """How often a while loop runs at most, by its name; None where that does not say.

    `name` is a jaxpr equation's name stack, or the op_name of an HLO instruction.
    """
    found = _BOUND.search(name.removesuffix("/while"))
    return int(found[1]) if found else None
