"""The models of a run and their states: found in the plan, made from the source, restored.

A *policy* is a decoder with its vocabulary head; a *scalar* model, critic or reward model, is a
policy's trunk with a head that gives one number per token.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from distflow_jax.checkpoint.trained_weights import read_trained, trained_weights_digest
from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph import ALWAYS, When
from distflow_jax.dag.plan import Plan, Task
from distflow_jax.layout import Layout
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import (
    DecoderConfig,
    adapted,
    reward_head_stddev,
    scalar_model,
    without_adapters,
)
from distflow_jax.models.parameters import Network, completed, with_scalar_head
from distflow_jax.models.weights.load_params import load_or_init_params
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import (
    TrainState,
    abstract_state,
    as_stored,
    init_state,
)

SCALAR_ROLES = ("CRITIC", "REWARD")


@dataclasses.dataclass(frozen=True)
class ModelOfRun:
    """One model that nodes of the graph use, by the key of its state."""

    key: str
    role: str
    layout: Layout
    trained: bool
    checkpoint: str  # folder of the run whose weights it has; "": those of the config's source

    @property
    def is_policy(self) -> bool:
        """Whether it gives log-probs rather than values."""
        return self.role not in SCALAR_ROLES


def models_of(plan: Plan) -> dict[str, ModelOfRun]:
    """The models that live on the training meshes, by key. ValueError for what cannot be."""
    found: dict[str, list[Task]] = {}
    for task in plan.tasks:
        if task.layout.kind == "mesh" and task.node.type != "COMPUTE":
            found.setdefault(task.state_key, []).append(task)
    models = {}
    for key, tasks in sorted(found.items()):
        where = f"node {tasks[-1].node.id!r}: model {key!r}"
        if len({task.node.role in SCALAR_ROLES for task in tasks}) > 1:
            raise ValueError(
                f"{where} is a policy for one node and a scalar model for another: give them "
                "different names in `model`"
            )
        places = sorted({str(t.node.options.get("checkpoint", "")) for t in tasks} - {""})
        if len(places) > 1:
            raise ValueError(
                f"{where} would start from two checkpoints: {' and '.join(places)}; name one"
            )
        trained = any(task.node.type == "MODEL_TRAIN" for task in tasks)
        if tasks[0].node.role == "REWARD" and not trained and not places:
            raise ValueError(
                f"{where} scores responses but is not trained here: set options.checkpoint to the "
                "--workdir of a run of the dag reward_model"
            )
        models[key] = ModelOfRun(key, tasks[0].node.role, tasks[0].layout, trained, "".join(places))
    _check_samplers(plan, models)
    return models


def samplers_of(plan: Plan) -> dict[str, str]:
    """State key of each sampler in the plan -> that of the policy whose weights it has."""
    return {task.state_key: _policy_of(task) for task in _sampling(plan)}


def _sampling(plan: Plan) -> list[Task]:
    kind = ("ROLLOUT", "MODEL_INFERENCE")
    return [task for task in plan.tasks if (task.node.role, task.node.type) == kind]


def _policy_of(task: Task) -> str:
    return task.node.model or "actor"


def _check_samplers(plan: Plan, models: Mapping[str, ModelOfRun]) -> None:
    """Every sampler has the weights of a policy that lies on a training mesh."""
    policies = [repr(model.key) for model in models.values() if model.is_policy]
    for task in _sampling(plan):
        key = _policy_of(task)
        if key in models and models[key].is_policy:
            continue
        kind = "is no policy" if key in models else "no node trains or takes log-probs of"
        known = ", ".join(repr(model) for model in models)
        raise ValueError(
            f"node {task.node.id!r}: samples from model {key!r}, which {kind}; the models there "
            f"are: {known}. Set the node's `model` to one of the policies "
            f"({', '.join(policies) or 'there is none'})"
        )


def network_of(role: str, decoder: DecoderConfig) -> Network:
    """The network of a role's models: a decoder, or its trunk with a scalar head."""
    if role == "CRITIC":
        return scalar_model(decoder)
    if role == "REWARD":
        return scalar_model(decoder, head_stddev=reward_head_stddev(decoder))
    return decoder


def optimizer_of(
    config: Config, role: str, when: When = ALWAYS
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Optimizer and learning rate of a role's models, which are trained in the steps of `when`."""
    chosen = config.critic.optimizer if role == "CRITIC" else config.training.optimizer
    steps = sum(when.active(step) for step in range(1, config.training.steps + 1))
    updates = max(steps, 1) * config.training.mini_batches * config.training.epochs
    return make_optimizer(chosen, updates), learning_rate(chosen, updates)


def bases_of(models: Mapping[str, ModelOfRun], config: Config) -> dict[str, str]:
    """Frozen policies whose parameters are those that adapters leave as they are, and the trained
    policy that has these: both are the source's, on the same devices, and lie there once.

    Not where models wait on the host, each for itself.
    """
    if not config.lora.rank or config.training.offload != "none":
        return {}

    def of_source(model: ModelOfRun) -> bool:
        return model.is_policy and not model.checkpoint

    trained = {m.layout: key for key, m in models.items() if m.trained and of_source(m)}
    return {
        key: trained[m.layout]
        for key, m in models.items()
        if not m.trained and of_source(m) and m.layout in trained
    }


def starting_weights(models: Mapping[str, ModelOfRun], source: ModelSource) -> dict[str, str]:
    """{model: digest of the weights that it starts from}. Collective.

    The digest of the source, and of the other run's checkpoint where a frozen model has one: that
    is read again when a run is resumed.
    """
    return {
        key: trained_weights_digest(pathlib.Path(model.checkpoint))
        if model.checkpoint and not model.trained
        else source.fingerprint
        for key, model in models.items()
    }


class States:
    """Makes the states of a run's models: from the source's weights, or for reading a checkpoint.

    `meshes` are keyed by layout. Matrices that no update changes, those of frozen models and those
    that adapters are added to, are stored in `compute_dtype`, in which products take them anyway.
    """

    def __init__(
        self,
        models: Mapping[str, ModelOfRun],
        source: ModelSource,
        config: Config,
        meshes: Mapping[Layout, jax.sharding.Mesh],
        compute_dtype: str,
    ):
        self._models, self._source, self._config, self._meshes = models, source, config, meshes
        self._dtype = compute_dtype

    def abstract(self) -> dict[str, TrainState]:
        """The states that a checkpoint holds: ShapeDtypeStructs with shardings, by key."""
        return {key: self._specs(m) for key, m in self._models.items() if m.trained}

    def specs(self) -> dict[str, Any]:
        """All states as `initial` makes them: ShapeDtypeStructs with shardings, by key."""
        frozen = {key: m for key, m in self._models.items() if not m.trained}
        return self.abstract() | {key: self._specs(model).params for key, model in frozen.items()}

    def initial(
        self,
        restored: Mapping[str, TrainState],
        settle: Callable[[str, Any], Any] = lambda key, state: state,
    ) -> dict[str, Any]:
        """The state of every model: parameters of the frozen, a TrainState of the trained ones.

        `restored` ones are taken as they are; `settle(key, state)` places each state as soon as it
        is made. Raises ValueError or FileNotFoundError where the checkpoint that a node names
        cannot be read.
        """
        states: dict[str, Any] = {key: settle(key, state) for key, state in restored.items()}
        policies: dict[Layout, Any] = {}  # weights of the source, read once for each layout
        bases = bases_of(self._models, self._config)
        # the trained last: with their moments, the source's weights would lie there beside them
        new = sorted(self._models.keys() - states.keys() - bases.keys())
        new.sort(key=lambda key: self._models[key].trained)
        users = collections.Counter(
            self._models[key].layout for key in new if not self._models[key].checkpoint
        )
        for key in new:
            model = self._models[key]
            network, optimizer, mesh = self._parts(model)
            users[model.layout] -= not model.checkpoint
            taken = bool(model.checkpoint) or not users[model.layout]
            if model.checkpoint:
                params = self._from_run(model)
            else:
                params = policies.pop(model.layout, None) or load_or_init_params(
                    self._source, self._config.seed, mesh
                )
                if not taken:
                    policies[model.layout] = params
                if not model.is_policy:
                    params = with_scalar_head(params)
            params = completed(params, network, self._config.seed, mesh)
            params = as_stored(params, network, self._dtype, trained=model.trained, taken=taken)
            if model.trained:
                params = init_state(params, network, optimizer, mesh)
            states[key] = settle(key, params)
        for key, base in bases.items():
            network, _, _ = self._parts(self._models[base])
            states[key] = settle(key, lora.divide(network, states[base].params)[1])
        return states

    def _specs(self, model: ModelOfRun) -> TrainState:
        network, optimizer, mesh = self._parts(model)
        state = abstract_state(network, optimizer, mesh)
        params = as_stored(state.params, network, self._dtype, trained=model.trained)
        return dataclasses.replace(state, params=params)

    def _parts(
        self, model: ModelOfRun
    ) -> tuple[Network, optax.GradientTransformation, jax.sharding.Mesh]:
        network = network_of(model.role, self._source.config)
        if model.trained:
            network = adapted(network, self._config.lora)
        return network, optimizer_of(self._config, model.role)[0], self._meshes[model.layout]

    def _from_run(self, model: ModelOfRun) -> Any:
        """Parameters of the model of the same key in the newest checkpoint of another run."""
        network, _, mesh = self._parts(model)
        try:
            plain = without_adapters(network)
            return read_trained(pathlib.Path(model.checkpoint), model.key, plain, mesh)[1]
        except FileNotFoundError as error:
            raise FileNotFoundError(f"model {model.key!r}: {error}") from error
