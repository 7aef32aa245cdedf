"""Validation of everything that workers send, once, before it counts.

A worker that has proved the run's token may still be wrong: it may run other code, be damaged, or
be hostile. A refused result is logged with the worker's name and never counts as a try of its
prompt. A worker with too many refused results is ended.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import REASONS, Episode, single_turn
from distflow_jax.images.record_checks import check_shown
from distflow_jax.layout import OF_LOOP, Parts
from distflow_jax.rewards.records import MOST_SCORE
from distflow_jax.rollout.occupancy import Occupancy
from distflow_jax.rollout.requests import GroupRequest, Partial, Response
from distflow_jax.rollout.response_checks import (
    RefusedAnswer,
    ResponseLimits,
    check_columns,
    check_experts,
    check_logp,
    check_response,
    check_versions,
    check_vocabulary,
)
from distflow_jax.stream.saved_samples import DTYPES, IMAGE_BYTES, IMAGE_DTYPES, IMAGES, INDEX
from distflow_jax.stream.tasks import Key

MOST_SPENT = 1 << 30  # decode calls, or seconds of slots, between two words of a worker
MOST_RESPONSES = 1 << 16  # in a frame
LOGGED_BYTES = 16 << 20  # of the metrics of all responses in a frame
_MOST = np.iinfo(np.int32).max
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
MOST_NUMBERS = 500  # metrics of a response's environment, or of a node
MOST_NAME = 200  # characters of a metric's name


def check_samples(
    found: Mapping[Key, Progress],
    requests: Mapping[Key, GroupRequest],
    limits: ResponseLimits,
    newest: int,
) -> None:
    """Raises RefusedAnswer, with the response, for samples that no worker can have made.

    `newest`: version of the weights that workers can get.
    """
    for key, progress in found.items():
        checks = [(s, _check_episode, e) for s, e in progress.episodes.items()]
        checks += [(p.sample, _check_partial, p) for p in progress.partials]
        for sample, check, content in checks:
            try:
                check(content, limits, requests[key], newest)
            except ValueError as error:
                raise RefusedAnswer(f"response {sample} to prompt {key[0]}: {error}") from error


def check_arrays(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Raises RefusedAnswer for arrays of samples, of any shape, in another form than those of
    saved_samples.py."""
    nodes = facts.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise RefusedAnswer(f"nodes {nodes!r:.80}, where names are wanted")
    images = IMAGE_DTYPES if facts.get(IMAGES) else {}
    dtypes = DTYPES | images
    if missing := sorted({*dtypes, "experts"} - arrays.keys()):
        raise RefusedAnswer(f"no array {missing[0]!r}")
    for name, dtype in dtypes.items():
        array, ndim = arrays[name], 2 if name == "index" else 1
        if array.dtype != dtype or array.ndim != ndim:
            kind = f"{array.dtype}{list(array.shape)}"
            wanted = f"{np.dtype(dtype)} of {ndim} dims"
            raise RefusedAnswer(f"{name} as {kind}, where {wanted} is wanted")
    if images:
        size, lengths = len(arrays[IMAGES]), arrays[IMAGE_BYTES]
        if not all(0 <= n <= size for n in lengths) or lengths.sum() != size:
            raise RefusedAnswer(f"images of {size} bytes, of which no response has some")
    index = arrays["index"]
    if index.shape[1] != len(INDEX):
        raise RefusedAnswer(f"an index of {index.shape[1]} columns, {len(INDEX)} are wanted")
    if len(index) > MOST_RESPONSES:
        raise RefusedAnswer(f"{len(index)} responses in a frame, of {MOST_RESPONSES} at most")
    columns = {name: index[:, place] for place, name in enumerate(INDEX)}
    for name, (least, most) in _RANGES.items():
        column = columns[name]
        if column.size and not least <= column.min() <= column.max() <= most:
            raise RefusedAnswer(f"{name} from {column.min()} to {column.max()} in the index")
    _check_sizes(columns, arrays)
    _check_logged(arrays["logged"], len(index))


def _check_sizes(columns: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> None:
    """Raises RefusedAnswer for arrays with more or fewer entries than the index says."""
    rows = len(columns["tokens"])
    wanted = dict.fromkeys(("logp", "margin", "version", "mask", "tokens"), columns["tokens"].sum())
    wanted |= {name: np.maximum(columns[name], 0).sum() for name in ("fed", "experts")}
    wanted |= {"reward": rows}
    if (sizes := arrays.get(IMAGE_BYTES)) is not None and IMAGES in arrays:
        wanted |= {IMAGE_BYTES: rows, IMAGES: np.maximum(sizes, 0).sum()}
    for name, count in wanted.items():
        found = len(arrays[name]) if arrays[name].ndim else 1
        if found != count:
            raise RefusedAnswer(f"{found} entries of {name}, and the index has {count} of them")


def _check_logged(text: np.ndarray, rows: int) -> None:
    """Raises RefusedAnswer for other text, uint8 [n], than a list of metrics by name of each
    sample."""
    if len(text) > LOGGED_BYTES:
        raise RefusedAnswer(f"logged {len(text)} bytes, of {LOGGED_BYTES} at most")
    try:
        found = json.loads(text.tobytes())
    except (ValueError, RecursionError) as error:
        raise RefusedAnswer(f"logged {text.tobytes()!r:.80}, which is no JSON") from error
    if (
        not isinstance(found, list)
        or len(found) != rows
        or not all(isinstance(one, dict) for one in found)
    ):
        raise RefusedAnswer(f"logged {found!r:.80}, where metrics of {rows} samples are wanted")


def check_index(
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    keys: Collection[Key],
    requests: Mapping[Key, GroupRequest],
) -> None:
    """Raises RefusedAnswer for samples, rows of the index [N, columns], of other groups than the
    frame's `keys`, or that `requests`, those of them which are open, do not ask for."""
    known: set[tuple[Key, int]] = set()
    named = frozenset(keys)
    for row in arrays["index"].tolist():
        counter, node, sample, tokens, fed, _, ended, *_ = row
        key = (counter, facts["nodes"][node] if node < len(facts["nodes"]) else "")
        if key not in named:
            raise RefusedAnswer(
                f"a response to prompt {counter} of node {node}, and the frame is of {keys!r:.80}"
            )
        if key not in requests:
            continue  # nobody waits for it any more
        if (key, sample) in known:
            raise RefusedAnswer(f"two results of response {sample} to prompt {counter}")
        known.add((key, sample))
        samples, limit = requests[key].samples, requests[key].sampling.limit
        if sample not in samples:
            raise RefusedAnswer(
                f"response {sample} to prompt {counter}, of which {len(samples)} are wanted"
            )
        if fed + tokens > limit - (not ended):
            raise RefusedAnswer(
                f"response {sample} to prompt {counter}: {fed + tokens} tokens, where at most "
                f"{limit} were requested"
            )


def check_spent(sums: Any) -> Occupancy:
    """The sums that a worker counts since its last word; RefusedAnswer for others."""
    fits = isinstance(sums, list) and len(sums) == len(Occupancy())
    if not fits or any(type(x) not in (int, float) or not 0 <= x <= MOST_SPENT for x in sums):
        raise RefusedAnswer(f"{sums!r:.200} for what its slots did since its last word")
    return Occupancy(*sums)


def check_values(
    name: str, column: Sequence[Any], shapes: Sequence[tuple[int, ...]] | None
) -> None:
    """Raises RefusedAnswer for a column of a node, an entry per response, that is no numbers which
    a step can use: not a number is one, and says that there is none.

    `shapes`: of the entries; None: they are the node's own choice, but for their dims.
    """
    if len({np.ndim(entry) for entry in column}) > 1:
        raise RefusedAnswer(f"{name} with entries of several dims")
    for place, entry in enumerate(column):
        array = np.asarray(entry)
        if array.dtype.kind not in "biuf":
            raise RefusedAnswer(f"{name} of type {array.dtype}")
        if np.any(np.abs(array.astype(np.float64)) > MOST_SCORE):
            raise RefusedAnswer(f"{name} with the number {array.flat[np.abs(array).argmax()]:g}")
        if shapes is not None and array.shape != shapes[place]:
            raise RefusedAnswer(
                f"{name} of shape {list(array.shape)}, where {list(shapes[place])} is wanted"
            )


def check_numbers(numbers: Mapping[str, Any], taken: Collection[str] = ()) -> None:
    """Raises RefusedAnswer for metrics that are no finite numbers, or that have names of the loop's
    own numbers or which are `taken`, of metrics in parts."""
    if len(numbers) > MOST_NUMBERS:
        raise RefusedAnswer(f"{len(numbers)} metrics, where at most {MOST_NUMBERS} are taken")
    for name, value in numbers.items():
        if name in taken or len(name) > MOST_NAME or OF_LOOP.search(name):
            raise RefusedAnswer(f"a metric {name!r:.80}, which no number may be named")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedAnswer(f"the metric {name!r} is {value!r:.40}, which is no number")
        if not math.isfinite(value):
            raise RefusedAnswer(f"the metric {name!r} is {value}")


def check_parts(found: Mapping[str, list[Any]], of_none: Mapping[str, Parts]) -> None:
    """Raises RefusedAnswer for metrics in parts that have another form than those of no response,
    by which they are merged."""
    for name, values in found.items():
        if name not in of_none or not all(_alike(of_none[name].values[0], v) for v in values):
            raise RefusedAnswer(
                f"the metric {name!r} in other parts than this node has: {values!r:.80}"
            )


def _alike(one: Any, other: Any) -> bool:
    """Whether two JSON values have one form: numbers, texts, lists of one length, dicts of the same
    keys; an empty dict has that of any ratios, (numerator, denominator) by name, but for names of
    the loop's own numbers."""
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping):
            return False
        if not one:
            return all(_alike((0, 0), x) and not OF_LOOP.search(name) for name, x in other.items())
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        if not isinstance(other, list | tuple) or len(one) != len(other):
            return False
        return all(map(_alike, one, other))
    return isinstance(other, str) if isinstance(one, str) else _is_number(other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_episode(
    episode: Episode, limits: ResponseLimits, request: GroupRequest, newest: int
) -> None:
    response, limit = episode.response, request.sampling.limit
    check_columns(response, episode.mask)
    experts = limits.experts if request.sampling.record else None
    check_experts(response, experts, len(request.prompt.tokens))
    if limits.max_turns:
        check_logp(response.logp)
        check_versions(response.version[episode.mask], 0, newest)
        _check_turns(episode, limits, limit)
    else:
        _check_response(response, limits, limit, newest, ended=response.finished)
        _check_one_turn(episode)


def _check_partial(
    partial: Partial, limits: ResponseLimits, request: GroupRequest, newest: int
) -> None:
    response, fed = partial.response(frozenset()), len(partial.fed)
    if limits.max_turns or partial.shown is not None:
        raise RefusedAnswer("a response under way, and those in turns come whole")
    if fed:
        raise RefusedAnswer(f"{fed} tokens that were not sampled, and there is no environment")
    check_columns(response, np.ones(len(response.tokens), bool))
    _check_response(response, limits, request.sampling.limit, newest, ended=None)


def _check_response(
    response: Response, limits: ResponseLimits, limit: int, newest: int, *, ended: bool | None
) -> None:
    columns = response.tokens, response.logp, response.version
    check_response(*columns, limits, limit=limit, ended=ended, versions=(0, newest))


def _check_one_turn(episode: Episode) -> None:
    """Raises RefusedAnswer for what an environment alone can have given."""
    response, told = episode.response, (episode.turns, episode.reward, episode.reason)
    if fed := int((~episode.mask).sum()):
        raise RefusedAnswer(f"{fed} tokens that were not sampled, and there is no environment")
    if response.shown is not None:
        raise RefusedAnswer("images, and there is no environment that shows some")
    wanted = single_turn(response)
    if told != (wanted.turns, wanted.reward, wanted.reason) or episode.logged:
        raise RefusedAnswer(f"{told} of turns, reward and reason, and there is no environment")


def _check_turns(episode: Episode, limits: ResponseLimits, limit: int) -> None:
    """Raises ValueError for a response in turns of more than `limit` tokens, or one that no model
    and environment can have made together."""
    response, mask = episode.response, episode.mask
    if len(response.tokens) > limit:
        raise RefusedAnswer(f"{len(response.tokens)} tokens, of {limit} at most")
    check_vocabulary(response.tokens, limits)
    if not mask.any() or not mask[-1]:
        raise RefusedAnswer("no sampled token at the end")
    _check_ends(episode, limits, limits.turn_length or limit)
    if np.any(response.logp[~mask]):
        raise RefusedAnswer("log-probs of tokens that were not sampled")
    if response.shown is not None:
        if limits.images is None:
            raise RefusedAnswer("images, and the model sees none")
        check_shown(response.shown, mask, limits.images)
    unscored = episode.reason == "failed"
    if (
        math.isnan(episode.reward) != unscored
        or abs(episode.reward) > limits.max_turns * MOST_SCORE
    ):
        raise RefusedAnswer(f"the reward {episode.reward} of a response that is {episode.reason}")
    check_numbers(episode.logged)


def _check_ends(episode: Episode, limits: ResponseLimits, most: int) -> None:
    """Raises RefusedAnswer unless each turn, of at most `most` tokens, but a cut one ends with its
    end token."""
    tokens, mask = episode.response.tokens, episode.mask
    places, at = np.flatnonzero(mask), np.isin(tokens, list(limits.stops)) & mask
    ended = bool(at[-1])
    if int(at.sum()) + (not ended) != episode.turns or episode.turns > limits.max_turns:
        raise RefusedAnswer(f"{episode.turns} turns with {at.sum()} end tokens")
    if np.any(mask[:-1] & ~mask[1:] & ~at[:-1]):
        raise RefusedAnswer("an observation within a turn")
    longest = np.diff(np.flatnonzero(at[places]), prepend=-1, append=len(places) - 1).max()
    if longest > most:
        raise RefusedAnswer(f"a turn of {longest} tokens, of {most} at most")
    by_model = {"done": True, "max_turns": True, "turn_length": False}.get(episode.reason, ended)
    if episode.response.finished != (episode.reason == "done") or ended != by_model:
        raise RefusedAnswer(f"a response that is {episode.reason} at token {tokens[-1]}")
