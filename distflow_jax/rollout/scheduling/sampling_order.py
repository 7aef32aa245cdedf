"""Orders of waiting requests: which of the groups that may begin take slots first.

An order is a pure function of the request. Requests of a lower turn come first in every order, and
what is equal in all of its numbers comes in the order of arrival.
"""

from collections.abc import Callable

from distflow_jax.rollout.requests import GroupRequest

Order = Callable[[GroupRequest], tuple[float, ...]]  # lowest first


def longest(request: GroupRequest) -> tuple[float, ...]:
    """The longest expected response first, then the longest limit: it would end last."""
    return (-request.prompt.expected_length, -request.sampling.limit)


def counter(request: GroupRequest) -> tuple[float, ...]:
    """The lowest prompt counter first."""
    return (request.prompt.counter,)


def informative(request: GroupRequest) -> tuple[float, ...]:
    """The row whose last scores differed most first, then as `longest`."""
    return (-request.prompt.expected_spread, *longest(request))


ORDERS: dict[str, Order] = {"longest": longest, "counter": counter, "informative": informative}
