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

    num_samples: int = setting(8, at_least(1))  # responses per prompt (the size of a group)
    # maximum response length in tokens, including the end token
    max_response_length: int = setting(16, at_least(1))
    # sampling temperature; training also uses it for log-probs, if the graph samples
    temperature: float = setting(1.0, at_least(LEAST_TEMPERATURE))
    top_k: int = setting(0, at_least(0))  # sample from the k most probable tokens; 0: all
    # sample from the most probable tokens with this total probability; 1: all
    top_p: float = setting(1.0, TOP_P)
    # responses decoded at the same time, over all processes; 0: as many as fit in memory
    num_slots: int = setting(64, at_least(0))
    # maximum number of unfinished responses, over all processes. Responses that wait for their
    # environment need no slot, and keep their KV pages while there are enough. 0: four times the
    # slots if there is an environment
    max_trajectories: int = setting(0, at_least(0), needs=_WITH_ENVIRONMENT)
    # share of device memory for the KV cache if num_slots is 0
    cache_fraction: float = setting(0.3, between(0, 1, "()"))
    tokens_per_call: int = setting(16, at_least(1))  # decode steps per call from the host
    # tokens guessed per step from repeated text (speculative decoding); 0: off
    speculative_tokens: int = setting(0, at_least(0))
    # number of repeated tokens that must precede a guess
    speculative_ngram: int = setting(2, at_least(1), needs={"speculative_tokens": ()})
    # attention implementation of decode steps, or of prefill if the name serves prefill, see
    # [attention](implementations.md)
    attention: str = setting("auto", one_of(names(DECODE, PREFILL)))
    page_size: int = setting(0, at_least(0))  # tokens per KV page; 0: 64, or 128 on TPUs
    # dtype of the KV cache: auto (the compute dtype), or int8 with a float32 per token and head.
    # int8 takes about half the memory of bfloat16, and makes log-probs less exact
    # (docs/decisions/kv_cache.md)
    cache_dtype: str = setting("auto", STORED)
    # dtype of the sampler's matrices and tables: auto (the compute dtype), or int8 with a float32
    # for each output. int8 takes half the bytes of bfloat16, and makes log-probs less exact
    # (docs/decisions/sampler_weights.md)
    weights_dtype: str = setting("auto", STORED)
    # tokens in the KV caches of all processes; 0: enough for full slots
    cache_tokens: int = setting(0, at_least(0))
    # tokens per prefill: short prompts are prefilled together, long prompts in chunks
    prefill_tokens: int = setting(512, at_least(1))
    # tokens for cached shared prefixes, such as a system prompt, in each sampler; a prefix is
    # prefilled once per rollout. At least one page; 0: off
    prefix_tokens: int = setting(0, at_least(0))
    # environment for multi-turn responses: tools, a single tool (calculator, python, bash),
    # my_module:MyClass or file.py:MyClass; "": a response has one turn
    environment: str = ""
    # keyword arguments of the environment: {'tools': ('python', 'calculator')}
    environment_kwargs: Mapping[str, Any] = setting({}, needs=_WITH_ENVIRONMENT)
    # timeout of one call to an environment, in seconds
    environment_timeout: float = setting(10.0, above(0), needs=_WITH_ENVIRONMENT)
    # retries of a call that raised or timed out, before the response is sampled again
    environment_retries: int = setting(2, at_least(0), needs=_WITH_ENVIRONMENT)
    # concurrent calls per process to environments that are not `async`
    environment_threads: int = setting(64, at_least(1), needs=_WITH_ENVIRONMENT)
    # maximum share of failed tries, for reset and for step, among the last 256 of a process; above
    # it, the run exits. Checked from the 64th try on
    max_infra_rate: float = setting(0.5, between(0, 1), needs=_WITH_ENVIRONMENT)
    # maximum number of the model's turns in a response
    max_turns: int = setting(4, at_least(1), needs=_WITH_ENVIRONMENT)
    # maximum length of a turn in tokens, including the end token; 0: max_response_length
    turn_length: int = setting(0, at_least(0), needs=_WITH_ENVIRONMENT)

    def __post_init__(self):
        super().__post_init__()
        if self.turn_length > self.max_response_length:
            raise ValueError(
                f"rollout.turn_length={self.turn_length} must be from 0 to "
                f"rollout.max_response_length={self.max_response_length}, the limit for all turns"
            )
        if 0 < self.max_trajectories < self.num_slots:
            raise ValueError(
                f"rollout.max_trajectories={self.max_trajectories} is below "
                f"rollout.num_slots={self.num_slots}, but each slot needs one: use at least that"
            )


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section, name="eval"):
    """The evaluation set, how it is sampled, and when."""

    dataset: str = ""  # evaluation data, in the form of data.train; "": no evaluation
    # columns of eval.dataset, in the form of data.columns; None: the same as data.columns
    columns: dict[str, str] | None = None
    # steps between evaluations; 0: only the final weights, and the untrained ones if
    # before_training is set
    every: int = setting(0, at_least(0))
    before_training: bool = True  # evaluate the untrained weights, at the end of step 1
    # number of prompts, from the start of the data set; 0: all
    num_prompts: int = setting(128, at_least(0))
    # responses per prompt: N of mean@N, best@N and maj@N
    num_samples: int = setting(1, at_least(1))
    temperature: float = setting(0.0, TEMPERATURE)  # sampling temperature; 0: greedy
    # sample from the most probable tokens with this total probability; 1: all
    top_p: float = setting(1.0, TOP_P, needs={"temperature": ()})
    # maximum response length in tokens; 0: rollout.max_response_length
    max_response_length: int = setting(0, at_least(0))

    def __post_init__(self):
        super().__post_init__()
        check_columns(self.columns or {}, "eval.columns")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.num_samples={self.num_samples} needs eval.temperature above 0: greedy "
                "responses to one prompt are all the same"
            )
