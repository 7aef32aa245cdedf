"""Contexts: the static facts and services of one process that stages are built from."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from distflow_jax.batch import Rows
from distflow_jax.config.algorithm_config import (
    AlgorithmConfig,
    PreferenceConfig,
    RewardModelConfig,
    ValueConfig,
)
from distflow_jax.config.data_config import RewardConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.dag.graph import Node
from distflow_jax.environments.registry import Environments
from distflow_jax.layout import ROUTED_EXPERTS
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import Response
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.update import UpdateShape


class ResponseHooks:
    """Passes each response on as soon as it ends, to a stage that can begin with it.

    Samplers call it; build_reward adds a listener, so that scoring overlaps with sampling.
    """

    def __init__(self):
        self._listeners: list[Callable[[Response], None]] = []

    def add(self, listener: Callable[[Response], None]) -> None:
        """`listener` is called in the thread that decodes: it must return at once."""
        self._listeners.append(listener)

    def __call__(self, response: Response) -> None:
        """Calls all listeners."""
        for listener in self._listeners:
            listener(response)


def require(fields: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """ValueError unless a stage was handed all fields that `what` (a setting) needs."""
    if missing := sorted(set(names) - set(fields)):
        raise ValueError(
            f"{what} needs {', '.join(missing)}: add that to the node's reads, and to the graph a "
            "node that writes it"
        )


def routed_rows(fields: Mapping[str, Any]) -> Rows:
    """The rows of a policy's stage, with the experts that it replays where it reads them."""
    rows = fields["rows"]
    if ROUTED_EXPERTS not in fields:
        return rows
    return dataclasses.replace(rows, experts=fields[ROUTED_EXPERTS])


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeContext:
    """Facts that every stage builder is handed; abstract, the four records below are handed."""

    node: Node  # the node that the stage is for
    prefix: str  # of its metrics: "", or "node id/" where several nodes have this kind of stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingContext(NodeContext):
    """A sampler and its settings: for ROLLOUT nodes."""

    rollout: RolloutConfig
    engine: RolloutEngine
    environments: Environments | None  # None: a response is one turn
    member: int  # this process's number among the hosts of its sampler
    hosts: int  # processes that share the sampler
    on_response: ResponseHooks  # is handed each response as soon as it ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeContext(NodeContext):
    """Everything between a response and its advantage: for COMPUTE nodes, which hold no model."""

    algorithm: AlgorithmConfig
    prompts_per_step: int
    num_samples: int  # responses per prompt
    max_response_length: int  # tokens
    tokenizer: Tokenizer
    reward: RewardConfig
    rewards: RewardPool
    on_response: ResponseHooks  # hands on each response as soon as it ends
    early_rewards: bool  # whether responses may be scored before the rollout has ended
    waiting: Callable[[str], Callable[[], None]]  # starts a time, by name; the result ends it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelContext(NodeContext):
    """A model that only computes: for MODEL_INFERENCE nodes on a mesh."""

    model: DecoderConfig
    forward: ForwardConfig
    shape: UpdateShape
    temperature: float  # of the sampler, by which logits are divided; 1 without a sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainContext(ModelContext):
    """A model, its optimizer and the settings of every objective: for MODEL_TRAIN nodes."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule  # learning rate by optimizer step
    mini_batches: int  # optimizer steps per pass over a batch
    epochs: int  # passes over a batch
    balance_coef: float  # of the load balance of experts in every objective's loss
    max_staleness: int  # stream's: the oldest age of a token, in steps
    num_groups: int  # of a step, whose gaps to their samplers are told apart; 0: none
    algorithm: AlgorithmConfig
    value: ValueConfig
    preference: PreferenceConfig
    reward_model: RewardModelConfig
