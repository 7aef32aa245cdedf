"""Metrics of host stages over all processes: gathered once for all stages of a pass."""

from distflow_jax.layout import Metrics, Parts
from distflow_jax.parallel import processes


def merge_parts(metrics: Metrics) -> Metrics:
    """The metrics, with what follows from Parts in their place. Collective if there are any.

    Raises ValueError for a name that a stage reports and another one too.
    """
    parts = {name: value for name, value in metrics.items() if isinstance(value, Parts)}
    if not parts:
        return metrics
    merged = {name: value for name, value in metrics.items() if name not in parts}
    # as text: a function may return other numbers for other rows, so that names differ
    gathered = processes.all_gather_json({name: value.values for name, value in parts.items()})
    for name, value in parts.items():
        of_all = [one for theirs in gathered for one in theirs.get(name, ())]
        found = value.merge(of_all) if of_all else {}
        if twice := sorted(merged.keys() & found.keys()):
            raise ValueError(
                f"node {name!r}: reports metrics that another node of this step reports: {twice}; "
                "rename them"
            )
        merged |= found
    return merged
