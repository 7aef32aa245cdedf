"""The charts of a run: metrics that share a chart, and the order that its objectives give.

A plan's nodes name what they train (a policy, a value function, preferences, a reward model,
labelled responses, demonstrations). Each of these has a few metrics that a reader looks at first.
"""

import math
from collections.abc import Mapping, Sequence

from distflow_jax.report.read_run import RunFolder

TOGETHER = ("mean", "max", "min")  # metrics that share a chart

# {objective of a node that trains: starts of its first metrics' names}
_OBJECTIVES = {
    "policy": ("actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/entropy"),
    "preference": ("actor/loss", "rewards/accuracies", "rewards/margins", "logps/"),
    "kto": ("actor/loss", "rewards/margins", "kto/kl", "logps/"),
    "sft": ("actor/nll", "actor/loss", "actor/entropy"),
    "value": ("critic/vf_loss", "critic/vf_explained_var", "critic/values"),
    "reward_model": ("reward_model/loss", "reward_model/accuracy", "reward_model/score_margin"),
}
_SAMPLED = ("critic/score",)  # of a plan that samples responses
_EVALUATED = ("val-core/",)
_SAMPLED_TOO = ("response_length",)
_LAST = (
    "{model}/grad_norm",
    "training/rollout_probs_diff",
    "perf/throughput",
    "perf/slots_busy_share",
    "perf/trajectories/",
    "timing_s/step",
)
_MODELS = {"value": "critic", "reward_model": "reward_model"}  # else: actor


def charts_of(rows: Mapping[int, Mapping[str, float]]) -> dict[str, list[str]]:
    """{title: names of the metrics in that chart}; mean, max and min of a metric share one."""
    charts: dict[str, list[str]] = {}
    for name in sorted({name for row in rows.values() for name in row}):
        stem, _, last = name.rpartition("/")
        title = stem if stem and last in TOGETHER else name
        charts.setdefault(title, []).append(name)
    return charts


def main_charts(run: RunFolder) -> list[str]:
    """Titles of the run's main charts: those of what its plan trains come first, flat ones last.

    A run without a readable plan has the main charts of all objectives.
    """
    starts, charts = _starts(run), charts_of(run.rows)
    ranked = [
        (is_flat(run.rows, charts[title]), place, title)
        for title in charts
        for place in _places(title, starts)
    ]
    return [title for *_, title in sorted(ranked)]


def is_flat(rows: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> bool:
    """Whether each of these metrics has one value in several steps; NaN differs from all."""
    found = [[row[name] for row in rows.values() if name in row] for name in names]
    return all(len(values) > 1 and len(set(values)) == 1 for values in found) and not any(
        math.isnan(values[0]) for values in found
    )


def _starts(run: RunFolder) -> list[str]:
    known = [objective for objective in run.objectives if objective in _OBJECTIVES]
    objectives = known or list(_OBJECTIVES)
    sampled = run.samples_prompts or not known
    starts = [*(_SAMPLED if sampled else ()), *_EVALUATED]
    # the policy's numbers before those of models that help to train it
    objectives = sorted(objectives, key=list(_OBJECTIVES).index)
    first = [start for objective in objectives for start in _OBJECTIVES[objective]]
    models = dict.fromkeys(_MODELS.get(objective, "actor") for objective in objectives)
    last = [start.format(model=model) for start in _LAST for model in models]
    if not sampled:  # the losses are what such a run is about
        return list(dict.fromkeys([*first, *starts, *last]))
    return list(dict.fromkeys([*starts, *first, *_SAMPLED_TOO, *last]))


def _places(title: str, starts: list[str]) -> list[int]:
    """The title's place in the order; [] for a chart that is not a main one.

    Where a graph has several nodes of a kind, "NODE/" stands before the names of each.
    """
    names = (title, title.partition("/")[2])
    return [
        place for place, start in enumerate(starts) for name in names if name.startswith(start)
    ][:1]
