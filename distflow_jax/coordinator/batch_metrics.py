"""Numbers about a step's samples, over all processes, the same on every one.

N samples of all processes. Only a few numbers per sample travel. The ages of tokens say how far
samplers ran ahead.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.cluster import processes
from distflow_jax.layout import OF_GROUP, TOKENS_OF_AGE, VERSION
from distflow_jax.observe.metrics import summarize


@dataclasses.dataclass(frozen=True)
class StepTable:
    """One entry per sample of the step, in the order of their uids; float64 [N] each."""

    counter: np.ndarray
    prompt: np.ndarray  # tokens
    response: np.ndarray  # tokens
    finished: np.ndarray  # 1 or 0; NaN where the graph has no such field
    score: np.ndarray  # NaN where nothing is scored
    images: np.ndarray | None = None  # of the prompt; None where the model takes none
    shrunk: np.ndarray | None = None  # of these, those that data.image_tokens made smaller


def gather_table(samples: Samples, *, images: bool = False) -> StepTable:
    """All processes' samples as one table, equal on every process. Collective.

    `images`: whether the model takes images, the same on every process.
    """
    nothing = np.full(len(samples), np.nan)
    counted = [
        (len(p.images), sum(image.shrunk for image in p.images)) if images else ()
        for p in samples.prompt
    ]
    local = np.array(
        [
            [*uid, len(p.tokens), len(r), float(done), float(score), *seen]
            for uid, p, r, done, score, seen in zip(
                samples.uid.tolist(),
                samples.prompt,
                samples.response,
                samples.fields.get("finished", nothing),
                samples.fields.get("score", nothing),
                counted,
                strict=True,
            )
        ],
        np.float64,
    ).reshape(-1, 8 if images else 6)
    table = np.concatenate(processes.all_gather_ragged(local))
    # by uid: sums in another order would differ in the last bit from layout to layout
    counter, _, *columns = table[np.lexsort(table.T[1::-1])].T
    return StepTable(counter, *columns)


def batch_metrics(table: StepTable, tokens_per_rank: np.ndarray) -> dict[str, float]:
    """verl's batch metrics. `tokens_per_rank` int64 [ranks]: tokens in the rows of each rank.

    A mean or an extreme over no samples is left out.
    """
    total = table.prompt + table.response
    finished = table.finished[~np.isnan(table.finished)]
    cut = {"response_length/clip_ratio": float(1.0 - finished.mean())} if len(finished) else {}
    return (
        cut
        | _image_metrics(table)
        | {
            **summarize("critic/score", table.score[~np.isnan(table.score)]),
            **summarize("response_length", table.response),
            **summarize("prompt_length", table.prompt),
            **summarize("global_seqlen", total),
            "global_seqlen/balanced_min": float(tokens_per_rank.min()),
            "global_seqlen/balanced_max": float(tokens_per_rank.max()),
            "perf/total_num_tokens": float(total.sum()),
        }
    )


def gather_images(counts: np.ndarray) -> np.ndarray:
    """The sum of `Coordinator.image_counts` over all processes, int64 [5]. Collective."""
    return processes.all_gather_ints(counts).sum(0)


def image_metrics(counts: np.ndarray | None) -> dict[str, float]:
    """Metrics of the counts of all processes, int64 [5]; none in a run without a tower."""
    if counts is None:
        return {}
    received, encoded = counts[:2]
    return {"perf/images_encoded": float(encoded), "perf/image_bytes_moved": float(received)}


def _image_metrics(table: StepTable) -> dict[str, float]:
    """Images of the step's prompts, each prompt counted once."""
    if table.images is None or table.shrunk is None:
        return {}
    first = np.unique(table.counter, return_index=True)[1]
    return {
        "data/images": float(table.images[first].sum()),
        "data/images_shrunk": float(table.shrunk[first].sum()),
    }


_SHARES = ("age_share", "in_flight_share", "waiting_share")
_GAP, _ITS_TOKENS = (f"rollout_corr/{name}{OF_GROUP}" for name in ("gap", "tokens"))
_OF_AGE = re.compile(r"(.*rollout_corr/)(\w+)/(\d+)")
_SHARE_OF_LABEL = re.compile(r"(.*)kto/(chosen|rejected)_share")


def staleness_metrics(samples: Samples, step: int, max_staleness: int) -> dict[str, float]:
    """verl's trajectory staleness, and shares of tokens by age and by where they aged. Collective.

    A token that step s trains was sampled by version v at age s - 1 - v; a response is as old as
    its oldest token. Of that age w - v steps passed in flight, where version w sampled the last
    token of its response, and the others while the complete response waited. Observations, which
    nobody sampled, do not count.
    """
    # tokens by steps; of the last column: above max_staleness
    counts = np.zeros((len(_SHARES), max_staleness + 2), np.int64)
    oldest = []
    columns = zip(samples.fields[VERSION], samples.response_mask, strict=True)
    for version, mask in columns:
        versions = np.broadcast_to(version, mask.shape)[mask]
        if not versions.size:
            continue
        ages, waiting = step - 1 - versions, step - 1 - versions[-1]
        parts = (ages, ages - waiting, np.full_like(ages, waiting))
        for count, part in zip(counts, parts, strict=True):
            count += np.bincount(np.clip(part, 0, max_staleness + 1), minlength=len(count))
        oldest.append(ages.max())
    totals = processes.all_gather_ints(counts).sum(axis=0)
    ages = np.concatenate(processes.all_gather_ragged(np.array(oldest, np.int64)))
    metrics = summarize("training/off_policy/trajectory_staleness", ages.astype(np.float64))
    for share, total in zip(_SHARES, totals, strict=True):
        tokens = max(1, int(total.sum()))
        for steps, n in enumerate(total[:-1]):
            metrics[f"training/off_policy/{share}/{steps}"] = float(n / tokens)
    return metrics


class Gap(NamedTuple):
    """A gap of log-probs between the trainer and the sampler."""

    mean: float  # of its size over tokens, nats
    tokens: int


Gaps = Mapping[int, Gap]  # of the responses to prompts, by the prompt's counter


def mean_gap(gaps: Sequence[Gap]) -> float:
    """The mean over the tokens of several gaps, nats per token."""
    return sum(gap.mean * gap.tokens for gap in gaps) / max(1, sum(gap.tokens for gap in gaps))


def take_gaps(metrics: dict[str, Any], table: StepTable) -> Gaps:
    """Takes the arrays of groups [G] out of the metrics, as the gaps of their prompts.

    `table`: of the step; a prompt that no update has told apart is left out.
    """
    arrays = {name: metrics.pop(name) for name in list(metrics) if name.endswith(OF_GROUP)}
    gaps = [(arrays[n], arrays[n.replace(_GAP, _ITS_TOKENS)]) for n in arrays if _GAP in n]
    counters, group = np.unique(table.counter, return_inverse=True)
    lengths = np.bincount(group, table.response)
    found: dict[int, Gap] = {}
    for gap, tokens in gaps:
        for counter, total, share, length in zip(counters, gap, tokens, lengths, strict=False):
            if share:
                found[int(counter)] = Gap(float(total / share), int(length))
    return found


def means_by_age(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, with means over the tokens of each age in place of parts of the whole mean.

    An update tells `.../rollout_corr/NAME/AGE`, what these tokens have of the mean, beside
    `.../rollout_corr/tokens_of_age/AGE`, their share of the tokens. An age that no token has is
    left out.
    """
    found = dict(metrics)
    for key in [key for key in metrics if _OF_AGE.fullmatch(key)]:
        prefix, name, age = _OF_AGE.fullmatch(key).groups()
        value, share = found.pop(key), metrics[f"{prefix}{TOKENS_OF_AGE}/{age}"]
        if name != TOKENS_OF_AGE and share:
            found[key] = value / share
    return found


def means_by_label(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, with means over the responses of each label in place of parts of the whole mean.

    KTO's update tells `rewards/LABEL` and `logps/LABEL`, what these responses have of the mean,
    beside `kto/LABEL_share`. A label that no response has is left out; with both there are margins.
    """
    found = dict(metrics)
    for key in filter(_SHARE_OF_LABEL.fullmatch, metrics):
        prefix, label = _SHARE_OF_LABEL.fullmatch(key).groups()
        for name in (f"{prefix}rewards/{label}", f"{prefix}logps/{label}"):
            value = found.pop(name)
            if metrics[key]:
                found[name] = value / metrics[key]
        chosen, rejected = (found.get(f"{prefix}rewards/{x}") for x in ("chosen", "rejected"))
        if label == "rejected" and None not in (chosen, rejected):
            found[f"{prefix}rewards/margins"] = chosen - rejected
    return found
