"""The stages of a plan's nodes, each built from the context record of its kind."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from distflow_jax.dag.graph import Node
from distflow_jax.dag.plan import Task
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.environments.registry import Environments
from distflow_jax.layout import Layout
from distflow_jax.models.decoder_config import DecoderConfig, adapted
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.run_models import optimizer_of, samplers_of
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.stages.registry import context_of, first_state_of, resolve
from distflow_jax.stages.stage_context import (
    ComputeContext,
    ModelContext,
    NodeContext,
    ResponseHooks,
    SamplingContext,
    TrainContext,
)
from distflow_jax.training.update import UpdateShape


class ContextFactory:
    """Makes each node's context: on the mesh of its role, with the optimizer of its model.

    `meshes` are keyed by layout. Only nodes on the host need the arguments after `meshes`.
    """

    def __init__(
        self,
        run: RunPlan,
        meshes: Mapping[Layout, jax.sharding.Mesh],
        *,
        engine: RolloutEngine | None = None,
        environments: Environments | None = None,
        rewards: RewardPool | None = None,
        member: int = 0,
        waiting: Callable[[str], Callable[[], None]] = lambda name: lambda: None,
    ):
        self._run, self._meshes, self._engine = run, meshes, engine
        self._environments, self._rewards = environments, rewards
        self._member, self._waiting = member, waiting
        self.on_response = ResponseHooks()  # of all nodes
        self.on_evaluated = ResponseHooks()  # of an evaluation
        self._counts = collections.Counter(_stage_name(t.node) for t in run.plan.tasks)
        self._makers: dict[type[NodeContext], Callable[[Task], NodeContext]] = {
            SamplingContext: self._sampling,
            ComputeContext: self._reward,
            ModelContext: self._model,
            TrainContext: self._train,
        }

    def stages(self, tasks: Sequence[Task]) -> tuple[dict[str, Stage], dict[str, Any]]:
        """(stage of each node, first states of those that begin with one of their own)."""
        stages, first = {}, {}
        builders = resolve(task.node for task in tasks)
        for task in tasks:
            context = self.of(task)
            stages[task.node.id] = builders[task.node.id](context)
            state = first_state_of(task.node, context)
            if state is not None:
                first[task.state_key] = state
        return stages, first

    def of(self, task: Task) -> NodeContext | None:
        """The context of one node; None where the node's function is the user's."""
        kind = context_of(task.node)
        return None if kind is None else self._makers[kind](task)

    def _sampling(self, task: Task) -> SamplingContext:
        return SamplingContext(
            node=task.node,
            prefix=self._prefix(task.node),
            rollout=self._run.config.rollout,
            engine=self._engine,
            environments=self._environments,
            member=self._member,
            hosts=self._run.sizes.sampler_hosts,
            on_response=self.on_response,
        )

    def _reward(self, task: Task) -> ComputeContext:
        config = self._run.config
        return ComputeContext(
            node=task.node,
            prefix=self._prefix(task.node),
            algorithm=config.algorithm,
            prompts_per_step=config.data.prompts_per_step,
            num_samples=config.rollout.num_samples,
            max_response_length=config.rollout.max_response_length,
            tokenizer=self._run.source.tokenizer,
            reward=config.reward,
            rewards=self._rewards,
            on_response=self.on_response,
            early_rewards=self._early_rewards(task),
            waiting=self._waiting,
        )

    def _network(self, task: Task) -> dict[str, Any]:
        """Arguments of the contexts of a model: its node and its network."""
        return dict(
            node=task.node,
            prefix=self._prefix(task.node),
            model=self._decoder(task),
            forward=self._run.sizes.forward,
            shape=self._shape(task),
            temperature=self._temperature,
        )

    def _model(self, task: Task) -> ModelContext:
        return ModelContext(**self._network(task))

    def _train(self, task: Task) -> TrainContext:
        config = self._run.config
        optimizer, schedule = optimizer_of(config, task.node.role, task.node.condition)
        # gaps of groups judge the workers; a step in partial batches counts its groups anew in each
        whole = config.stream.workers * (not config.stream.in_partial_batches)
        return TrainContext(
            **self._network(task),
            optimizer=optimizer,
            schedule=schedule,
            mini_batches=config.training.mini_batches,
            epochs=config.training.epochs,
            balance_coef=config.training.balance_coef,
            max_staleness=config.stream.max_staleness,
            num_groups=config.data.prompts_per_step * whole,
            algorithm=config.algorithm,
            value=config.critic.loss,
            preference=config.preference,
            reward_model=config.reward_model,
        )

    @property
    def _temperature(self) -> float:
        """Divisor of logits: the sampler's temperature, 1 where nothing is sampled."""
        sampled = samplers_of(self._run.plan)
        return self._run.config.rollout.temperature if sampled else 1.0

    def _prefix(self, node: Node) -> str:
        return f"{node.id}/" if self._counts[_stage_name(node)] > 1 else ""

    def _shape(self, task: Task) -> UpdateShape:
        rows = self._run.sizes.rows_at_a_time(task.layout)
        limit = self._run.config.rollout.max_response_length
        return UpdateShape(self._meshes[task.layout], rows, limit)

    def _decoder(self, task: Task) -> DecoderConfig:
        """The decoder of the node's model: with adapters where these are trained."""
        decoder, model = self._run.source.config, self._run.models.get(task.state_key)
        if model is None or not model.trained:
            return decoder
        return adapted(decoder, self._run.config.lora)

    def _early_rewards(self, task: Task) -> bool:
        """Whether rewards may begin while the sampler works: they need its responses alone, and
        the graph has one sampler and one reward."""
        tasks = self._run.plan.tasks
        samplers = [t.node.id for t in tasks if t.node.role == "ROLLOUT"]
        rewards = [t for t in tasks if _stage_name(t.node) == _stage_name(task.node)]
        return (
            self._run.config.coordinator.overlap_rewards
            and task.node.id not in self._run.config.stream.worker_nodes
            and (task.node.role, task.node.type, task.node.fn) == ("REWARD", "COMPUTE", None)
            and task.node.scope != "batch"
            and len(samplers) == len(rewards) == 1
            and {edge.source for edge in task.edges_in} <= {None, *samplers}
        )


def _stage_name(node: Node) -> tuple:
    return (node.fn,) if node.fn else (node.role, node.type)
