"""What a run is made of: everything checked first, then everything built on the devices.

`prepare` runs before any device works and finds what a user can get wrong; `build` makes meshes,
engine, stages and coordinator from what it found.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax

from distflow_jax.batch import Prompt
from distflow_jax.config import Config, Machine, Sizes, derive_sizes
from distflow_jax.config_dict import to_config_dict, to_json
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.dataset import open_dataset
from distflow_jax.coordinator.loader import Loader
from distflow_jax.dag.pipelines import load_graph
from distflow_jax.dag.planner import Plan, plan
from distflow_jax.inference import load_or_init_params
from distflow_jax.models.transformer import param_shardings
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parallel import processes
from distflow_jax.parallel.transfer import WeightSync
from distflow_jax.rewards.pool import RewardPool, RewardRequest
from distflow_jax.rollout.engine import RolloutEngine
from distflow_jax.stages.context import Stage, StageContext
from distflow_jax.stages.table import resolve
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import TrainState, init_state
from distflow_jax.training.update import UpdateShape
from distflow_jax.types import Layout

HOST = Layout("host")


@dataclasses.dataclass
class Setup:
    """Everything that was checked before the first device computation."""

    config: Config
    machine: Machine
    source: ModelSource
    sizes: Sizes
    plan: Plan
    builders: dict[str, Callable[[StageContext], Stage]]
    loader: Loader
    eval_prompts: list[Prompt]
    rewards: RewardPool


def make_plan(config: Config, sizes: Sizes) -> Plan:
    """The plan of the configured graph, with its layouts. Pure in (config, sizes)."""
    updates = config.training.mini_batches * config.training.epochs
    graph = load_graph(
        config.dag,
        use_reference=config.algorithm.kl_coef > 0,
        recompute_old_logp=updates > 1,
    )
    trainers = [n for n in graph.nodes if (n.role, n.type) == ("ACTOR", "MODEL_TRAIN")]
    if not trainers:
        raise ValueError(f"dag {config.dag!r} trains nothing: it has no node ACTOR MODEL_TRAIN")
    for field, wanted, why, otherwise in (
        (
            "ref_logp",
            config.algorithm.kl_coef > 0,
            "algorithm.kl_coef is above 0",
            "set algorithm.kl_coef to 0",
        ),
        (
            "old_logp",
            updates > 1,
            f"a batch gets {updates} optimizer steps",
            "set training.mini_batches and training.epochs to 1",
        ),
    ):
        for node in trainers:
            if wanted and field not in node.reads:
                raise ValueError(
                    f"dag {config.dag!r}: node {node.id!r} reads no {field!r}, but {why}; add it "
                    f"to its reads and a node that writes it, or {otherwise}"
                )
    device = Layout("mesh", (("fsdp", sizes.mesh.fsdp), ("tensor", sizes.mesh.tensor)))
    layouts = {"ACTOR": device, "REFERENCE": device, "ROLLOUT": HOST, "REWARD": HOST}
    return plan(graph, layouts, {"prompt": HOST})


def prepare(config: Config) -> Setup:
    """Opens and checks everything a run needs. Raises ValueError or FileNotFoundError."""
    machine = Machine.current()
    source = open_model(config.model.source, cache_dir=config.model.cache_dir or None)
    sizes = derive_sizes(config, source.config, machine)
    the_plan = make_plan(config, sizes)
    builders = resolve(task.node for task in the_plan.tasks)
    loader = _open_loader(config, config.data.train, source, machine)
    if config.data.epochs and loader.num_steps < config.training.steps:
        raise ValueError(
            f"data.epochs={config.data.epochs} give {loader.num_steps} steps of "
            f"{config.data.prompts_per_step} prompts, fewer than training.steps="
            f"{config.training.steps}; lower that, or raise data.epochs (0 is no limit)"
        )
    eval_prompts = load_eval_prompts(config, source, machine)
    rewards = RewardPool(config.reward)
    try:
        rewards.check(trial_request(loader.take(0, machine.processes)[0]))
        processes.check_agreement(
            {
                "config": hashlib.sha256(to_json(to_config_dict(config)).encode()).hexdigest(),
                "plan": the_plan.digest,
                "code": processes.code_digest(),
            }
        )
    except BaseException:
        rewards.close()
        raise
    return Setup(config, machine, source, sizes, the_plan, builders, loader, eval_prompts, rewards)


def trial_request(prompt: Prompt) -> RewardRequest:
    """The row on which a reward function is tried before step 1."""
    return RewardRequest(
        data_source=prompt.data_source,
        solution=str(prompt.ground_truth),
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        prompt=prompt.text,
        response_length=1,
    )


def _open_loader(config: Config, spec: str, source: ModelSource, machine: Machine) -> Loader:
    dataset = open_dataset(
        spec, system_prompt=config.data.system_prompt, prompt_suffix=config.data.prompt_suffix
    )
    return Loader(
        dataset,
        source.tokenizer,
        config.data,
        seed=config.seed,
        process_index=processes.process_index(),
        process_count=machine.processes,
    )


def load_eval_prompts(config: Config, source: ModelSource, machine: Machine) -> list[Prompt]:
    """This process's share of the evaluation prompts; empty without an evaluation set."""
    if not config.eval.dataset:
        return []
    data = dataclasses.replace(config.data, shuffle=False, epochs=1, prompts_per_step=1)
    dataset = open_dataset(
        config.eval.dataset,
        system_prompt=data.system_prompt,
        prompt_suffix=data.prompt_suffix,
    )
    loader = Loader(dataset, source.tokenizer, data, seed=config.seed)
    count = min(config.eval.num_prompts or len(loader.rows), len(loader.rows))
    index, total = processes.process_index(), machine.processes
    if count < total:
        raise ValueError(
            f"{config.eval.dataset!r} gives {count} evaluation prompts for {total} processes; set "
            f"config.eval.num_prompts to at least {total}"
        )
    start, stop = count * index // total, count * (index + 1) // total
    return loader.take(start, stop - start)


@dataclasses.dataclass
class Machinery:
    """What lives on the devices and beside them."""

    context: StageContext
    stages: dict[str, Stage]
    coordinator: Coordinator
    sync: WeightSync
    mesh: jax.sharding.Mesh


def build(setup: Setup) -> Machinery:
    """Meshes, engine, compiled stages and the coordinator."""
    config, sizes, model = setup.config, setup.sizes, setup.source.config
    mesh = mesh_lib.training_mesh(sizes.mesh)
    local = mesh_lib.sampler_mesh(sizes.mesh)
    engine = make_engine(setup.source, config, sizes)
    updates = config.training.steps * config.training.mini_batches * config.training.epochs
    context = StageContext(
        model=model,
        tokenizer=setup.source.tokenizer,
        algorithm=config.algorithm,
        forward=sizes.forward,
        shape=UpdateShape(mesh, sizes.micro_rows, config.rollout.max_response_length),
        optimizer=make_optimizer(config.training.optimizer, updates),
        schedule=learning_rate(config.training.optimizer, updates),
        rollout=config.rollout,
        engine=engine,
        reward=config.reward,
        rewards=setup.rewards,
        prompts_per_step=config.data.prompts_per_step,
        mini_batches=config.training.mini_batches,
        epochs=config.training.epochs,
    )
    replica = param_shardings(model, mesh_lib.replica_mesh(sizes.mesh))
    return Machinery(
        context=context,
        stages={name: make(context) for name, make in setup.builders.items()},
        coordinator=Coordinator(sizes.packing, {mesh_lib.mesh_layout(mesh): mesh}),
        sync=WeightSync(replica, local, sizes.engine.dtype),
        mesh=mesh,
    )


def make_engine(source: ModelSource, config: Config, sizes: Sizes) -> RolloutEngine:
    """This process's sampler engine."""
    return RolloutEngine(
        source.config,
        sizes.engine,
        mesh_lib.sampler_mesh(sizes.mesh),
        stop_ids=source.tokenizer.stop_ids,
        seed=config.seed,
        tokenizer=source.tokenizer,
    )


def initial_states(
    setup: Setup, machinery: Machinery, restored: TrainState | None
) -> dict[str, Any]:
    """States by state_key: the actor, and where the plan has one the frozen reference."""
    model, mesh = setup.source.config, machinery.mesh
    has_reference = any(task.state_key == "reference" for task in setup.plan.tasks)
    states: dict[str, Any] = {}
    if has_reference:
        states["reference"] = load_or_init_params(setup.source, setup.config.seed, mesh)
    if restored is not None:
        return states | {"actor": restored}
    if has_reference:  # a copy of its own: the actor's parameters are donated from step to step
        params = jax.tree.map(lambda x: x.copy(), states["reference"])
    else:
        params = load_or_init_params(setup.source, setup.config.seed, mesh)
    return states | {"actor": init_state(params, model, machinery.context.optimizer, mesh)}
