"""Settings of sampling, of the samplers and of evaluation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from distflow_jax.config.data_config import check_columns
from distflow_jax.config.implementation_table import DECODE, PREFILL, names
from distflow_jax.parsing.checked_fields import Kind, above, at_least, between, is_number, one_of
from distflow_jax.parsing.setting_checks import Section, setting

LEAST_TOP_P = 2.0**-126  # the least float32 that no device rounds to 0
LEAST_TEMPERATURE = 1e-30  # below it logits / temperature may be infinite
TEMPERATURE = Kind(
    f"0, which is greedy, or at least {LEAST_TEMPERATURE}",
    lambda value: is_number(value) and (value == 0 or value >= LEAST_TEMPERATURE),
)
TOP_P = Kind(
    f"above 0 (at least {LEAST_TOP_P:.6g}) and at most 1",
    lambda value: is_number(value) and LEAST_TOP_P <= value <= 1,
)
DECODE_ATTENTION = one_of(names(DECODE))
STORED = one_of(("auto", "int8"))  # dtypes of keys and values, and of weights
_WITH_ENVIRONMENT: Mapping[str, tuple[()]] = {"environment": ()}


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Section, name="rollout"):
    """Settings of sampling and of the samplers. Sizes are global."""

    num_samples: int = setting(8, at_least(1))  # responses per prompt (n of a group)
    # longest response in tokens, the end token included
    max_response_length: int = setting(16, at_least(1))
    # sampling temperature; training uses it for log-probs too, if the graph samples
    temperature: float = setting(1.0, at_least(LEAST_TEMPERATURE))
    top_k: int = setting(0, at_least(0))  # sample from the k most probable tokens; 0: all
    # sample from the most probable tokens of that total probability; 1: all
    top_p: float = setting(1.0, TOP_P)
    # responses decoded at once over all processes; 0: as many as fit
    num_slots: int = setting(64, at_least(0))
    # unfinished responses over all processes; responses that wait for their environment need no
    # slot, and keep their pages while these suffice; 0: four times the slots with an environment
    max_trajectories: int = setting(0, at_least(0), needs=_WITH_ENVIRONMENT)
    # share of a device's memory for the KV cache if num_slots is 0
    cache_fraction: float = setting(0.3, between(0, 1, "()"))
    tokens_per_call: int = setting(16, at_least(1))  # decode steps per call from the host
    # tokens guessed per step from repeated text; 0: off
    speculative_tokens: int = setting(0, at_least(0))
    speculative_ngram: int = setting(2, at_least(1))  # repeated tokens that must precede a guess
    # attention of decode steps, or of prefill for a name that serves it, see
    # [attention](implementations.md)
    attention: str = setting("auto", one_of(names(DECODE, PREFILL)))
    # tokens per page of the key/value cache; 0: 64, on TPUs 128
    page_size: int = setting(0, at_least(0))
    # type of keys and values: auto (the compute dtype), or int8 with a float32 per token and head,
    # which takes about half the memory of bfloat16 and makes log-probs less exact
    # (docs/decisions/kv_cache.md)
    cache_dtype: str = setting("auto", STORED)
    # the sampler's matrices and tables: auto (the compute dtype), or int8 with a float32 for each
    # output: half of bfloat16's bytes, and log-probs less exact
    # (docs/decisions/sampler_weights.md)
    weights_dtype: str = setting("auto", STORED)
    # tokens in the KV caches of all processes; 0: for full slots
    cache_tokens: int = setting(0, at_least(0))
    # tokens prefilled at a time: short prompts together, long in chunks
    prefill_tokens: int = setting(512, at_least(1))
    # tokens of cached shared prefixes such as a system prompt, prefilled once in a rollout; in each
    # sampler, at least a page; 0: off
    prefix_tokens: int = setting(0, at_least(0))
    # environment between the turns of a response: calculator, tools, my_module:MyClass,
    # file.py:MyClass; "": a response is one turn
    environment: str = ""
    # keyword arguments of the environment
    environment_kwargs: Mapping[str, Any] = setting({}, needs=_WITH_ENVIRONMENT)
    # deadline of one call of an environment, in seconds
    environment_timeout: float = setting(10.0, above(0), needs=_WITH_ENVIRONMENT)
    # retries of a call that raised or timed out, before the response is sampled again
    environment_retries: int = setting(2, at_least(0), needs=_WITH_ENVIRONMENT)
    # concurrent calls in each process that are not `async`
    environment_threads: int = setting(64, at_least(1), needs=_WITH_ENVIRONMENT)
    # share of failed tries of reset, or of step, among the last 256 of a process, above which the
    # run ends; checked from the 64th try on
    max_infra_rate: float = setting(0.5, between(0, 1), needs=_WITH_ENVIRONMENT)
    max_turns: int = setting(4, at_least(1))  # turns of the model in one response
    # tokens of one turn, the end token included; 0: max_response_length
    turn_length: int = setting(0, at_least(0), needs=_WITH_ENVIRONMENT)

    def __post_init__(self):
        super().__post_init__()
        if self.turn_length > self.max_response_length:
            raise ValueError(
                f"rollout.turn_length={self.turn_length} must be from 0 to "
                f"rollout.max_response_length={self.max_response_length}, which holds all turns"
            )
        if 0 < self.max_trajectories < self.num_slots:
            raise ValueError(
                f"rollout.max_trajectories={self.max_trajectories} is below "
                f"rollout.num_slots={self.num_slots}, but each slot decodes one: use at least that"
            )


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section, name="eval"):
    """The evaluation set, how it is sampled, and when."""

    dataset: str = ""  # data set, named as in data.train; "": no evaluation
    # columns of eval.dataset, as data.columns; None: those of data.columns
    columns: dict[str, str] | None = None
    # steps between evaluations; 0: only the last weights, and those of before_training
    every: int = setting(0, at_least(0))
    # whether the untrained weights are evaluated, at the end of step 1
    before_training: bool = True
    # number of prompts, the first of the data set; 0: all
    num_prompts: int = setting(128, at_least(0))
    # responses per prompt: N of mean@N, best@N and maj@N
    num_samples: int = setting(1, at_least(1))
    temperature: float = setting(0.0, TEMPERATURE)  # sampling temperature; 0: greedy
    # sample from the most probable tokens of that total probability; 1: all
    top_p: float = setting(1.0, TOP_P)
    # longest response in tokens; 0: rollout.max_response_length
    max_response_length: int = setting(0, at_least(0))

    def __post_init__(self):
        super().__post_init__()
        check_columns(self.columns or {}, "eval.columns")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.num_samples={self.num_samples} needs eval.temperature above 0: greedy "
                "responses to one prompt are all the same"
            )
