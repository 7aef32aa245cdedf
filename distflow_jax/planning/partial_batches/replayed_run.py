"""A replay and its recording: they must agree on settings, graph, weights and devices."""

import json
from collections.abc import Mapping
from typing import Any

from distflow_jax.stream.batches.recordings import Recording

# Sections and keys that change nothing of what a step trains on, nor how: checkpoints, evaluations,
# observation, and how fast samples are made. All others must be those of the recorded run.
FREE_SECTIONS = ("checkpoint", "eval", "health", "observe")
FREE_KEYS = frozenset(
    (
        *("compilation_cache", "model.cache_dir", "stream.record", "stream.order"),
        *("coordinator.double_buffer", "coordinator.overlap_rewards", "reward.num_workers"),
        *("rollout.num_slots", "rollout.cache_fraction", "rollout.cache_tokens"),
        *("rollout.page_size", "rollout.prefill_tokens", "rollout.prefix_tokens"),
        "rollout.max_trajectories",
        *("stream.worker_nodes", "stream.listen", "stream.save_seconds", "stream.lease_seconds"),
        *("stream.no_workers_seconds", "stream.max_tries"),
        *("rollout.tokens_per_call", "rollout.speculative_tokens", "rollout.speculative_ngram"),
    )
)
_MOST_NAMED = 5  # further keys in an error


def start_of_run(
    settings: Mapping[str, str], plan_digest: str, weights: Mapping[str, str], devices: int
) -> dict[str, Any]:
    """The facts that are recorded of a start of a run, JSON values.

    `settings`: JSON text of each config key; `weights`: digests by model; `devices`: of all
    processes.
    """
    return {
        "settings": dict(settings),
        "plan": plan_digest,
        "weights": dict(weights),
        "devices": devices,
    }


def check_replay(recording: Recording, ours: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the key and the step, unless a run that starts as `ours` can
    repeat a recording."""
    for step, theirs in recording.starts:
        which = f"--replay={str(recording.folder)!r}: step {step} was recorded"
        _check_settings(which, theirs["settings"], ours["settings"])
        if theirs["devices"] != ours["devices"]:
            raise ValueError(
                f"{which} on {theirs['devices']} devices, but this job has {ours['devices']}: "
                f"use {theirs['devices']}"
            )
        for model, digest in ours["weights"].items():
            if theirs["weights"].get(model) != digest:
                raise ValueError(
                    f"{which} in a run that started from different weights of model {model!r}: "
                    "restore those weights"
                )
        if theirs["plan"] != ours["plan"]:
            raise ValueError(
                f"{which} with a different graph named {ours['settings']['dag']}: restore its "
                "file, or use the package version that recorded it"
            )


def _check_settings(which: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    # an older version may lack keys
    wrong = [k for k in sorted(ours) if theirs.get(k, ours[k]) != ours[k] and not _is_free(k)]
    wrong += [k for k in sorted(theirs.keys() - ours.keys()) if not _is_free(k)]
    if not wrong:
        return
    key, *others = wrong
    now = json.loads(ours[key]) if key in ours else "nothing"
    more = f" (also {', '.join(others[:_MOST_NAMED])})" if others else ""
    raise ValueError(
        f"{which} with {key}={json.loads(theirs[key])!r}, but this run has {now!r}: use the same "
        "value"
        f"{more}"
    )


def _is_free(key: str) -> bool:
    return key in FREE_KEYS or key.split(".")[0] in FREE_SECTIONS
