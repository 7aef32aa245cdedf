"""Sums whose denominators are known only at the end of an optimizer step.

A step on a whole batch knows its counts before its first forward pass, and objectives divide by
them. A step in partial batches knows them after its last partial batch. There an objective is
handed a Divisor in place of each denominator: `x / divisor` is a Quotient, which keeps x apart by
the divisor's name. All that is linear works on quotients as on the numbers that they stand for, so
an objective's code is one and the same for both.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

UNDIVIDED = "1"  # name of the part of a quotient that no denominator divides


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A denominator that is not known yet, by its name; only the right side of a division."""

    name: str

    __array_ufunc__ = None  # NumPy leaves the division to this class

    def __rtruediv__(self, numerator: Any) -> "Quotient":
        """The numerator, of any shape, kept under the divisor's name."""
        if isinstance(numerator, Quotient):
            raise TypeError(f"{numerator} is divided already, and cannot be divided by {self.name}")
        return Quotient({self.name: jnp.asarray(numerator)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quotient:
    """A sum of numerators over different denominators; all arrays have equal shapes, any shape."""

    parts: dict[str, jax.Array]  # numerator by the name of its denominator

    __array_ufunc__ = None

    @classmethod
    def of(cls, value: Any) -> "Quotient":
        """`value` itself if it is a quotient, or the quotient of an array, any shape, over 1."""
        return value if isinstance(value, cls) else cls({UNDIVIDED: jnp.asarray(value)})

    def over(self, denominators: Mapping[str, jax.Array]) -> jax.Array:
        """The number or array that it stands for, given all denominators, scalars."""
        found = [
            x if name == UNDIVIDED else x / denominators[name] for name, x in self.parts.items()
        ]
        return sum(found[1:], found[0]) if found else jnp.float32(0.0)

    def __add__(self, other: Any) -> "Quotient":
        """The sum with a quotient or array of the same shape."""
        theirs = Quotient.of(other).parts
        parts = {name: x + theirs[name] if name in theirs else x for name, x in self.parts.items()}
        return Quotient(parts | {name: x for name, x in theirs.items() if name not in parts})

    __radd__ = __add__

    def __mul__(self, factor: Any) -> "Quotient":
        """The product with a number; a term that a setting of 0 leaves out has no parts."""
        if isinstance(factor, Quotient):
            raise TypeError(f"the product of {self} and {factor} is not linear")
        if isinstance(factor, int | float) and factor == 0:
            return Quotient({})
        return Quotient({name: x * factor for name, x in self.parts.items()})

    __rmul__ = __mul__

    def __neg__(self) -> "Quotient":
        """The quotient times -1."""
        return Quotient({name: -x for name, x in self.parts.items()})

    def __sub__(self, other: Any) -> "Quotient":
        """The difference to a quotient or array of the same shape."""
        return self + -Quotient.of(other)

    def __rsub__(self, other: Any) -> "Quotient":
        """The difference of an array of the same shape to this."""
        return Quotient.of(other) + -self

    def sum(self) -> "Quotient":
        """The sum of all entries, a quotient of scalars."""
        return Quotient({name: x.sum() for name, x in self.parts.items()})

    def mean(self) -> "Quotient":
        """The mean of all entries, a quotient of scalars."""
        return Quotient({name: x.mean() for name, x in self.parts.items()})


def divisors_of(denominators: Any) -> Any:
    """The pytree of denominators with a Divisor in the place of each, named by its path."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: Divisor(jax.tree_util.keystr(path)), denominators
    )


def named(denominators: Any) -> dict[str, jax.Array]:
    """The denominators of a pytree, scalars, by the names of `divisors_of`."""
    leaves = jax.tree_util.tree_leaves_with_path(denominators)
    return {jax.tree_util.keystr(path): x for path, x in leaves}
