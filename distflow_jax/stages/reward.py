"""Reward: a score for every response, from functions in the reward pool; and ages of tokens.

N responses of this process, T tokens of one.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from distflow_jax.algorithms.correction import a3po_alpha
from distflow_jax.batch import Prompt
from distflow_jax.config.algorithm_tables import A3PO
from distflow_jax.config.data_config import RewardConfig
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import STEP, VERSION, Parts
from distflow_jax.observe.metrics import merge
from distflow_jax.rewards.pool import failures
from distflow_jax.rewards.prompt_requests import request_for
from distflow_jax.rewards.records import RewardRequest, RewardResult
from distflow_jax.rollout.requests import Response
from distflow_jax.stages.stage_context import ComputeContext


def build_reward(context: ComputeContext) -> Stage:
    """uid, prompt, response -> score, and unshaped_score if the node writes it; float32 [N].

    The score of a response that the function left out is NaN.

    What environments gave, environment_reward float32 [N], is added where the node reads it.

    Where the plan allows it, each response is given to the pool as soon as its last token is
    sampled, while others are still being decoded. The length penalty of `reward.overlong_*` is part
    of the score, not of unshaped_score. Evaluation leaves it out.
    """
    config, pool, node = context.reward, context.rewards, context.node
    limit = context.max_response_length
    early: dict[tuple[int, int], Future[RewardResult]] = {}

    def request(prompt: Prompt, tokens: np.ndarray) -> RewardRequest:
        step = prompt.counter // context.prompts_per_step
        return request_for(prompt, context.tokenizer.decode(tokens), tokens, step)

    def begin(response: Response) -> None:
        ended = context.waiting("score")
        future = pool.submit(request(response.prompt, response.tokens))
        future.add_done_callback(lambda _: ended())
        early[response.prompt.counter, response.sample] = future

    if context.early_rewards and pool.one_by_one:
        context.on_response.add(begin)

    def reward(state, fields, options):
        prompts, responses = fields["prompt"], fields["response"]
        uids = map(tuple, fields["uid"].tolist())
        begun = [early.pop(uid, None) for uid in uids]
        # of a group that goes on after a restart some responses had ended before
        missing = [i for i, future in enumerate(begun) if future is None]
        scored = pool.score([request(prompts[i], responses[i]) for i in missing])
        found = dict(zip(missing, scored, strict=True))
        results = [
            found[i] if future is None else future.result() for i, future in enumerate(begun)
        ]
        score_N = np.array([result.score for result in results], np.float32)
        numbers = [result.logged for result in results]
        if "environment_reward" in fields:
            given_N = np.asarray(fields["environment_reward"], np.float32)
            score_N += given_N
            numbers += [{"environment": float(given)} for given in given_N]
        unshaped_N = score_N.copy()
        if config.overlong_buffer:
            penalty_N = overlong_penalty(
                np.array([len(response) for response in responses]),
                max_response_length=limit,
                buffer=overlong_tokens(config, limit),
                factor=config.overlong_penalty,
                cap=config.overlong_cap,
            )
            score_N += penalty_N
            numbers += [{"overlong_penalty": float(penalty)} for penalty in penalty_N]
        written = {"score": score_N, "unshaped_score": unshaped_N}
        parts = Parts(((_sums(numbers), failures(results)),), merged)
        return (
            state,
            {name: written[name] for name in node.writes},
            {node.id: parts},
        )

    def merged(parts: Sequence[Any]) -> dict[str, float]:
        means = merge(part[0] for part in parts)
        metrics = {f"reward/{name}": mean for name, mean in means.items()}
        metrics |= pool.check_error_rate([part[1] for part in parts])
        return {f"{context.prefix}{name}": value for name, value in metrics.items()}

    return reward


def _sums(numbers: Sequence[dict[str, float]]) -> dict[str, tuple[float, int]]:
    """(sum, count) of each number; a function may return other numbers for other rows.

    NaN and infinity are left out: one of them would be all that is left of the others.
    """
    sums: dict[str, tuple[float, int]] = {}
    for entry in numbers:
        for name, value in entry.items():
            if not math.isfinite(value):
                continue
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + value, count + 1
    return sums


def overlong_tokens(config: RewardConfig, limit: int) -> int:
    """`overlong_buffer` in tokens, for responses of at most `limit` tokens."""
    share = 0 < config.overlong_buffer < 1
    return max(1, round(config.overlong_buffer * limit)) if share else int(config.overlong_buffer)


def overlong_penalty(
    response_length_N: np.ndarray,
    *,
    max_response_length: int,
    buffer: int,
    factor: float = 1.0,
    cap: bool = False,
) -> np.ndarray:
    """Soft penalty of long responses: min(-(len - (Lmax - buffer)) / buffer * factor, 0).

    Yu et al. 2025 (DAPO), arxiv.org/abs/2503.14476, eq. 13. It starts `buffer` tokens before the
    limit and reaches -factor at the limit.

    Args:
      response_length_N: int [N], tokens of each response.
      max_response_length: Lmax, tokens.
      buffer: tokens before Lmax in which the penalty grows, from 1 to Lmax.
      factor: penalty at Lmax.
      cap: clip the penalty at -1.

    Returns:
      float32 [N], to be added to the scores.
    """
    over_N = np.asarray(response_length_N, np.float64) - (max_response_length - buffer)
    penalty_N = np.minimum(-over_N / buffer * factor, 0.0)
    return np.maximum(penalty_N, -1.0 if cap else -np.inf).astype(np.float32)


def build_token_age(context: ComputeContext) -> Stage:
    """version, int32 [T] each, and step, int64 [N] -> age, and prox_alpha if the node writes it;
    float32 [T] each.

    A token that step s trains was sampled by version v at age s - 1 - v. prox_alpha is the weight
    of the policy that is being trained in the proximal one (correction.a3po_alpha).
    """
    node, proximal_age = context.node, A3PO.get(context.algorithm.proximal, 0)

    def token_age(state, fields, options):
        ages = [
            np.asarray(step - 1 - version, np.float32)
            for version, step in zip(fields[VERSION], fields[STEP], strict=True)
        ]
        written = {"age": ages, "prox_alpha": [a3po_alpha(age, proximal_age) for age in ages]}
        return state, {name: written[name] for name in node.writes}, {}

    return token_age
