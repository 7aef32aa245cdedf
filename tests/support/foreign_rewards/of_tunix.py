"""In Tunix's form: completions are text, and so are prompts; several functions are added."""

import re

match_format = re.compile(r"<reasoning>.+?</reasoning>.*?<answer>(.+?)(?:</answer>|$)", re.DOTALL)


def match_format_exactly(prompts, completions, **kwargs):
    return [0 if match_format.search(response) is None else 3.0 for response in completions]


def check_answer(prompts, completions, answer, **kwargs):
    found = [match_format.search(response) for response in completions]
    guesses = [match and match.group(1).strip() for match in found]
    return [
        0 if guess is None else 3.0 if guess == true_answer else -1.0
        for guess, true_answer in zip(guesses, answer, strict=True)
    ]


def check_numbers(prompts, completions, answer, tmvp_config, **kargs):
    """In MaxText's form: a config of the trainer is the fourth argument."""
    return [tmvp_config.reward_exact_answer] * len(completions)
