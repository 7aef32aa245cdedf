"""What stages are built from: the static facts and machines of one process."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import optax

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.algorithms.preference import PreferenceConfig, RewardModelConfig
from distflow_jax.algorithms.value import ValueConfig
from distflow_jax.batch import Rows
from distflow_jax.environments.registry import Environments
from distflow_jax.layout import ROUTED_EXPERTS
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rewards.pool import RewardConfig, RewardPool
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import Response
from distflow_jax.rollout.sampler import RolloutConfig
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.update import UpdateShape

# (state, fields by their name inside the stage, options) -> state, fields, metrics
Stage = Callable[[Any, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any], dict[str, Any]]]


class NodeLike(Protocol):
    """What is read of a node."""

    id: str
    role: str
    type: str
    fn: str | None
    reads: Mapping[str, str]
    may_read: Mapping[str, str]
    writes: Mapping[str, str]
    per_token: Sequence[str]
    options: Mapping[str, Any]


class ResponseListener:
    """Passes finished responses on to a stage that can begin with them."""

    def __init__(self):
        self._listeners: list[Callable[[Response], None]] = []

    def add(self, listener: Callable[[Response], None]) -> None:
        """`listener` is called in the thread that decodes: it must return at once."""
        self._listeners.append(listener)

    def __call__(self, response: Response) -> None:
        """Tells all listeners."""
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


@dataclasses.dataclass(frozen=True)
class StageContext:
    """Handed to every stage builder; a stage keeps what it needs of it."""

    node: NodeLike  # the node that the stage is for
    prefix: str  # of its metrics: "", or "node id/" where several nodes have this kind of stage
    model: DecoderConfig
    tokenizer: Tokenizer
    algorithm: AlgorithmConfig
    forward: ForwardConfig
    shape: UpdateShape
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    rollout: RolloutConfig
    engine: RolloutEngine
    environments: Environments | None  # None: a response is one turn
    value: ValueConfig
    preference: PreferenceConfig
    reward_model: RewardModelConfig
    reward: RewardConfig
    rewards: RewardPool
    member: int  # this process's number among the hosts of its sampler
    hosts: int  # processes that share the sampler
    on_response: ResponseListener  # told of each response as soon as it ends
    early_rewards: bool  # whether the reward stage may score responses that it is told of
    record: Callable[[str, int, int], None]  # takes a span: name, start and end in perf_counter ns
    prompts_per_step: int
    mini_batches: int  # optimizer steps per pass over a batch
    epochs: int  # passes over a batch
    balance_coef: float  # of the load balance of experts in every objective's loss
