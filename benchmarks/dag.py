"""Cost of the graph itself, and savings from fusing nodes into one program.

    python benchmarks/dag.py

Runtime: a graph of host and device nodes whose functions do almost nothing, walked by the run's own
loop with the run's own coordinator. Times per node are those of the controller without JAX's
dispatch of programs; nothing here waits for a device. Fusion: old log-probs, values and reference
log-probs of PPO's graph as one program and as three, interleaved.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.batch import Prompt
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.plan_walker import make_runner, run_step
from distflow_jax.dag.planner import HOST, plan
from distflow_jax.data.loader import DataConfig
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel.mesh import MeshSizes, role_mesh
from distflow_jax.planning.field_specs import FieldSpecs
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.planning.unit_programs import Program, trace_plan
from distflow_jax.programs.costs import costs_of
from distflow_jax.rollout.rollout_config import RolloutConfig
from distflow_jax.runtime.build import trace
from distflow_jax.training.training_config import TrainingConfig

PROMPTS, SAMPLES, TOKENS = 8, 4, 16


def small_graph(nodes: int) -> Graph:
    """A rollout, then a chain of `nodes` nodes on the host, then one of as many on the mesh."""

    def chain(role: str, first: str, reads: str) -> list[Node]:
        made = []
        for i in range(nodes):
            name, field = f"{role.lower()}{i}", f"{role.lower()}_field{i}"
            made.append(Node(name, role, "COMPUTE", [first], {"x": reads}, {"y": field}, fn="m:f"))
            first, reads = name, field
        return made

    rollout = Node("rollout", "ROLLOUT", "COMPUTE", [], ["prompt"], ["score"], fn="m:f")
    hosted = chain("REWARD", "rollout", "score")
    return Graph("chains", [rollout, *hosted, *chain("ACTOR", hosted[-1].id, "score")])


def graph_cost(nodes: int, steps: int, *, fuse: bool) -> dict[str, float]:
    """Milliseconds of the controller's wall time per step, and per node, dispatch excluded."""
    sizes = MeshSizes(jax.device_count(), 1)
    mesh = role_mesh(sizes)
    limits = RowLimits(tokens=64, sequences=8, shared=True, group_size=0)
    packing = PackingPlan(limits, 1, PROMPTS, {sizes.layout: PROMPTS * SAMPLES}, sizes.layout)
    layouts = {"ROLLOUT": HOST, "REWARD": HOST, "ACTOR": sizes.layout}
    given = ("prompt", "response", "response_mask")
    made = plan(small_graph(nodes), layouts, given, fuse=fuse)

    def on_host(state, fields, options):
        return state, {"y": fields["x"]}, {}

    def on_mesh(state, fields, options):
        return state, {"y": fields["x"] + jnp.float32(1)}, {}

    def rollout(state, fields, options):
        return state, {"score": np.zeros(len(fields["prompt"]), np.float32)}, {}

    stages = {t.node.id: on_mesh if t.layout == sizes.layout else on_host for t in made.tasks}
    stages["rollout"] = rollout
    programs = trace_plan(made, stages, {}, FieldSpecs(packing, {sizes.layout: mesh}))
    for program in programs.values():
        program.compile()
    runners = {u.name: make_runner(u, stages) for u in made.units} | programs
    dispatch = [0.0]

    def timed(program: Program):
        def run(states, values):
            start = time.perf_counter()
            result = program(states, values)
            dispatch[0] += time.perf_counter() - start
            return result

        return run

    runners |= {name: timed(program) for name, program in programs.items()}
    writers = {t.node.id: t.layout for t in made.tasks} | {None: HOST}
    packs = {sizes.layout: {("rollout", "score")}}
    coordinator = Coordinator(packing, {sizes.layout: mesh}, writers, packs)
    tokens = np.arange(TOKENS, dtype=np.int32)
    prompts = [Prompt(i, i, tokens, "", "benchmark", None, {}) for i in range(PROMPTS)]
    columns = loader_columns(prompts, SAMPLES)
    columns |= {
        "response": [tokens] * len(columns["prompt"]),
        "response_mask": [tokens >= 0] * len(columns["prompt"]),
    }
    spans, walls, dispatched = Spans(), [], []
    for step in range(1, steps + 4):
        coordinator.begin(columns)
        _ = coordinator.shares  # packs the step now: packing is not part of the graph's cost
        start, dispatch[0] = time.perf_counter(), 0.0
        run_step(made, step, runners, {}, coordinator, spans.span)
        walls.append(time.perf_counter() - start)
        dispatched.append(dispatch[0])
        spans.take()
    walls, dispatched = walls[3:], dispatched[3:]
    own = [1e3 * (wall - d) for wall, d in zip(walls, dispatched, strict=True)]
    return {
        "nodes": len(made.tasks),
        "units": len(made.units),
        "step_ms": 1e3 * statistics.median(walls),
        "of which dispatch_ms": 1e3 * statistics.median(dispatched),
        "graph_ms_per_node": statistics.median(own) / len(made.tasks),
    }


def inference_programs(fuse: bool, source: str) -> list[Program]:
    """PPO's programs before the advantage, compiled."""
    config = Config(
        dag="ppo",
        model=ModelSourceConfig(source),
        algorithm=AlgorithmConfig(kl_coef=0.1),
        data=DataConfig(prompts_per_step=16, max_prompt_length=128),
        rollout=RolloutConfig(num_samples=4, max_response_length=16),
        training=TrainingConfig(row_tokens=256, mini_batches=2, fuse=fuse),
    )
    made = trace(plan_run(config, Machine.current()))
    chosen = [
        p for p in made.values() if {t.node.type for t in p.unit.tasks} == {"MODEL_INFERENCE"}
    ]
    for program in chosen:
        program.compile()
    return chosen


def fill(spec: Any, rng: np.random.Generator) -> Any:
    """Random arrays of a spec; a quarter of the rows is filled, as in a typical step."""

    def one(x):
        if x.dtype == jnp.bool_:
            values = rng.random(x.shape) < 0.5
        elif x.dtype == jnp.int32:
            values = rng.integers(0, 4, x.shape)
        else:
            values = 0.1 * rng.standard_normal(x.shape)
        if len(x.shape) == 3:
            values[:, x.shape[1] // 4 :] = 0
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(one, spec)


def fusion(repeats: int, source: str) -> dict[str, Any]:
    """Seconds of one fused program and of one per node, interleaved; their compile time, memory."""
    rng, sides = np.random.default_rng(0), {}
    for name, fuse in (("fused", True), ("apart", False)):
        start = time.perf_counter()
        programs = inference_programs(fuse, source)
        made = {"compile_s": time.perf_counter() - start, "programs": programs}
        costs = [costs_of(p.traced, p.compile()) for p in programs]
        made["bytes"] = sum(c.bytes_accessed for c in costs)
        made["temp_bytes"] = max(c.temp_bytes for c in costs)
        sides[name] = made
    (whole,) = sides["fused"]["programs"]
    states = fill(whole.given_states, rng)
    values = [fill(spec, rng) for spec in whole.inputs]

    def run(programs):
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = [p(states, values[: len(p.inputs)])[1] for p in programs]
        issued = time.perf_counter() - wall
        jax.block_until_ready(outputs)
        return time.perf_counter() - wall, time.process_time() - cpu, issued

    spent: dict[str, list[tuple[float, float, float]]] = {"fused": [], "apart": []}
    for i in range(repeats + 1):
        for name in ("fused", "apart") if i % 2 else ("apart", "fused"):
            found = run(sides[name]["programs"])
            if i:
                spent[name].append(found)
    result = {}
    for name, times in spent.items():
        wall, cpu, issued = (statistics.median(x) for x in zip(*times, strict=True))
        result[name] = {
            "programs": len(sides[name]["programs"]),
            "seconds": wall,
            "cpu_seconds": cpu,
            "issued_ms": 1e3 * issued,
            "compile_s": sides[name]["compile_s"],
            "bytes_at_most": sides[name]["bytes"],
            "temp_bytes": sides[name]["temp_bytes"],
        }
    ratios = [a[0] / f[0] for a, f in zip(spent["apart"], spent["fused"], strict=True)]
    return result | {"apart / fused, median": statistics.median(ratios)}


def main() -> None:
    """Runs both and prints one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=50, help="in each of the two chains")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--source",
        default="random:llama?hidden=128&layers=4&heads=4&kv_heads=2&mlp=384&vocab=512",
        help="the model of the fusion part",
    )
    args = parser.parse_args()
    for fuse in (True, False):
        found = graph_cost(args.nodes, args.steps, fuse=fuse)
        print(json.dumps({"graph": "fused" if fuse else "apart"} | found), flush=True)
    print(json.dumps({"fusion": fusion(args.repeats, args.source)}), flush=True)


if __name__ == "__main__":
    main()
