"""Time of one GRPO step on a small Llama, alone or alternating with a peer.

python benchmarks/grpo_step.py --case=early --beta=0.04
python benchmarks/grpo_step.py --peer=tunix --peer-python=/tmp/peer/bin/python
python benchmarks/grpo_step.py --peer=trl --peer-python=/tmp/trl_venv/bin/python

Random weights and prompts, float32, one CPU device, one update per step. CASES has the sizes. Every
step walks the grpo plan with the run's own engine, coordinator and stages; only prompts and reward
are made here.

With --peer, ours and the peer's are resident and take turns, each tuned as its documents say
(peers/), in two cases also at the defaults of its package. Prints the tables of docs/peers.md:
CPU-seconds, seconds, memory, and what a start costs, up to the end of the first step. "Times ours"
is the best step's number over that of ours, tuned: other jobs only add. Where there are others, pin
all sides to a core (taskset -c 0): torch's threads spin while they wait for each other. It exits
with 1 if a goal is missed over the tuned peer: "fixed" 1.2x faster per step, "early" 3x more useful
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
from peers import paced, work
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

PEERS = {"tunix": "tunix_grpo.py", "trl": "trl_grpo.py"}


@dataclasses.dataclass(frozen=True)
class Case:
    """Flags of the work (peers/work.py), our tuned settings for it, and turns beside a peer."""

    work: dict[str, Any]
    rollout: dict[str, int]
    training: dict[str, int]
    rounds: int
    defaults: bool = False  # whether both sides also run at the defaults of their packages


CASES = {
    "fixed": Case(
        {"new_tokens": 64},
        {"num_slots": 64, "tokens_per_call": 64, "page_size": 32},
        {"row_tokens": 544, "micro_batch_rows": 2},  # a prompt and its 8 responses
        rounds=4,
        defaults=True,
    ),
    "early": Case(
        {"new_tokens": 256, "eos_frac": 0.02},
        {"num_slots": 24, "tokens_per_call": 16, "page_size": 32},
        {"row_tokens": 320, "micro_batch_rows": 2},
        rounds=2,
    ),
    "long": Case(
        {"prompts": 2, "samples": 4, "prompt_length": 256, "new_tokens": 1024},
        {"num_slots": 8, "tokens_per_call": 64, "page_size": 32},
        {"row_tokens": 1280, "micro_batch_rows": 1},
        rounds=2,
    ),
    "large": Case(
        {"model": "135m", "prompts": 2, "samples": 4},
        {"num_slots": 8, "tokens_per_call": 64, "page_size": 32},
        {"row_tokens": 288, "micro_batch_rows": 2},
        rounds=2,
        defaults=True,
    ),
}
GOALS = {"fixed": ("step_s", 1.2), "early": ("tokens_per_s", 3.0)}
_PHASE_OF_NODE = {"rollout": "rollout_s", "reference": "reference_s", "actor_train": "update_s"}


def parse_arguments() -> argparse.Namespace:
    """Flags; those of the work that a case sets are defaults, which the command line can change."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--case", choices=sorted(CASES), default="fixed")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[first]
    )
    work.add_flags(parser)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--json", default="", help="file for the result")
    parser.add_argument("--peer", choices=sorted(PEERS), help="alternate with this peer")
    parser.add_argument("--peer-python", default="", help="interpreter that has the peer")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each side; 0: the case's")
    parser.add_argument("--only", default="", help="cases beside the peer, comma-separated")
    case = CASES[first.parse_known_args()[0].case]
    parser.set_defaults(**case.work)
    args = parser.parse_args()
    if args.peer and not args.peer_python:
        parser.error(f"--peer needs --peer-python; see benchmarks/peers/{PEERS[args.peer]}")
    args.only = args.only.split(",") if args.only else list(CASES)
    for name in args.only:
        if name not in CASES:
            parser.error(f"--only={name}: known are {', '.join(CASES)}")
    if args.steps <= args.warmup:
        parser.error(f"--steps={args.steps} leaves nothing beside --warmup={args.warmup}")
    return args


# -- our side ----------------------------------------------------------------------------------


def make_config(args: argparse.Namespace) -> Config:
    """The run's configuration; the optimizer is that of the peers, AdamW without clipping."""
    shape, case = work.MODELS[args.model], CASES[args.case]
    options = "&".join(f"{name}={value}" for name, value in shape.items())
    rollout, training = case.rollout, case.training
    if args.defaults:  # rows must hold a prompt with its response
        longest = args.prompt_length + args.new_tokens
        rollout, training = {}, {"row_tokens": max(TrainingConfig().row_tokens, longest)}
    return Config(
        model=ModelSourceConfig(f"random:llama?{options}&tied={int(args.model == '135m')}"),
        algorithm=AlgorithmConfig(kl_coef=args.beta, clip_low=0.2, clip_high=0.2),
        data=DataConfig(prompts_per_step=args.prompts, max_prompt_length=args.prompt_length),
        rollout=RolloutConfig(
            num_samples=args.samples, max_response_length=args.new_tokens, **rollout
        ),
        coordinator=CoordinatorConfig(overlap_rewards=False),
        training=TrainingConfig(
            steps=args.steps,
            optimizer=OptimizerConfig(lr=args.lr, b2=0.999, weight_decay=1e-4, clip_norm=0.0),
            **training,
        ),
    )


def share_of_lower_half(vocab: int) -> Stage:
    """Reward stage: the share of a response's ids in the lower half of the vocabulary."""

    def reward(state, fields, options):
        score = [work.lower_half(response, vocab) for response in fields["response"]]
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
    stop_ids = tuple(work.end_ids(vocab, args.eos_frac))
    tokenizer = dataclasses.replace(source.tokenizer, stop_ids=stop_ids)
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
    dtype = sizes.forward.compute_dtype
    states = States(prepared.models, source, config, runtime.meshes, dtype).initial({})
    engine = runtime.engine
    weights = runtime.sync(states["actor"].params)
    states["rollout"] = SamplerState(weights, 0, engine.init_decode_state())
    engine.compile(weights)
    return prepared, runtime, states


def random_prompts(args: argparse.Namespace) -> Iterator[list[Prompt]]:
    """Batches of prompts of exactly `prompt_length` ids."""
    for step, batch in enumerate(work.prompt_ids(args)):
        first = step * args.prompts
        yield [Prompt(first + i, first + i, x, "", "random", "", {}) for i, x in enumerate(batch)]


def run_steps(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Runs the steps; yields seconds by phase, CPU seconds, response tokens and compilations."""
    prepared, runtime, states = build(args)
    compilations, spans, coordinator = Compilations(), Spans(), runtime.coordinator
    stop_ids = prepared.source.tokenizer.stop_ids
    for step, batch in enumerate(random_prompts(args), start=1):
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


# -- beside a peer -----------------------------------------------------------------------------


def take_turns(args: argparse.Namespace, case: str, beta: float) -> dict[str, list[dict]]:
    """Steps of all sides, one after the other; warm-up steps included."""
    rounds = args.rounds or CASES[case].rounds
    values = CASES[case].work | {"beta": beta, "steps": args.warmup + rounds}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    peer = [args.peer_python, str(pathlib.Path(__file__).parent / "peers" / PEERS[args.peer])]
    programs = {
        "ours": [sys.executable, __file__, f"--case={case}"],
        args.peer: peer,
    }
    if CASES[case].defaults:
        sides = {
            f"{name}, defaults": [*command, "--defaults"] for name, command in programs.items()
        }
        programs |= sides
    programs = {name: [*command, *flags, "--paced"] for name, command in programs.items()}
    return paced.take_turns(programs, rounds, args.warmup)


def summary(steps: list[dict[str, float]], warmup: int) -> dict[str, float]:
    """Medians over the steps after the warm-up, and what the process needed until it began."""
    first, timed = steps[0], steps[warmup:]
    found = {
        name: statistics.median(step[name] for step in timed)
        for name in ("cpu_s", "step_s", "rollout_s", "update_s", "tokens")
        if all(name in step for step in timed)
    }
    found["tokens_per_s"] = statistics.median(s["tokens"] / s["step_s"] for s in timed)
    found["compilations"] = sum(step.get("compilations", 0) for step in timed)
    if "since_start_s" in first:
        found |= {"start_s": first["since_start_s"], "start_cpu_s": first["process_cpu_s"]}
        found["peak_gb"] = timed[-1]["peak_gb"]
    return found


def table(case: str, beta: float, sides: dict[str, list[dict]], warmup: int) -> list[str]:
    """Rows of the table of docs/peers.md for a case."""
    best = {
        name: {key: min(s[key] for s in steps[warmup:]) for key in ("cpu_s", "step_s")}
        for name, steps in sides.items()
    }
    rows = []
    for name, steps in sides.items():
        of, cells = summary(steps, warmup), [case if not beta else f"{case}, KL", name]
        for key, found in best[name].items():
            ratio = found / best["ours"][key]
            cells += [f"{found:.2f} / {of[key]:.2f}", f"{ratio:.2f}"]
        cells += [f"{of['rollout_s']:.2f}", f"{of['tokens_per_s']:,.0f}", f"{of['peak_gb']:.2f}"]
        cells += [f"{of['start_cpu_s']:.1f}", f"{of['start_s']:.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


TITLES = ("case", "side", "CPU-s a step, best / median", "times ours", "s, best / median",
          "times ours", "rollout, s", "useful tokens/s", "peak GiB", "start, CPU-s",
          "start, s")  # fmt: skip


def compare(args: argparse.Namespace) -> bool:
    """All cases beside the peer; prints and writes them. True if every goal is met."""
    found, met = [], True
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}", flush=True)
    for case in args.only:
        sides = take_turns(args, case, args.beta)
        print(*table(case, args.beta, sides, args.warmup), sep="\n", flush=True)
        found.append({"case": case, "beta": args.beta, "sides": sides})
        ours, peer = (summary(sides[name], args.warmup) for name in ("ours", args.peer))
        met &= ours["compilations"] == 0
        if case in GOALS:
            name, least = GOALS[case]
            times = ours[name] / peer[name] if name == "tokens_per_s" else peer[name] / ours[name]
            print(f"{case}: {name} {times:.2f}x, goal {least}x", file=sys.stderr)
            met &= times >= least
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return met


def main() -> int:
    args = parse_arguments()
    if args.peer:
        return 0 if compare(args) else 1
    jax.config.update("jax_platforms", "cpu")
    records = []
    for record in run_steps(args):
        records.append(record)
        report(record)
    result = summary(records, args.warmup)
    print(", ".join(f"{name} {value:.4g}" for name, value in result.items()))
    if args.json:
        text = json.dumps({"args": vars(args), "result": result, "steps": records}, indent=1)
        pathlib.Path(args.json).write_text(text + "\n")
    if result["compilations"]:
        print("error: something was compiled after the warm-up", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
