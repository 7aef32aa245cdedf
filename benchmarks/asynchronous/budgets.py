"""Rollouts on shared devices with a budget of tokens beside those without: how much they vary."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from asynchronous.simulated_run import SimulatedCell
from streaming_model import DEVICES, PROMPTS, WORKLOADS, mean_tokens, variation

STALENESS = 2
LEAST_GAIN = 3.0  # of the coefficient of variation, without a budget over with one
HEADER = (
    "| rollouts of heavy-2, staleness 2 | s, mean | coefficient of variation | of the step's s "
    "| groups a step | tokens beyond | s for 32 groups | thrown away |\n"
    "|---|---|---|---|---|---|---|---|"
)


def cells_of(steps: int, warmup: int) -> list[SimulatedCell]:
    """Runs of the first workload on shared devices, without a budget and with one."""
    (workload, *_), common = WORKLOADS, {"steps": steps, "warmup": warmup}
    tokens = round(mean_tokens(workload))
    return [
        SimulatedCell(workload.name, "shared", STALENESS, DEVICES, round_tokens=budget, **common)
        for budget in (0, tokens)
    ]


def measured(cell: SimulatedCell, rows: Sequence[dict[str, float]], last: int) -> dict[str, Any]:
    """Numbers of a run from the rows of its timed steps, which come before step `last`, and
    the tokens of the whole run that no step trained."""
    timed = [row for row in rows if cell.warmup < row["step"] <= cell.warmup + cell.steps]
    seconds, steps = (
        [row[name] for row in timed] for name in ("timing_s/wait_for_samples", "timing_s/step")
    )
    groups = [row.get("training/groups", float(PROMPTS)) for row in timed]
    beyond = [row.get("training/rollout_tokens_beyond", 0.0) for row in timed]
    (end,) = (row for row in rows if row["step"] == last)
    return {
        **vars(cell),
        "rollout": float(np.mean(seconds)),
        "variation": variation(seconds),
        "step_variation": variation(steps),
        "groups": float(np.mean(groups)),
        "beyond": float(np.mean(beyond)),
        "step_of_all": float(np.mean(steps)) * PROMPTS / float(np.mean(groups)),
        "thrown_away": end["perf/tokens/sampled"] - end["perf/tokens/trained"],
    }


def line(x: dict[str, Any]) -> str:
    """A row of the table."""
    return (
        f"| {x['round_tokens'] or 'no budget'} | {x['rollout']:.3f} | {x['variation']:.3f} "
        f"| {x['step_variation']:.3f} | {x['groups']:.1f} | {x['beyond']:.0f} "
        f"| {x['step_of_all']:.3f} | {x['thrown_away']:.0f} |"
    )


def passes(found: Sequence[dict[str, Any]]) -> bool:
    """Whether rollouts with a budget vary as little as they must, and nothing is thrown away."""
    without, budget = found
    steady = budget["variation"] * LEAST_GAIN <= without["variation"]
    return steady and not any(x["thrown_away"] for x in found)
