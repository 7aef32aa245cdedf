"""A process's peak of memory is its own, and has what was freed again."""

import subprocess
import sys

# In a process of its own: the peak of this one depends on the tests before.
CHILD = """
import numpy as np
from distflow_jax.observe.memory import peak_memory_gb
first = peak_memory_gb()
data = np.ones(2**28, np.uint8)
del data
print(first, peak_memory_gb())
"""


def test_the_peak_counts_what_was_freed_and_not_what_the_parent_used():
    ballast = bytearray(b"x") * 2**30
    result = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    del ballast
    first, last = map(float, result.stdout.split())
    assert 0.02 < first < 1
    assert 0.2 < last - first < 0.3
