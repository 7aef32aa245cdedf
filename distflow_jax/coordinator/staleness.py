"""Ages of a step's tokens over all processes: how far its samplers ran ahead."""

import re
from collections.abc import Mapping

import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.layout import VERSION
from distflow_jax.observe.metrics import summarize
from distflow_jax.parallel import processes

_SHARES = ("age_share", "in_flight_share", "waiting_share")
_TOKENS = "tokens_of_age"  # as policy_objective.py names them
_OF_AGE = re.compile(r"(.*rollout_corr/)(\w+)/(\d+)")


def staleness_metrics(samples: Samples, step: int, max_lag: int) -> dict[str, float]:
    """verl's trajectory staleness, and shares of tokens by age and by where they aged. Collective.

    A token that step s trains was sampled by version v at age s - 1 - v; a response is as old as
    its oldest token. Of that age w - v steps passed in flight, where version w sampled the last
    token of its response, and the others while the complete response waited. Observations, which
    nobody sampled, do not count.
    """
    # tokens by steps; of the last column: above max_lag
    counts = np.zeros((len(_SHARES), max_lag + 2), np.int64)
    oldest = []
    columns = zip(samples.fields[VERSION], samples.response_mask, strict=True)
    for version, mask in columns:
        versions = np.broadcast_to(version, mask.shape)[mask]
        if not versions.size:
            continue
        ages, waiting = step - 1 - versions, step - 1 - versions[-1]
        parts = (ages, ages - waiting, np.full_like(ages, waiting))
        for count, part in zip(counts, parts, strict=True):
            count += np.bincount(np.clip(part, 0, max_lag + 1), minlength=len(count))
        oldest.append(ages.max())
    totals = processes.all_gather_ints(counts).sum(axis=0)
    ages = np.concatenate(processes.all_gather_ragged(np.array(oldest, np.int64)))
    metrics = summarize("training/off_policy/trajectory_staleness", ages.astype(np.float64))
    for share, total in zip(_SHARES, totals, strict=True):
        tokens = max(1, int(total.sum()))
        for steps, n in enumerate(total[:-1]):
            metrics[f"training/off_policy/{share}/{steps}"] = float(n / tokens)
    return metrics


def means_by_age(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, with means over the tokens of each age in place of parts of the whole mean.

    An update tells `.../rollout_corr/NAME/AGE`, what these tokens have of the mean, beside
    `.../rollout_corr/tokens_of_age/AGE`, their share of the tokens. An age that no token has is
    left out.
    """
    found = dict(metrics)
    for key in [key for key in metrics if _OF_AGE.fullmatch(key)]:
        prefix, name, age = _OF_AGE.fullmatch(key).groups()
        value, share = found.pop(key), metrics[f"{prefix}{_TOKENS}/{age}"]
        if name != _TOKENS and share:
            found[key] = value / share
    return found
