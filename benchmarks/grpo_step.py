"""Time of one GRPO step on a small Llama, alone or alternating with google-tunix.

python benchmarks/grpo_step.py --case=early --beta=0.04
python benchmarks/grpo_step.py --compare --peer-python=/tmp/peer_venv/bin/python

8 prompts x 8 samples, random prompts of exactly 32 ids, a 4.98 M-parameter model in float32 on one
CPU device, one update per step. Case "fixed": 64 new tokens, nothing ends a response. Case "early":
up to 256, and the last 2 % of the vocabulary end a response. Every step walks the grpo plan with
the run's own engine, coordinator and stages; only prompts and reward are made here.

--compare runs both cases with and without KL, with both sides resident and one of them running at a
time. It exits with 1 if a goal is missed: "fixed" 1.2x faster per step, "early" 3x more useful
tokens per second.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from peers import paced
from peers.paced import report, wait_for_turn

from distflow_jax.batch import Prompt
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.data_config import DataConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.config.training_config import OptimizerConfig, TrainingConfig
from distflow_jax.config.upkeep_config import CoordinatorConfig
from distflow_jax.dag.plan_walker import Runner, Stage, make_runner, run_step
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.models.weights.source import open_model
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.spans import Spans
from distflow_jax.planning import plan_run
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.run_models import States, models_of
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.rollout.sampler import SamplerState, update_weights
from distflow_jax.runtime import build as runtime_lib

PEER = pathlib.Path(__file__).parent / "peers" / "tunix_grpo.py"
SHARED_FLAGS = ("new_tokens", "eos_frac", "prompts", "samples", "prompt_length", "beta", "lr")
# the work, and our own settings for it (docs/benchmarks.md gives the reasons)
CASES: dict[str, dict[str, Any]] = {
    "fixed": {
        "new_tokens": 64,
        "eos_frac": 0.0,
        "slots": 64,
        "tokens_per_call": 64,
        "row_tokens": 544,  # a prompt and its 8 responses
        "micro_batch_rows": 2,
    },
    "early": {
        "new_tokens": 256,
        "eos_frac": 0.02,
        "slots": 24,
        "tokens_per_call": 16,
        "row_tokens": 320,
        "micro_batch_rows": 2,
    },
}
GOALS = {"fixed": ("step_best", 1.2), "early": ("tokens_per_s_median", 3.0)}
PHASES = ("step_s", "rollout_s", "reference_s", "update_s", "cpu_s")
_PHASE_OF_NODE = {"rollout": "rollout_s", "reference": "reference_s", "actor_train": "update_s"}


def parse_arguments() -> argparse.Namespace:
    """Flags; each setting of a case can be overridden."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=sorted(CASES), default="fixed")
    for name in CASES["fixed"]:
        kind = float if name == "eos_frac" else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-length", type=int, default=32, help="ids")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL; 0: no reference")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--tied", action="store_true", help="tie embeddings")
    parser.add_argument("--page-size", type=int, default=32, help="tokens per page of the cache")
    parser.add_argument("--steps", type=int, default=12, help="steps, warm-up included")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--json", default="", help="file for the result")
    parser.add_argument("--paced", action="store_true", help="a line of stdin starts each step")
    parser.add_argument("--compare", action="store_true", help="alternate with the peer")
    parser.add_argument("--peer-python", default="", help="interpreter that has google-tunix")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side per case")
    parser.add_argument("--turn", type=int, default=1, help="steps per turn")
    parser.add_argument("--only", choices=sorted(CASES), help="compare this case alone")
    args = parser.parse_args()
    for name, value in CASES[args.case].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.compare and not args.peer_python:
        parser.error(f"--compare needs --peer-python; see {PEER.parent / 'requirements.txt'}")
    if args.steps <= args.warmup:
        parser.error(f"--steps={args.steps} leaves nothing beside --warmup={args.warmup}")
    return args


# -- our side ----------------------------------------------------------------------------------


def make_config(args: argparse.Namespace) -> Config:
    """The run's configuration; the optimizer is the peer's (optax.adamw with its defaults)."""
    tied = int(args.tied)
    return Config(
        model=ModelSourceConfig(
            f"random:llama?hidden=256&layers=6&heads=4&kv_heads=2&mlp=768&vocab=512&tied={tied}"
        ),
        algorithm=AlgorithmConfig(kl_coef=args.beta, clip_low=0.2, clip_high=0.2),
        data=DataConfig(prompts_per_step=args.prompts, max_prompt_length=args.prompt_length),
        rollout=RolloutConfig(
            num_samples=args.samples,
            max_response_length=args.new_tokens,
            num_slots=args.slots,
            tokens_per_call=args.tokens_per_call,
            page_size=args.page_size,
        ),
        coordinator=CoordinatorConfig(overlap_rewards=False),
        training=TrainingConfig(
            steps=args.steps,
            row_tokens=args.row_tokens,
            micro_batch_rows=args.micro_batch_rows,
            optimizer=OptimizerConfig(lr=args.lr, b2=0.999, weight_decay=1e-4, clip_norm=0.0),
        ),
    )


def share_of_lower_half(vocab: int) -> Stage:
    """Reward stage: the share of a response's ids in the lower half of the vocabulary."""

    def reward(state, fields, options):
        score = [np.mean(response < vocab // 2) for response in fields["response"]]
        return state, {"score": np.array(score, np.float32)}, {}

    return reward


def blocking(runner: Runner) -> Runner:
    """Wraps a runner so that it waits for its results: its span is then its time."""

    def wrapper(states, values):
        return jax.block_until_ready(runner(states, values))

    return wrapper


def build(
    args: argparse.Namespace,
) -> tuple[plan_run.PreparedRun, runtime_lib.Runtime, dict[str, Any]]:
    """A run's runtime and first states, with the reward and the end ids of this benchmark."""
    config, machine = make_config(args), Machine.current()
    source = open_model(config.model.source)
    vocab = source.config.vocab_size
    ends = max(1, round(vocab * args.eos_frac)) if args.eos_frac else 0
    tokenizer = dataclasses.replace(source.tokenizer, stop_ids=tuple(range(vocab - ends, vocab)))
    source = dataclasses.replace(source, tokenizer=tokenizer)
    config, graph = plan_run.settle(config)
    sizes = derive_sizes(config, source.config, machine, graph)
    plan = plan_run.make_plan(config, graph, sizes)
    # no loader and no reward pool: prompts and scores are made here
    prepared = plan_run.PreparedRun(
        config=config,
        graph=graph,
        machine=machine,
        source=source,
        sizes=sizes,
        plan=plan,
        models=models_of(plan),
        until=None,
        loader=None,
        eval_prompts=[],
        rewards=None,
        environments=None,
    )
    runtime = runtime_lib.build(prepared, Spans())
    (reward,) = (unit for unit in plan.units if unit.name == "reward")
    runtime.runners["reward"] = make_runner(reward, {"reward": share_of_lower_half(vocab)})
    runtime.runners = {name: blocking(runner) for name, runner in runtime.runners.items()}
    states = States(prepared.models, source, config, runtime.meshes).initial({})
    engine = runtime.engine
    weights = runtime.sync(states["actor"].params)
    states["rollout"] = SamplerState(weights, 0, engine.init_decode_state())
    engine.compile(weights)
    return prepared, runtime, states


def random_prompts(args: argparse.Namespace, vocab: int) -> Iterator[list[Prompt]]:
    """Batches of prompts of exactly `prompt_length` ids; the peer reserves 0 to 2."""
    rng = np.random.default_rng(0)
    for first in range(0, args.steps * args.prompts, args.prompts):
        ids = rng.integers(3, vocab, size=(args.prompts, args.prompt_length), dtype=np.int32)
        yield [Prompt(first + i, first + i, row, "", "random", "", {}) for i, row in enumerate(ids)]


def run_steps(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Runs the steps; yields seconds by phase, CPU seconds, response tokens and compilations."""
    prepared, runtime, states = build(args)
    compilations, spans, coordinator = Compilations(), Spans(), runtime.coordinator
    stop_ids = prepared.source.tokenizer.stop_ids
    prompts = random_prompts(args, prepared.source.config.vocab_size)
    for step, batch in enumerate(prompts, start=1):
        if args.paced:
            wait_for_turn()
        wall, cpu = time.perf_counter(), time.process_time()
        if states["rollout"].version != step - 1:
            params = states["actor"].params
            states["rollout"] = update_weights(states["rollout"], runtime.sync, params, step - 1)
        coordinator.begin(loader_columns(batch, args.samples))
        states, metrics = run_step(
            prepared.plan, step, runtime.runners, states, coordinator, spans.span
        )
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        record = {"step": step, "step_s": time.perf_counter() - wall}
        record |= {"cpu_s": time.process_time() - cpu, "compilations": compilations.take()}
        spent = spans.take()
        record |= {_PHASE_OF_NODE[n]: s for n, s in spent.items() if n in _PHASE_OF_NODE}
        responses = coordinator.samples().response
        # without the end token, which the peer leaves out of its responses
        record["tokens"] = sum(int((~np.isin(r, stop_ids)).sum()) for r in responses)
        yield record | {"reward": float(np.mean(coordinator.samples().fields["score"]))}
    compilations.close()


# -- taking turns ------------------------------------------------------------------------------


def take_turns(args: argparse.Namespace, case: str, beta: float) -> dict[str, list[dict]]:
    """Steps of both sides, `turn` of one and then `turn` of the other, `rounds` times."""
    shared = CASES[case] | {"beta": beta}
    values = {name: shared.get(name, getattr(args, name)) for name in SHARED_FLAGS}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    flags += ["--paced", f"--steps={args.warmup + args.rounds * args.turn}"]
    flags += ["--tied"] if args.tied else []
    programs = {
        "ours": [sys.executable, __file__, f"--case={case}", *flags],
        "peer": [args.peer_python, str(PEER), *flags],
    }
    return paced.take_turns(programs, args.rounds, args.warmup, args.turn)


# -- results -----------------------------------------------------------------------------------


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Best and median of every phase, useful tokens per second, compilations. Over given steps."""
    result: dict[str, float] = {"steps": len(steps)}
    for phase in PHASES:
        if all(phase in s for s in steps):
            values, name = [s[phase] for s in steps], phase.removesuffix("_s")
            result |= {f"{name}_best": min(values), f"{name}_median": statistics.median(values)}
    rates = [s["tokens"] / s["step_s"] for s in steps]
    result |= {"tokens_per_s_best": max(rates), "tokens_per_s_median": statistics.median(rates)}
    result["tokens_mean"] = statistics.fmean(s["tokens"] for s in steps)
    return result | {"compilations": sum(s["compilations"] for s in steps)}


def ratios(ours: dict[str, float], peer: dict[str, float]) -> dict[str, float]:
    """Speedup over the peer: seconds per step, and useful tokens per second."""
    names = [f"{phase}_{kind}" for phase in ("step", "cpu") for kind in ("best", "median")]
    result = {name: peer[name] / ours[name] for name in names}
    rates = ("tokens_per_s_best", "tokens_per_s_median")
    return result | {name: ours[name] / peer[name] for name in rates}


def describe(name: str, result: dict[str, float]) -> str:
    """The summary of one side in one line."""
    names = [key.removesuffix("_best") for key in result if key.endswith("_best")][:-1]
    parts = [f"{x} {result[x + '_best']:.3f}/{result[x + '_median']:.3f} s" for x in names]
    return (
        f"{name:6s} best/median {', '.join(parts)}; useful tokens/s "
        f"{result['tokens_per_s_best']:.0f}/{result['tokens_per_s_median']:.0f} "
        f"({result['tokens_mean']:.0f} a step); compilations {result['compilations']}"
    )


def compare(args: argparse.Namespace) -> bool:
    """All cases with and without KL; prints and writes them. True if every goal is met."""
    report, met = [], True
    for case in [args.only] if args.only else CASES:
        goal, least = GOALS[case]
        for beta in (0.0, 0.04):
            steps = take_turns(args, case, beta)
            sides = {name: summary(records) for name, records in steps.items()}
            times = ratios(sides["ours"], sides["peer"])
            good = times[goal] >= least and sides["ours"]["compilations"] == 0
            met &= good
            print(f"\n{case}, beta {beta}")
            for name, result in sides.items():
                print(describe(name, result))
            print("ours better by " + ", ".join(f"{n} {x:.2f}x" for n, x in times.items()))
            print(f"goal {goal} >= {least}x: {'met' if good else 'MISSED'}", flush=True)
            report.append({"case": case, "beta": beta, **sides, "ratios": times, "records": steps})
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"cases": report}, indent=1) + "\n")
    return met


def main() -> int:
    args = parse_arguments()
    if args.compare:
        return 0 if compare(args) else 1
    jax.config.update("jax_platforms", "cpu")
    records = []
    for record in run_steps(args):
        records.append(record)
        report(record)
    result = summary(records[args.warmup :])
    print(describe(args.case, result))
    if args.json:
        text = json.dumps({"args": vars(args), "result": result, "steps": records}, indent=1)
        pathlib.Path(args.json).write_text(text + "\n")
    if result["compilations"]:
        print("error: something was compiled after the warm-up", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
