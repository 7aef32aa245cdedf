"""Evaluation: accuracy of the sampler's weights on a held-out set.

P prompts of this process, n samples per prompt.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.data.step_columns import entries_of_host, uid_column
from distflow_jax.environments.multiturn import TurnLimits, respond_in_turns
from distflow_jax.environments.registry import Environments
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.parallel import processes
from distflow_jax.rewards.gsm8k import last_number
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rewards.prompt_requests import request_for
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.sampler import RolloutConfig, SamplerState, respond

# uids of evaluation lie above those of any training run, so that their noise is another one
_FIRST_COUNTER = 1 << 30


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What is evaluated, and when."""

    dataset: str = ""  # as data.train; "": no evaluation
    every: int = 0  # steps between evaluations; 0: only the untrained weights and the last ones
    num_prompts: int = 128  # the first so many of the data set; 0: all
    num_samples: int = 1  # N of mean@N, best@N and maj@N
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    max_response_length: int = 0  # tokens; 0: as rollout.max_response_length

    def __post_init__(self):
        for name in ("every", "num_prompts", "temperature", "max_response_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"eval.{name} must not be negative, got {getattr(self, name)}")
        if self.num_samples < 1:
            raise ValueError(f"eval.num_samples must be at least 1, got {self.num_samples}")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.num_samples={self.num_samples} needs eval.temperature above 0: greedy "
                "responses to one prompt are all the same"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"eval.top_p must be in (0, 1], got {self.top_p}")


@dataclasses.dataclass(frozen=True)
class Scored:
    """One prompt with its n responses."""

    prompt: Prompt
    texts: list[str]
    scores: list[float]


def vote(texts: Sequence[str], scores: Sequence[float]) -> float:
    """Score of the most frequent answer; the first one wins a tie.

    The answer is the last number of a response, or the whole text where there is none.
    """
    answers = [last_number(t, "flexible") or t.strip().casefold() for t in texts]
    winner, _ = collections.Counter(answers).most_common(1)[0]
    return scores[answers.index(winner)]


def evaluate(
    engine: RolloutEngine,
    state: SamplerState,
    tokenizer: Tokenizer,
    rewards: RewardPool,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    *,
    limit: int,
    member: int = 0,
    hosts: int = 1,
    environments: Environments | None = None,
    rollout: RolloutConfig | None = None,
) -> tuple[SamplerState, list[Scored]]:
    """Samples the prompts, and scores those that this process answers for.

    All `hosts` processes of a sampler are given the same prompts; `member` is one's number. With
    `environments` responses are in turns, under the limits of `rollout`, and what the environments
    give is part of the score.
    """
    shifted = [dataclasses.replace(p, counter=_FIRST_COUNTER + p.counter) for p in prompts]
    limit = config.max_response_length or limit
    sampling = {
        "num_samples": config.num_samples,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "record": False,  # nobody trains on it
    }
    if environments is None:
        state, responses, _ = respond(engine, state, shifted, limit=limit, **sampling)
        given = [0.0] * len(responses)
    else:
        limits = TurnLimits.of(rollout, limit)
        state, episodes, _ = respond_in_turns(
            engine, state, shifted, environments, limits, **sampling
        )
        responses, given = [e.response for e in episodes], [e.reward for e in episodes]
    n = config.num_samples
    own = entries_of_host(uid_column(shifted, n), member, hosts)
    prompts = prompts[own.start // n : own.stop // n]
    responses, given = responses[own], given[own]
    texts = [tokenizer.decode(r.tokens) for r in responses]
    results = rewards.score(
        [
            request_for(r.prompt, text, len(r.tokens))
            for r, text in zip(responses, texts, strict=True)
        ]
    )
    scored = []
    for i, prompt in enumerate(prompts):
        span = slice(i * n, (i + 1) * n)
        scores = [r.score + more for r, more in zip(results[span], given[span], strict=True)]
        scored.append(Scored(prompt, texts[span], scores))
    return state, scored


def validation_metrics(scored: Sequence[Scored], num_samples: int) -> dict[str, float]:
    """verl's names, over the prompts of all processes: every process gets the same numbers.

    val-core/{data_source}/reward/{mean@N, best@N/mean, maj@N/mean}, the number of prompts, and the
    standard error of mean@N over the prompts.
    """
    n = num_samples
    local = collections.defaultdict(list)
    for s in scored:
        local[s.prompt.data_source].append(
            (float(np.mean(s.scores)), max(s.scores), vote(s.texts, s.scores))
        )
    names = sorted(
        {x for text in processes.all_gather_text("\n".join(local)) for x in text.split("\n") if x}
    )
    metrics: dict[str, float] = {}
    for name in names:
        rows = np.array(local.get(name, []), np.float64).reshape(-1, 3)
        counts = processes.all_gather_ints(np.array(len(rows)))
        padded = np.zeros((int(counts.max()), 3))
        padded[: len(rows)] = rows
        table = processes.all_gather_ints(padded)
        values = np.concatenate([t[:c] for t, c in zip(table, counts, strict=True)])
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
    return metrics


def records(scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """One JSON-able record per prompt."""
    return [
        {
            "row": s.prompt.row,
            "data_source": s.prompt.data_source,
            "prompt": s.prompt.text,
            "ground_truth": s.prompt.ground_truth,
            "responses": s.texts,
            "scores": s.scores,
        }
        for s in scored
    ]
