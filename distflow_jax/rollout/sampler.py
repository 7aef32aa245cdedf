"""One process's sampler: an engine, the weights it holds, and their version."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distflow_jax.batch import Prompt
from distflow_jax.rollout.decode_state import DecodeState
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import (
    GroupRequest,
    Response,
    RolloutStats,
    SamplingParams,
)
from distflow_jax.rollout.scheduling.scheduler import run_requests


@dataclasses.dataclass
class SamplerState:
    """The weights on this process's devices and the decode slots, all of them free."""

    params: Any
    version: int  # training steps that these weights have seen
    decode: DecodeState


def sample(
    engine: RolloutEngine,
    state: SamplerState,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    on_response: Callable[[Response], None] | None = None,
) -> tuple[SamplerState, list[Response], RolloutStats]:
    """Samples responses to each prompt; they are ordered by (prompt, sample).

    `on_response` is called in this thread as soon as a response ends.
    """
    decode, responses, stats = run_requests(
        engine,
        state.params,
        state.decode,
        [GroupRequest(prompt, sampling) for prompt in prompts],
        version=state.version,
        on_response=on_response,
    )
    return dataclasses.replace(state, decode=decode), responses, stats


def update_weights(
    state: SamplerState, sync: Callable[[Any], Any], params: Any, version: int
) -> SamplerState:
    """The state with the weights `sync(params)`; the old ones are freed first.

    `params`: of the policy, on the training mesh, after `version` steps.
    """
    jax.tree.map(lambda x: x.delete(), state.params)
    return dataclasses.replace(state, params=sync(params), version=version)
