"""Reward: a score for every response, from functions in the reward pool."""

import numpy as np

from distflow_jax.rewards.pool import RewardRequest
from distflow_jax.stages.context import Stage, StageContext


def build_reward(context: StageContext) -> Stage:
    """prompt, response, finished -> score, float32 [N]."""
    pool, tokenizer = context.rewards, context.tokenizer

    def reward(state, fields, options):
        requests = [
            RewardRequest(
                data_source=prompt.data_source,
                solution=tokenizer.decode(response),
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
                prompt=prompt.text,
                response_length=len(response),
            )
            for prompt, response in zip(fields["prompt"], fields["response"], strict=True)
        ]
        results = pool.score(requests)
        pool.check_error_rate(results)
        timeouts = sum(r.error == "timeout" for r in results)
        errors = sum(r.error is not None for r in results) - timeouts
        metrics = {"reward/errors": errors, "reward/timeouts": timeouts}
        return state, {"score": np.array([r.score for r in results], np.float32)}, metrics

    return reward
