"""A reward that takes its time, as a judge or a test suite does; workers load this file."""

import math
import random
import time


def score(solution_str, prompt, *, mean, sigma):
    """1 if the response has a digit. Its seconds are lognormal with this mean, and follow from the
    prompt and the response's length alone."""
    draw = random.Random(f"{prompt} {len(solution_str)}")
    time.sleep(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
    return float(any(c.isdigit() for c in solution_str))
