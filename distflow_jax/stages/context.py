"""What stages are built from: the static facts and machines of one process."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from distflow_jax.models.config import DecoderConfig
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rewards.pool import RewardConfig, RewardPool
from distflow_jax.rollout.engine import RolloutEngine
from distflow_jax.rollout.sampler import RolloutConfig
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.loss import AlgorithmConfig
from distflow_jax.training.update import UpdateShape

# (state, fields by their name inside the stage, options) -> state, fields, metrics
Stage = Callable[[Any, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any], dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class StageContext:
    """Handed to every stage builder; a stage keeps what it needs of it."""

    model: DecoderConfig
    tokenizer: Tokenizer
    algorithm: AlgorithmConfig
    forward: ForwardConfig
    shape: UpdateShape
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    rollout: RolloutConfig
    engine: RolloutEngine
    reward: RewardConfig
    rewards: RewardPool
    prompts_per_step: int
    mini_batches: int  # optimizer steps per pass over a batch
    epochs: int  # passes over a batch
