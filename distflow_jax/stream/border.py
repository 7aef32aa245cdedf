"""The border of a run: what workers send is looked at here, once, before any of it counts.

A worker proves the run's token, and may still be wrong: of other code, damaged, or hostile. What is
refused costs its worker, never a prompt's try: it is named in the log, and a worker of which too
much was refused is ended.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import REASONS, Episode
from distflow_jax.layout import Parts
from distflow_jax.rollout.requests import GroupRequest, Partial
from distflow_jax.rollout.response_checks import (
    RefusedAnswer,
    ResponseLimits,
    check_columns,
    check_experts,
    check_logp,
    check_tokens,
    check_vocabulary,
)
from distflow_jax.stream.saved_samples import INDEX
from distflow_jax.stream.tasks import Key

MOST_REFUSED = 3  # results of a worker, after which it is ended
MOST_CALLS = 1 << 20  # decode calls between two words of a worker
_MOST = np.iinfo(np.int32).max
_FORMS = {  # dtype and dims of the arrays of samples
    "index": (np.dtype(np.int64), 2),
    "tokens": (np.dtype(np.int32), 1),
    "logp": (np.dtype(np.float32), 1),
    "margin": (np.dtype(np.float32), 1),
    "version": (np.dtype(np.int32), 1),
    "mask": (np.dtype(bool), 1),
    "fed": (np.dtype(np.int32), 1),
    "reward": (np.dtype(np.float64), 1),
    "logged": (np.dtype(np.uint8), 1),
}
_RANGES = {  # of columns of the index
    "counter": (0, np.iinfo(np.int64).max),
    "node": (0, _MOST),
    "sample": (0, _MOST),
    "tokens": (0, _MOST),
    "fed": (0, _MOST),
    "experts": (-1, _MOST),
    "ended": (0, 1),
    "finished": (0, 1),
    "turns": (0, _MOST),
    "reason": (0, len(REASONS) - 1),
}
MOST_LOGGED = 64  # numbers that an environment may have logged for a response


@dataclasses.dataclass(frozen=True)
class Border:
    """The checks of a run."""

    limits: ResponseLimits

    def check(
        self, found: Mapping[Key, Progress], requests: Mapping[Key, GroupRequest], newest: int
    ) -> None:
        """Raises RefusedAnswer, with the response, for samples that no worker can have made.

        `newest`: version of the weights that workers can get.
        """
        for key, progress in found.items():
            request = requests[key]
            episodes = progress.episodes.items()
            partials = {partial.sample: partial for partial in progress.partials}
            if len(partials) < len(progress.partials) or partials.keys() & progress.episodes.keys():
                raise RefusedAnswer(f"two results of one response to prompt {key[0]}")
            checks = [(s, functools.partial(self._check_episode, e)) for s, e in episodes]
            checks += [(s, functools.partial(self._check_partial, p)) for s, p in partials.items()]
            for sample, check in checks:
                try:
                    check(request, newest)
                except RefusedAnswer as error:
                    raise RefusedAnswer(f"response {sample} to prompt {key[0]}: {error}") from error

    def _check_episode(self, episode: Episode, request: GroupRequest, newest: int) -> None:
        response, limits, limit = episode.response, self.limits, request.sampling.limit
        check_columns(response, episode.mask)
        check_experts(response, limits, len(request.prompt.tokens))
        check_versions(response.version[episode.mask], newest)
        if not 0 <= episode.turns <= max(1, len(episode.mask)):
            raise RefusedAnswer(f"{episode.turns} turns of {len(episode.mask)} tokens")
        if limits.in_turns:
            if len(response.tokens) > limit:
                raise RefusedAnswer(f"{len(response.tokens)} tokens, of {limit} at most")
            check_vocabulary(response.tokens, limits)
            _check_turns(episode)
        else:
            if not episode.mask.all():
                raise RefusedAnswer("tokens that were not sampled, and there is no environment")
            if response.shown is not None:
                raise RefusedAnswer("images, and there is no environment that shows some")
            check_tokens(response.tokens, limits, limit, ended=response.finished)
        check_logp(response.logp)

    def _check_partial(self, partial: Partial, request: GroupRequest, newest: int) -> None:
        limits = self.limits
        response, sampled = partial.response(frozenset()), len(partial.fed)
        if limits.in_turns or partial.shown is not None:
            raise RefusedAnswer("a response under way, and those in turns come whole")
        if sampled:
            raise RefusedAnswer("tokens that were not sampled, and there is no environment")
        check_columns(response, np.ones(len(response.tokens), bool))
        check_versions(response.version, newest)
        check_tokens(response.tokens, limits, request.sampling.limit, ended=None)
        check_logp(response.logp)


def check_arrays(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Raises RefusedAnswer for arrays of samples, of any shape, in another form than those of
    saved_samples.py."""
    nodes = facts.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise RefusedAnswer(f"nodes {nodes!r:.80}, where names are wanted")
    for name, (dtype, ndim) in _FORMS.items():
        if name not in arrays:
            raise RefusedAnswer(f"no array {name!r}")
        if arrays[name].dtype != dtype or arrays[name].ndim != ndim:
            kind = f"{arrays[name].dtype}{list(arrays[name].shape)}"
            raise RefusedAnswer(f"{name} as {kind}, where {dtype} of {ndim} dims is wanted")
    index = arrays["index"]
    if index.shape[1] != len(INDEX):
        raise RefusedAnswer(f"an index of {index.shape[1]} columns, {len(INDEX)} are wanted")
    for name, (least, most) in _RANGES.items():
        column = index[:, INDEX.index(name)]
        if column.size and not least <= column.min() <= column.max() <= most:
            raise RefusedAnswer(f"{name} from {column.min()} to {column.max()} in the index")


def check_versions(version: np.ndarray, newest: int) -> None:
    """Raises RefusedAnswer for versions, int [T], that nobody has published."""
    wrong = version[(version < 0) | (version > newest)]
    if len(wrong):
        raise RefusedAnswer(f"a token of version {wrong[0]}, and {newest} is the newest")


def check_calls(calls: Any) -> int:
    """The decode calls that a worker counts since its last word; RefusedAnswer for others."""
    if type(calls) is not int or not 0 <= calls <= MOST_CALLS:
        raise RefusedAnswer(f"{calls!r:.40} decode calls since its last word")
    return calls


def check_values(names: Collection[str], values: Collection[Any]) -> None:
    """Raises RefusedAnswer for a column of a node that is no numbers; not a number is one."""
    for name, value in zip(names, values, strict=True):
        for entry in [value] if isinstance(value, np.ndarray) else value:
            if np.asarray(entry).dtype.kind not in "biuf":
                raise RefusedAnswer(f"{name} of type {np.asarray(entry).dtype}")


def check_numbers(numbers: Mapping[str, Any]) -> None:
    """Raises RefusedAnswer for metrics that are no finite numbers."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedAnswer(f"the metric {name!r} is a {type(value).__name__}")
        if not math.isfinite(value):
            raise RefusedAnswer(f"the metric {name!r} is {value}")


def check_parts(found: Mapping[str, list[Any]], of_none: Mapping[str, Parts]) -> None:
    """Raises RefusedAnswer for metrics in parts that have another form than those of no response,
    by which they are merged."""
    for name, values in found.items():
        if name not in of_none or not all(_alike(of_none[name].values[0], v) for v in values):
            raise RefusedAnswer(f"the metric {name!r} in other parts than this node has")


def _alike(one: Any, other: Any) -> bool:
    """Whether two JSON values have one form: numbers, texts, lists of one length, dicts of the same
    keys; an empty dict has that of any ratios, (numerator, denominator) by name."""
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping):
            return False
        if not one:
            return all(_alike((0, 0), ratio) for ratio in other.values())
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        if not isinstance(other, list | tuple) or len(one) != len(other):
            return False
        return all(map(_alike, one, other))
    return isinstance(other, str) if isinstance(one, str) else _is_number(other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_turns(episode: Episode) -> None:
    """Raises RefusedAnswer for a response in turns that no environment has answered."""
    response, mask = episode.response, episode.mask
    if math.isinf(episode.reward):
        raise RefusedAnswer(f"the reward {episode.reward}")
    if np.any(response.logp[~mask]):
        raise RefusedAnswer("log-probs of tokens that were not sampled")
    if episode.reason != "failed" and not mask.any():
        raise RefusedAnswer("no sampled token")
    if len(episode.logged) > MOST_LOGGED:
        raise RefusedAnswer(f"{len(episode.logged)} numbers that an environment logged")
    check_numbers(episode.logged)
