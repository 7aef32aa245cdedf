"""In TRL's forms: conversational completions, columns, None, token ids, and the trainer's state."""

import math
import re


def think_format_reward(completions, **kwargs):
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    contents = [completion[0]["content"] for completion in completions]
    found = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in contents]
    return [1.0 if match else 0.0 for match in found]


def accuracy_reward(completions, solution, log_extra=None, log_metric=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    rewards = [
        None if gold is None else float(content.endswith(gold))
        for content, gold in zip(contents, solution, strict=True)
    ]
    if log_extra:
        log_extra("solution", solution)
        log_extra("characters", [len(content) for content in contents])
    if log_metric:
        log_metric("longest", max(map(len, contents)))
    return rewards


def last_turns(prompts, completions, **kwargs):
    """Of what a conversation ends with: a number for each role."""
    roles = [
        [message["role"] for message in p + c] for p, c in zip(prompts, completions, strict=True)
    ]
    return [float(turns == ["system", "user", "assistant"]) for turns in roles]


async def level_reward(prompts, completions, level, **kwargs):
    return [{"easy": 0.5, "hard": 2.0}[one] for one in level]


def by_progress(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)


class CosineScaledReward:
    __name__ = "cosine_scaled_reward"

    def __init__(self, max_len):
        self.max_len = max_len

    def __call__(self, completions, completion_ids, **kwargs):
        shares = [min(len(ids) / self.max_len, 1.0) for ids in completion_ids]
        return [0.5 * (1.0 + math.cos(share * math.pi)) for share in shares]


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    def soft_overlong_punishment_reward(completion_ids, **kwargs):
        free = max_completion_len - soft_punish_cache
        lengths = [len(ids) for ids in completion_ids]
        return [max(-1.0, min(0.0, (free - n) / soft_punish_cache)) for n in lengths]

    return soft_overlong_punishment_reward


cosine = CosineScaledReward(max_len=4)
overlong = get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
reward_funcs = [accuracy_reward, think_format_reward]
none = []
