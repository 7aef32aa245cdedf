"""Metrics of a step: partial sums of micro-batches and processes, merged by name.

A mean is carried as (numerator, denominator) until all sums are known, because a mean of means is
not the mean. Names are verl's, `group/name`; report/metric_reference.toml explains
them.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike

Ratio = tuple[ArrayLike, ArrayLike]  # numerator and denominator, scalars


def merge(ratios: Iterable[Mapping[str, Ratio]]) -> dict[str, float]:
    """Sum of numerators over sum of denominators, by name, in float64.

    A name whose denominators sum to 0 is a mean over nothing and is left out.
    """
    sums: dict[str, list[float]] = {}
    for one in ratios:
        for name, (numerator, denominator) in one.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += float(numerator)
            total[1] += float(denominator)
    return {name: top / bottom for name, (top, bottom) in sums.items() if bottom != 0}


def summarize(prefix: str, values: ArrayLike) -> dict[str, float]:
    """{prefix/mean, prefix/max, prefix/min} of all elements of `values`, any shape; {} of none."""
    array = np.asarray(values, np.float64)
    if not array.size:
        return {}
    return {
        f"{prefix}/mean": float(array.mean()),
        f"{prefix}/max": float(array.max()),
        f"{prefix}/min": float(array.min()),
    }


def without_empty(metrics: Mapping[str, ArrayLike]) -> dict[str, float]:
    """The metrics as floats, without maxima (-inf) and minima (inf) over nothing.

    Names of these end in max and min. A maximum or minimum of only infinite values is dropped too;
    the mean of these values shows them.
    """
    nothing = {"max": -math.inf, "min": math.inf}
    values = {name: float(value) for name, value in metrics.items()}
    return {name: value for name, value in values.items() if nothing.get(name[-3:]) != value}
