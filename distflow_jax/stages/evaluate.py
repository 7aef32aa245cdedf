"""Evaluation: accuracy of the sampler's weights on a held-out set.

P prompts of this process, n samples per prompt.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.cluster import processes
from distflow_jax.environments.episodes import Episode
from distflow_jax.environments.registry import Environments
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rewards.answers.final_answer import final_answer
from distflow_jax.rewards.pool import FailedRewards, RewardPool, failures
from distflow_jax.rewards.prompt_requests import request_for
from distflow_jax.rewards.records import RewardResult
from distflow_jax.rewards.registry import REWARDS, same_answers
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, Response, SamplingParams
from distflow_jax.rollout.sampler import SamplerState

# uids of evaluation lie above those of any training run, so that their noise is another one
FIRST_COUNTER = 1 << 30
EVALUATED = "val-"  # how the names of an evaluation's metrics begin


@dataclasses.dataclass(frozen=True)
class Scored:
    """One prompt with its n responses: texts, scores, tokens, and whether each ended by itself.

    A score is NaN where the function gave none. `votes` are equal for equal answers. `rewards` are
    the results that scores are made of, with their errors.
    """

    prompt: Prompt
    texts: list[str]
    votes: list[Hashable]
    scores: list[float]
    lengths: list[int]
    finished: list[bool]
    rewards: list[RewardResult]


def vote(
    texts: Sequence[str], scores: Sequence[float], votes: Sequence[Hashable] | None = None
) -> float:
    """Score of the most frequent answer; the first one wins a tie.

    `votes` are equal for responses with equal answers; None: their answers are those of
    `final_answer`, or the whole text where there is none, and those that `math` takes for the same
    are equal.
    """
    if votes is None:
        answers = tuple(final_answer(text) or text for text in texts)
        votes = same_answers(REWARDS["math"], answers)
    winner, _ = collections.Counter(votes).most_common(1)[0]
    return scores[list(votes).index(winner)]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluation of one process's sampler, which may be repeated: `answer`, then `score`.

    All processes of a sampler have the same prompts, and each its own slice of them. With
    `environments` a response has several turns, and its score contains their rewards. Without an
    engine workers answer its requests (requests_of).
    """

    engine: RolloutEngine | None
    tokenizer: Tokenizer
    rewards: RewardPool
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    own: slice
    environments: Environments | None = None

    def answer(
        self, state: SamplerState, on_response: Callable[[Response], None] | None = None
    ) -> tuple[SamplerState, list[Episode]]:
        """Samples responses to all prompts, ordered by (prompt, sample). `state`: donated.

        `on_response` is called as soon as a response ends.
        """
        state, episodes, _ = sample_episodes(
            self.engine,
            state,
            _numbered(self.prompts),
            self.sampling,
            self.environments,
            on_response=on_response,
        )
        return state, episodes

    def score(self, episodes: Sequence[Episode]) -> list[Scored]:
        """Scores the responses to this process's own prompts, those to each one together."""
        n, mine = self.sampling.num_samples, self.prompts[self.own]
        own = {FIRST_COUNTER + prompt.counter: prompt for prompt in mine}
        episodes = [e for e in episodes if e.response.prompt.counter in own]
        texts = [self.tokenizer.decode(e.response.tokens) for e in episodes]
        results = self.rewards.score(
            [
                request_for(e.response.prompt, text, e.response.tokens)
                for e, text in zip(episodes, texts, strict=True)
            ]
        )
        scores = [r.score + e.reward for r, e in zip(results, episodes, strict=True)]
        lengths = [len(e.response.tokens) for e in episodes]
        finished = [bool(e.response.finished) for e in episodes]
        answers = [r.answer or text for r, text in zip(results, texts, strict=True)]
        groups = [answers[i : i + n] for i in range(0, len(answers), n)]
        votes = [key for group in self.rewards.equal_answers(groups) for key in group]
        columns = (texts, votes, scores, lengths, finished, results)
        answered = [own[e.response.prompt.counter] for e in episodes[::n]]
        return [
            Scored(prompt, *(column[i * n : (i + 1) * n] for column in columns))
            for i, prompt in enumerate(answered)
        ]


def requests_of(evaluation: Evaluation, version: int) -> list[GroupRequest]:
    """The requests of an evaluation, which the weights of one version alone may answer."""
    prompts, sampling = _numbered(evaluation.prompts), evaluation.sampling
    return [GroupRequest(p, sampling, turn=version, version=version) for p in prompts]


def _numbered(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [dataclasses.replace(p, counter=FIRST_COUNTER + p.counter) for p in prompts]


def validation_metrics(
    scored: Sequence[Scored], num_samples: int, pool: RewardPool
) -> dict[str, float]:
    """verl's names, over the prompts of all processes: every process gets the same numbers.

    val-core/{data_source}/reward/{mean@N, best@N/mean, maj@N/mean}, the number of prompts, the
    standard error of mean@N over the prompts, and the numbers of rewards that failed. Responses
    without a score are left out. Raises FailedRewards on all processes alike, as the `pool` that
    made the rewards does for those of a step: if too many failed, or none is a score.
    """
    n = num_samples
    local = collections.defaultdict(list)
    for s in scored:
        rated = [i for i, score in enumerate(s.scores) if not np.isnan(score)]
        if rated:
            texts, votes, scores = ([x[i] for i in rated] for x in (s.texts, s.votes, s.scores))
            majority = vote(texts, scores, votes)
            found = (s.prompt.counter, float(np.mean(scores)), max(scores), majority)
            local[s.prompt.data_source].append(found)
    failed = _failed_rewards(scored, pool)
    metrics: dict[str, float] = {}
    for name in sorted(failed.keys() - {""}):
        rows = np.array(local.get(name, []), np.float64).reshape(-1, 4)
        values = np.concatenate(processes.all_gather_ragged(rows))
        if not len(values):
            metrics |= failed[name]
            continue
        values = values[np.argsort(values[:, 0]), 1:]  # no bit depends on who has which
        mean, best, majority = values.mean(axis=0)
        prefix = f"val-core/{name}/reward"
        metrics |= {
            f"{prefix}/mean@{n}": float(mean),
            f"val-aux/{name}/num_prompts": len(values),
            f"val-aux/{name}/reward/stderr@{n}": float(
                values[:, 0].std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
            ),
        }
        if n > 1:
            metrics |= {
                f"{prefix}/best@{n}/mean": float(best),
                f"{prefix}/maj@{n}/mean": float(majority),
            }
        metrics |= failed[name]
    return metrics


def _failed_rewards(scored: Sequence[Scored], pool: RewardPool) -> dict[str, dict[str, int]]:
    """{data source: metrics of its rewards that failed}, of all processes; raises if too many."""
    results = collections.defaultdict(list)
    for s in scored:
        results[s.prompt.data_source] += s.rewards
    counts = {name: failures(given) for name, given in results.items()}
    counted = [one for theirs in processes.all_gather_json(counts) for one in theirs.items()]
    errors, timeouts = collections.Counter(), collections.Counter()
    for name, part in counted:
        errors[name] += part["failed"] - part["timeouts"]
        timeouts[name] += part["timeouts"]
    of = "val-aux/{}/reward/{}".format
    found = {n: {of(n, "errors"): errors[n], of(n, "timeouts"): timeouts[n]} for n in errors}
    try:
        pool.check_error_rate([part for _, part in counted])
    except FailedRewards as error:
        error.metrics = {name: count for each in found.values() for name, count in each.items()}
        raise
    return found
