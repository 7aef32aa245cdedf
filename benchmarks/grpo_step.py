"""Time of one GRPO step on a small Llama, alone or alternating with a peer.

python benchmarks/grpo_step.py --case=early --beta=0.04      # a line of JSON for each step
python benchmarks/grpo_step.py --peer=tunix --peer-python=/tmp/peer/bin/python
python benchmarks/grpo_step.py --peer=trl --peer-python=/tmp/trl_venv/bin/python

Random weights and prompts, float32, one CPU device, one update per step. CASES has the sizes. Every
step walks the grpo plan with the run's own engine, coordinator and stages; only prompts and reward
are made here.

With --peer, ours and the peer's are resident and take turns, each tuned as its documents say
(peers/), in two cases also at the defaults of its package. Prints the table of docs/peers.md:
CPU-seconds, seconds, memory, and what a start costs, up to the end of the first step. "Times ours"
is the best step's number over that of ours, tuned: other jobs only add. Where there are others, pin
all sides to a core (taskset -c 0): torch's threads spin while they wait for each other. Exits with
1 if ours compiles after its warm-up.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from command_line import parser_of, print_header, print_row
from peers import paced, work

from distflow_jax.batch import Prompt
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.data_config import DataConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.config.training_config import OptimizerConfig, TrainingConfig
from distflow_jax.config.upkeep_config import CoordinatorConfig
from distflow_jax.dag.plan_walker import Stage, make_runner, run_step
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.spans import Spans
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import PreparedRun, plan_run
from distflow_jax.planning.run_models import States
from distflow_jax.rollout.sampler import SamplerState, update_weights
from distflow_jax.runtime import build as runtime_lib

PEERS = ("tunix", "trl")


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
_PHASE_OF_NODE = {"rollout": "rollout_s", "reference": "reference_s", "actor_train": "update_s"}


def parse_arguments() -> argparse.Namespace:
    """Flags; those of the work that a case sets are defaults, which the command line can change."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--case", choices=sorted(CASES), default="fixed")
    parser = parser_of(__doc__, first)
    work.add_flags(parser)
    parser.add_argument("--peer", choices=PEERS, help="alternate with this peer")
    parser.add_argument("--peer-python", default="", help="interpreter that has the peer")
    parser.add_argument("--warmup", type=int, default=2, help="steps beside it before those timed")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each side; 0: the case's")
    parser.add_argument("--only", default="", help="cases beside the peer, comma-separated")
    case = CASES[first.parse_known_args()[0].case]
    parser.set_defaults(**case.work)
    args = parser.parse_args()
    if args.peer and not args.peer_python:
        parser.error(f"--peer needs --peer-python; see benchmarks/peers/{args.peer}_grpo.py")
    args.only = args.only.split(",") if args.only else list(CASES)
    if unknown := set(args.only) - set(CASES):
        parser.error(f"--only={','.join(unknown)}: known are {', '.join(CASES)}")
    return args


# -- our side ----------------------------------------------------------------------------------


def make_config(args: argparse.Namespace) -> Config:
    """The run's configuration; the optimizer is that of the peers, AdamW without clipping."""
    rollout, training = CASES[args.case].rollout, CASES[args.case].training
    if args.defaults:  # rows must hold a prompt with its response
        longest = args.prompt_length + args.new_tokens
        rollout, training = {}, {"row_tokens": max(TrainingConfig().row_tokens, longest)}
    return Config(
        model=ModelSourceConfig(work.source_of(args.model)),
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


def build(
    args: argparse.Namespace, clock: paced.StepClock
) -> tuple[PreparedRun, runtime_lib.Runtime, dict[str, Any]]:
    """A run's runtime, timed by `clock`, and its first states, with the reward and the end ids of
    this benchmark."""
    planned = plan_run(make_config(args), Machine.current())
    vocab = planned.source.config.vocab_size
    stop_ids = tuple(work.end_ids(vocab, args.eos_frac))
    tokenizer = dataclasses.replace(planned.source.tokenizer, stop_ids=stop_ids)
    planned.source = dataclasses.replace(planned.source, tokenizer=tokenizer)
    # no loader and no reward pool: prompts and scores are made here
    prepared = PreparedRun(
        **vars(planned), loader=None, eval_prompts=[], rewards=None, environments=None
    )
    runtime = runtime_lib.build(prepared, Spans())
    (reward,) = (unit for unit in prepared.plan.units if unit.name == "reward")
    runtime.runners["reward"] = make_runner(reward, {"reward": share_of_lower_half(vocab)})
    runtime.runners = {
        name: clock.timed(_PHASE_OF_NODE.get(name, name), runner, jax.block_until_ready)
        for name, runner in runtime.runners.items()
    }
    dtype = prepared.sizes.forward.compute_dtype
    states = States(prepared.models, prepared.source, prepared.config, runtime.meshes, dtype)
    first, engine = states.initial({}), runtime.engine
    weights = runtime.sync(first["actor"].params)
    first["rollout"] = SamplerState(weights, 0, engine.init_decode_state())
    engine.compile(weights)
    return prepared, runtime, first


def random_prompts(args: argparse.Namespace) -> Iterator[list[Prompt]]:
    """Batches of prompts of exactly `prompt_length` ids."""
    for step, batch in enumerate(work.prompt_ids(args)):
        first = step * args.prompts
        yield [Prompt(first + i, first + i, x, "", "random", "", {}) for i, x in enumerate(batch)]


def run_steps(args: argparse.Namespace) -> None:
    """Runs the steps, and reports each."""
    clock = paced.StepClock(args.paced)
    prepared, runtime, states = build(args, clock)
    compilations, coordinator = Compilations(), runtime.coordinator
    stop_ids = prepared.source.tokenizer.stop_ids
    for step, batch in enumerate(random_prompts(args), start=1):
        clock.begin()
        if states["rollout"].version != step - 1:
            params = states["actor"].params
            states["rollout"] = update_weights(states["rollout"], runtime.sync, params, step - 1)
        coordinator.begin(loader_columns(batch, args.samples))
        span = Spans().span
        states, _ = run_step(prepared.plan, step, runtime.runners, states, coordinator, span)
        responses = coordinator.samples().response
        # without the end token, which the peer leaves out of its responses
        clock.add("tokens", sum(int((~np.isin(r, stop_ids)).sum()) for r in responses))
        clock.add("compilations", compilations.take())
        clock.end()


# -- beside a peer -----------------------------------------------------------------------------


def take_turns(args: argparse.Namespace, case: str) -> dict[str, list[dict[str, float]]]:
    """Steps of all sides, one after the other; warm-up steps included."""
    rounds = args.rounds or CASES[case].rounds
    values = CASES[case].work | {"beta": args.beta, "steps": args.warmup + rounds}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    programs = {
        "ours": [sys.executable, __file__, f"--case={case}"],
        args.peer: paced.peer_command(args.peer_python, f"{args.peer}_grpo"),
    }
    if CASES[case].defaults:
        programs |= {
            f"{name}, defaults": [*command, "--defaults"] for name, command in programs.items()
        }
    programs = {name: [*command, *flags, "--paced"] for name, command in programs.items()}
    return paced.take_turns(programs, rounds, args.warmup)


TITLES = ("case", "side", "CPU-s a step, best / median", "times ours", "s, best / median",
          "times ours", "rollout, s", "useful tokens/s", "peak GiB", "start, CPU-s",
          "start, s")  # fmt: skip


def compare(args: argparse.Namespace) -> bool:
    """All cases beside the peer, in a table; whether ours compiled nothing in timed steps."""
    warm = True
    print_header(*TITLES)
    for case in args.only:
        sides = take_turns(args, case)
        best = {
            key: min(step[key] for step in sides["ours"][args.warmup :])
            for key in ("cpu_s", "step_s")
        }
        for name, steps in sides.items():
            timed = {key: [s[key] for s in steps[args.warmup :]] for key in (*best, "rollout_s")}
            rates = [step["tokens"] / step["step_s"] for step in steps[args.warmup :]]
            cells = [case if not args.beta else f"{case}, KL", name]
            for key, least in best.items():
                cells.append(f"{min(timed[key]):.2f} / {statistics.median(timed[key]):.2f}")
                cells.append(f"{min(timed[key]) / least:.2f}")
            cells.append(f"{statistics.median(timed['rollout_s']):.2f}")
            cells.append(f"{statistics.median(rates):,.0f}")
            cells.append(f"{steps[-1]['peak_gb']:.2f}")
            cells += [f"{steps[0][key]:.1f}" for key in ("process_cpu_s", "since_start_s")]
            print_row(*cells)
        warm &= not any(step["compilations"] for step in sides["ours"][args.warmup :])
    return warm


def main() -> int:
    args = parse_arguments()
    if args.peer:
        return 0 if compare(args) else 1
    jax.config.update("jax_platforms", "cpu")
    run_steps(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
