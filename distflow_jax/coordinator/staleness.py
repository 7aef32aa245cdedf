"""Ages of a step's tokens over all processes: how far its samplers ran ahead."""

import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.layout import VERSION
from distflow_jax.observe.metrics import summarize
from distflow_jax.parallel import processes


def staleness_metrics(samples: Samples, step: int, max_lag: int) -> dict[str, float]:
    """verl's trajectory staleness, and the share of tokens of each age. Collective.

    A token that step s trains was sampled by version v at age s - 1 - v; a response is as old as
    its oldest token. Observations, which nobody sampled, do not count.
    """
    counts = np.zeros(max_lag + 2, np.int64)  # by age; the last: above max_lag
    oldest = []
    columns = zip(samples.fields[VERSION], samples.response_mask, strict=True)
    for version, mask in columns:
        ages = step - 1 - np.broadcast_to(version, mask.shape)[mask]
        counts += np.bincount(np.clip(ages, 0, max_lag + 1), minlength=len(counts))
        if ages.size:
            oldest.append(ages.max())
    total = processes.all_gather_ints(counts).sum(axis=0)
    ages = np.concatenate(processes.all_gather_ragged(np.array(oldest, np.int64)))
    metrics = summarize("training/off_policy/trajectory_staleness", ages.astype(np.float64))
    tokens = max(1, int(total.sum()))
    shares = {
        f"training/off_policy/age_share/{age}": float(n / tokens)
        for age, n in enumerate(total[:-1])
    }
    return metrics | shares
