"""One step of configs/tiny.py on whatever devices and processes it finds; run by test_parity.py.

    python tests/support/parity_worker.py --out=DIR --batch=recorded.pkl [--partial_batches=5]
        [--override=mesh.tensor=2]

Samples, then updates on the recorded batch, which the first run writes. Process 0 writes
DIR/grads.npz (whole gradients by parameter), DIR/metrics.json and, like every process,
DIR/responses-P.pkl.
"""

import argparse
import functools
import json
import os
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from distflow_jax.cluster import job, processes
from distflow_jax.coordinator.assignment import data_ranks
from distflow_jax.coordinator.batch_metrics import (
    batch_metrics,
    gather_images,
    gather_table,
    image_metrics,
)
from distflow_jax.dag.plan_walker import make_runner, run_step
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.environments.episodes import single_turn, turn_columns
from distflow_jax.images.prompt_images import prompt_images, to_bytes
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.planning.plan_run import prepare
from distflow_jax.planning.run_models import States
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.rollout.sampler import SamplerState, sample
from distflow_jax.runtime.build import build
from distflow_jax.stages.stage_context import routed_rows
from distflow_jax.training.expert_balance import balanced
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.update import (
    UpdateShape,
    accumulate,
    accumulate_gradients,
    accumulator_specs,
    divide,
    empty,
)
from support.partial_batches import cut, of_rows
from support.tiny_config import tiny_config

OVERRIDES = ["algorithm.kl_coef=0.05", "training.row_tokens=256", "eval.dataset="]


def score(counter: int, sample: int) -> float:
    """A score that every layout gives alike."""
    return float((counter * 31 + sample * 17) % 7) / 6


def main():
    """Runs the step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--batch", type=pathlib.Path, required=True)
    parser.add_argument("--override", action="append", default=[])
    parser.add_argument(
        "--partial_batches",
        type=int,
        default=0,
        help="cut the gradient's step into partial batches",
    )
    args = parser.parse_args()
    processes.initialize(job.find(os.environ))
    config = tiny_config(*OVERRIDES, *args.override)
    prepared = prepare(config)
    runtime = build(prepared, Spans())
    mesh = runtime.meshes[prepared.sizes.mesh.layout]
    states = States(prepared.models, prepared.source, config, runtime.meshes, "float32").initial({})
    engine = runtime.engine
    weights = runtime.sync(states["actor"].params)
    sampler = SamplerState(weights, 0, engine.init_decode_state())
    prompts = next(prepared.loader)
    args.out.mkdir(parents=True, exist_ok=True)
    _, responses, _ = sample(
        engine,
        sampler,
        prompts,
        SamplingParams(config.rollout.num_samples, config.rollout.max_response_length),
    )
    sampled = {(r.prompt.counter, r.sample): (r.tokens, r.margin) for r in responses}
    if runtime.member == 0:  # the hosts of a sampler have the same responses
        mine = args.out / f"responses-{processes.process_index()}.pkl"
        mine.write_bytes(pickle.dumps(sampled))
    if not args.batch.exists():
        args.batch.write_bytes(pickle.dumps({(r.prompt.counter, r.sample): r for r in responses}))
    recorded = pickle.loads(args.batch.read_bytes())

    gradients = {}

    def rollout(state, fields, options):
        wanted = [recorded[counter, sample] for counter, sample in fields["uid"].tolist()]
        written = turn_columns([single_turn(r) for r in wanted])
        return state, {name: written[name] for name in sampler_node.writes}, {}

    def reward(state, fields, options):
        scores = [score(counter, sample) for counter, sample in fields["uid"].tolist()]
        return state, {"score": np.array(scores, np.float32)}, {}

    units = {unit.name: unit for unit in prepared.plan.units}
    sampler_node = units["rollout"].tasks[0].node
    update = runtime.runners["actor_train"]
    rows = prepared.sizes.rows_at_a_time(prepared.sizes.mesh.layout)
    shape = UpdateShape(mesh, rows, 16)
    objective = policy_objective(
        prepared.source.config, config.algorithm, prepared.sizes.forward, max_response=16
    )

    objective = balanced(objective, config.training.balance_coef)
    one, in_partial_batches = jnp.float32(1.0), {}

    @jax.jit
    def gradient(params, batch):
        with use_mesh(mesh):
            batch = jax.tree.map(lambda x: x[0], batch)
            return accumulate_gradients(params, batch, one, shape=shape, objective=objective)[0]

    def gradient_in_partial_batches(params, batch):
        batch, given = jax.tree.map(lambda x: x[0], batch), {"shape": shape, "objective": objective}
        specs = accumulator_specs(params, batch, **given)
        layouts = jax.tree.map(lambda x: x.sharding, specs)

        @functools.partial(jax.jit, out_shardings=layouts)
        def add(params, sums, batch, part_R):
            with use_mesh(mesh):
                return accumulate(params, sums, of_rows(batch, part_R), one, **given)

        sums = jax.jit(lambda: empty(specs), out_shardings=layouts)()
        for part_R in cut(0, batch.advantage.shape[0], partial_batches=args.partial_batches):
            sums = add(params, sums, batch, part_R)
        grads, metrics = jax.jit(lambda sums: divide(sums, objective))(sums)
        in_partial_batches.update(metrics)
        return grads

    def train(states, values):
        edges = units["actor_train"].inputs
        fields = {edge.field: value for edge, value in zip(edges, values, strict=True)}
        batch = PolicyBatch(
            routed_rows(fields),
            fields["advantage"],
            fields["rollout_logp"],
            None,
            fields["ref_logp"],
        )
        found = gradient_in_partial_batches if args.partial_batches else gradient
        gradients.update(found(states["actor"].params, batch))
        return update(states, values)

    made = {"rollout": rollout, "reward": reward}
    own = {name: make_runner(units[name], made) for name in made}
    runners = runtime.runners | own | {"actor_train": train}
    runtime.coordinator.begin(loader_columns(prompts, config.rollout.num_samples))
    _, metrics = run_step(prepared.plan, 1, runners, states, runtime.coordinator, Spans().span)
    metrics = {
        name: float(x) for name, x in jax.device_get(dict(metrics) | in_partial_batches).items()
    }
    table = gather_table(runtime.coordinator.samples())
    metrics |= batch_metrics(table, runtime.coordinator.tokens_per_rank())
    if prepared.loader.sees:
        layout, coordinator = prepared.sizes.mesh.layout, runtime.coordinator
        metrics |= image_metrics(gather_images(coordinator.image_counts()))
        sent = [to_bytes(p.tokens, prompt_images(p.images, p.patch)).nbytes for p in prompts]
        own = sum(sent) if runtime.member == 0 else 0
        metrics["perf/image_bytes"] = float(processes.all_gather_ints(np.array([own])).sum())
        metrics["perf/data_ranks"] = float(data_ranks(layout))
        metrics["perf/anything_moves"] = float(coordinator.shares.anything_moves(layout))
    gather = functools.partial(multihost_utils.process_allgather, tiled=True)
    whole = {name: np.asarray(gather(x)) for name, x in flatten_dict(gradients, sep="/").items()}
    if processes.process_index() == 0:
        np.savez(args.out / "grads.npz", **{k.replace("/", "."): v for k, v in whole.items()})
        (args.out / "metrics.json").write_text(json.dumps(metrics))
    prepared.rewards.close()
    processes.shutdown()


if __name__ == "__main__":
    main()
