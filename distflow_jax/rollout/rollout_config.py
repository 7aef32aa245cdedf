"""Settings of sampling and of the samplers: the section `rollout` of a config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from distflow_jax.rollout.decode_state import (
    check_attention,
    check_cache_dtype,
    check_weights_dtype,
)
from distflow_jax.rollout.requests import SamplingParams, check_sampling

# keys that have no effect without an environment, beside those that begin with its name
_OF_ENVIRONMENTS = ("max_infra_rate", "max_trajectories", "turn_length")


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Settings of sampling and of the samplers. Sizes are global."""

    num_samples: int = 8  # responses per prompt (n of a group)
    max_response_length: int = 16  # longest response in tokens, the end token included
    # sampling temperature; training uses it for log-probs too, if the graph samples
    temperature: float = 1.0
    top_k: int = 0  # sample from the k most probable tokens; 0: all
    top_p: float = 1.0  # sample from the most probable tokens of that total probability; 1: all
    num_slots: int = 64  # responses decoded at once over all processes; 0: as many as fit
    # unfinished responses over all processes; responses that wait for their environment need no
    # slot, and keep their pages while these suffice; 0: four times the slots with an environment
    max_trajectories: int = 0
    cache_fraction: float = 0.3  # share of a device's memory for the KV cache if num_slots is 0
    tokens_per_call: int = 16  # decode steps per call from the host
    speculative_tokens: int = 0  # tokens guessed per step from repeated text; 0: off
    speculative_ngram: int = 2  # repeated tokens that must precede a guess
    attention: str = "auto"  # attention of a decode step: auto, pages (CPU), gpu or tpu
    page_size: int = 0  # tokens per page of the key/value cache; 0: 64, on TPUs 128
    # type of keys and values: auto (the compute dtype), or int8 with a float32 per token and head,
    # which takes about half the memory of bfloat16 and makes log-probs less exact
    # (docs/decisions/kv_cache.md)
    cache_dtype: str = "auto"
    # the sampler's matrices and tables: auto (the compute dtype), or int8 with a float32 for each
    # output: half of bfloat16's bytes, and log-probs less exact
    # (docs/decisions/sampler_weights.md)
    weights_dtype: str = "auto"
    cache_tokens: int = 0  # tokens in the KV caches of all processes; 0: for full slots
    prefill_tokens: int = 512  # tokens prefilled at a time: short prompts together, long in chunks
    # tokens of cached shared prefixes such as a system prompt, prefilled once in a rollout; in each
    # sampler, at least a page; 0: off
    prefix_tokens: int = 0
    # environment between the turns of a response: calculator, tools, my_module:MyClass,
    # file.py:MyClass; "": a response is one turn
    environment: str = ""
    # keyword arguments of the environment
    environment_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment_timeout: float = 10.0  # deadline of one call of an environment, in seconds
    # retries of a call that raised or timed out, before the response is sampled again
    environment_retries: int = 2
    environment_threads: int = 64  # concurrent calls in each process that are not `async`
    # share of failed tries of reset, or of step, among the last 256 of a process, above which the
    # run ends; checked from the 64th try on
    max_infra_rate: float = 0.5
    max_turns: int = 4  # turns of the model in one response
    turn_length: int = 0  # tokens of one turn, the end token included; 0: max_response_length

    def __post_init__(self):
        for name in (
            "max_response_length",
            "tokens_per_call",
            "max_turns",
            "prefill_tokens",
            "speculative_ngram",
            "environment_threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "num_slots",
            "max_trajectories",
            "cache_tokens",
            "page_size",
            "prefix_tokens",
            "speculative_tokens",
            "environment_retries",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"rollout.{name} must be at least 0, got {getattr(self, name)}")
        check_attention(self.attention)
        check_cache_dtype(self.cache_dtype)
        check_weights_dtype(self.weights_dtype)
        if not 0 < self.cache_fraction < 1:
            raise ValueError(
                f"rollout.cache_fraction must be between 0 and 1, got {self.cache_fraction}"
            )
        if self.temperature <= 0:
            raise ValueError(
                f"rollout.temperature must be positive, got {self.temperature}: a policy gradient "
                "needs samples (eval.temperature may be 0)"
            )
        check_sampling(
            num_samples=self.num_samples, top_k=self.top_k, top_p=self.top_p, section="rollout."
        )
        if self.environment_timeout <= 0:
            raise ValueError(
                f"rollout.environment_timeout must be positive, got {self.environment_timeout}"
            )
        if not 0 <= self.max_infra_rate <= 1:
            raise ValueError(
                f"rollout.max_infra_rate must be from 0 to 1, got {self.max_infra_rate}"
            )
        if not 0 <= self.turn_length <= self.max_response_length:
            raise ValueError(
                f"rollout.turn_length={self.turn_length} must be from 0 to "
                f"rollout.max_response_length={self.max_response_length}, which holds all turns"
            )
        if not self.environment:
            self._check_one_turn()
        if 0 < self.max_trajectories < self.num_slots:
            raise ValueError(
                f"rollout.max_trajectories={self.max_trajectories} is below "
                f"rollout.num_slots={self.num_slots}, but each slot decodes one: use at least that"
            )

    def _check_one_turn(self) -> None:
        """Raises ValueError for a key that only environments read."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            name = field.name
            of_it = name.startswith("environment_") or name in _OF_ENVIRONMENTS
            if of_it and value not in (field.default, {}):
                raise ValueError(
                    f"rollout.{name}={value!r} has no effect without an environment: set "
                    f"rollout.environment, or remove rollout.{name}"
                )

    def trajectories(self, slots: int) -> int:
        """Most responses under way beside so many slots, over all processes."""
        return (self.max_trajectories or 4 * slots) if self.environment else slots

    def sampling_params(self) -> SamplingParams:
        """How the responses that a policy is trained on are sampled."""
        return SamplingParams(
            self.num_samples, self.max_response_length, self.temperature, self.top_k, self.top_p
        )
