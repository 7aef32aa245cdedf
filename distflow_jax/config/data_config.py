"""Settings of prompts and of their rewards."""

import contextlib
import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.checked_fields import above, at_least, between, one_of
from distflow_jax.parsing.setting_checks import Section, setting

# every column of a file with a meaning; all others go to extra_info
COLUMNS = (
    "prompt messages question answer solution ground_truth chosen rejected completion reward_model "
    "label data_source ability extra_info tools chat_template_kwargs images image image_urls "
    "conversations"
).split()
# rewards that take microseconds for any text, and need no process of their own
QUICK = frozenset({"gsm8k", "exact", "format", "boxed_only", "zero"})


@dataclasses.dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Which prompts to train on, and how many at a time."""

    # training data: file, folder, hf:DATASET, task:NAME?.. or reasoning_gym:NAME?..
    train: str = "task:arithmetic?operands=2&operators=+&digits=2"
    # columns to read from files under other names: {'prompt': 'instruction', 'answer': 'output'};
    # {}: files use the names of docs/data.md
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    prompts_per_step: int = setting(16, at_least(1))  # prompts per step, over all processes
    # maximum prompt length in tokens, including the chat template
    max_prompt_length: int = setting(128, at_least(1))
    # what to do with prompts above max_prompt_length: error, drop, or truncate_left (keep the end).
    # Also applies to answers above rollout.max_response_length if the graph trains on them
    # (truncate_left keeps their start)
    overlong: str = setting("error", one_of(("error", "drop", "truncate_left")))
    shuffle: bool = True  # shuffle the prompts, with a new order in every epoch
    # number of passes over the prompts; 0: as many as the steps need
    epochs: int = setting(0, at_least(0))
    system_prompt: str = ""  # system message before each question of tasks and question data
    prompt_suffix: str = ""  # text after each question of tasks and question data
    # maximum tokens per image in a prompt; larger images are downscaled as in their model family
    image_tokens: int = setting(256, at_least(1))
    # root folder of images named in data files; '': the data file's folder. Paths may not leave it
    image_root: str = ""
    # chat template variables: {'enable_thinking': False}; a row's chat_template_kwargs override
    # them
    template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    date: str = ""  # date for chat templates, YYYY-MM-DD; '': date (UTC) of the run's first start
    # tokens of demonstrations to train on: answer, or generation (all tokens that the chat template
    # encloses in {% generation %})
    train_on: str = setting("answer", one_of(("answer", "generation")))

    def __post_init__(self):
        super().__post_init__()
        check_columns(self.columns, "data.columns")
        if self.date and not _is_date(self.date):
            raise ValueError(f"data.date must be a date like 2026-01-31, got {self.date!r}")


@dataclasses.dataclass(frozen=True)
class RewardConfig(Section, name="reward"):
    """The reward function, its worker processes, and the handling of its errors."""

    # the reward function: gsm8k, math, boxed_only, math_verify, math_verify_anchored, geo3k, exact,
    # format, pattern, reasoning_gym, code, zero (all rewards come from rollout.environment),
    # my_module:my_function or file.py:function. file.py:format,accuracy adds the scores of several
    # functions; you can also name a list of functions or a verifiers Rubric
    function: str = "gsm8k"
    # keyword arguments of the reward function
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # weights of several functions, in order; (): 1 each, or the weights of the Rubric
    weights: tuple[float, ...] = ()
    # pass prompts and completions to batch functions as lists of messages, as TRL does for chat
    # prompts; False: as text
    conversational: bool = False
    # timeout of one function call; with code, the cases of a program may take 80 % of it
    timeout_seconds: float = setting(10.0, above(0))
    # timeout for starting a worker process and importing the function
    start_seconds: float = setting(60.0, above(0))
    # worker processes per process of the run; 0: none (fast built-in functions only); -1: none for
    # fast built-in functions, otherwise one per core, up to 8
    num_workers: int = setting(-1, at_least(-1))
    # score of a response whose call raises, hangs or crashes; with code, it is not scored
    on_error: float = 0.0
    # maximum share of failed responses in a step, above which the run exits, or in an evaluation,
    # above which it has no scores
    max_error_rate: float = setting(0.1, between(0, 1))
    # number of tokens before the length limit over which DAPO's length penalty increases; below 1:
    # a share of the limit; 0: no penalty
    overlong_buffer: float = setting(0.0, at_least(0))
    # length penalty at the length limit, subtracted from the score
    overlong_penalty: float = setting(1.0, at_least(0))
    overlong_cap: bool = False  # clip the length penalty at -1

    def __post_init__(self):
        super().__post_init__()
        if self.overlong_buffer >= 1 and self.overlong_buffer != int(self.overlong_buffer):
            raise ValueError(
                "reward.overlong_buffer must be a whole number of tokens, or a share below 1, got "
                f"{self.overlong_buffer}"
            )
        if self.num_workers == 0 and self.function not in QUICK:
            raise ValueError(
                f"reward.num_workers=0 is only for {', '.join(sorted(QUICK))}; {self.function!r} "
                "may hang or crash, so use at least 1"
            )


def _is_date(text: str) -> bool:
    """Whether a text is a day of the calendar as YYYY-MM-DD."""
    with contextlib.suppress(ValueError):
        return str(datetime.date.fromisoformat(text)) == text
    return False


def check_columns(columns: Mapping[str, str], key: str) -> None:
    """Raises ValueError if `columns`, the value of the config key `key`, cannot be applied.

    >>> check_columns({"prompt": "instruction", "answer": "output"}, "data.columns")
    """
    for name, source in columns.items():
        if name not in COLUMNS:
            raise ValueError(f"{key}: no column is called {name!r} ({hint(name, COLUMNS)})")
        if not source:
            raise ValueError(f"{key}: {name!r} needs the name of a column of the file, got ''")
