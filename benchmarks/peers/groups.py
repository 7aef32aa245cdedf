"""The groups of benchmarks/queues.py, which all sides draw alike: S samples of T tokens each."""

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Sizes of a group."""

    samples: int
    mean: int  # tokens of a sample
    most: int  # equal to mean: all samples have as many; else lognormal, sigma 1

    def lengths(self, draw: np.random.Generator) -> np.ndarray:
        """Tokens of the samples of one group, int [S]."""
        if self.mean == self.most:
            return np.full(self.samples, self.mean)
        drawn = draw.lognormal(np.log(self.mean) - 0.5, 1.0, self.samples)
        return np.clip(drawn, 2, self.most).astype(int)


SHAPES = {
    "8 x 200": Shape(8, 200, 1024),
    "8 x 4,000": Shape(8, 4000, 4000),
    "1 x 200": Shape(1, 200, 1024),
    "1 x 4,000": Shape(1, 4000, 4000),
}
