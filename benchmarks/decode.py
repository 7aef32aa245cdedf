"""Decoding with the run's own engine: tokens per second of responses of fixed lengths.

python benchmarks/decode.py
python benchmarks/decode.py --responses=64 --new=64 --rounds=3

Random weights of SHAPE in float32 on one CPU device; all prompts differ, and nothing ends a
response earlier. benchmarks/checkouts.py alternates two such processes, each of which gets its
options as JSON, then a case or the number of a round as a line of JSON on its stdin, and answers
each with a line of JSON; benchmarks/device/decode.py times the engine on an accelerator.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from distflow_jax.batch import Prompt
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.parameters import param_shardings, param_specs
from distflow_jax.observe.compilations import Compilations
from distflow_jax.parallel.mesh import sampler_mesh
from distflow_jax.rollout.engine.engine import EngineConfig, RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests

RESERVED_IDS = 3  # prompts hold none of the first ids
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "mlp_size": 768,
}
ENGINE = {"platform": "cpu", "dtype": "float32", "tokens_per_call": 16, "page_size": 32}
ENGINE_OPTIONS = ("tokens_per_call", "page_size", "dtype", "attention")
OPTIONS = {"shape": SHAPE, "model": ""} | ENGINE


@dataclasses.dataclass(frozen=True)
class Case:
    """Work of one round: `prompts` x `samples` responses of fixed lengths.

    `limits`: the length of every response in tokens, with those to one prompt next to each other.
    `slots`: responses decoded at once.
    """

    name: str
    prompts: int
    samples: int
    prompt_length: int
    slots: int
    limits: tuple[int, ...]

    def prompt_ids(self, vocab: int, turn: int) -> np.ndarray:
        """Prompts of a round, int32 [prompts, prompt_length]; new ones every round."""
        shape = (self.prompts, self.prompt_length)
        return np.random.default_rng(turn).integers(RESERVED_IDS, vocab, shape, dtype=np.int32)


def fixed(responses: int, new: int) -> Case:
    """So many prompts of 32 ids, each answered by `new` tokens, all at once."""
    return Case(f"fixed-{responses}", responses, 1, 32, responses, (new,) * responses)


def random_params(config: DecoderConfig, dtype: str, mesh: Mesh) -> dict[str, Any]:
    """Parameters drawn on the device in their final dtype, so that nothing larger is allocated."""
    layout, placed = flatten_dict(param_shardings(config, mesh), sep="/"), {}
    for index, (path, spec) in enumerate(param_specs(config).items()):

        @functools.partial(jax.jit, out_shardings=layout[path])
        def make(key, spec=spec):
            if spec.stddev is None:
                return jnp.ones(spec.shape, dtype)
            return jax.random.normal(key, spec.shape, dtype) * jnp.asarray(spec.stddev, dtype)

        placed[path] = make(jax.random.fold_in(jax.random.key(0), index))
    return unflatten_dict(placed, sep="/")


class Engine:
    """An engine of a case's sizes, compiled, and driven by run_requests.

    `options`: tokens_per_call, page_size and dtype, as in OPTIONS, and maybe attention.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: dict[str, Any],
        options: dict[str, Any],
        mesh: Mesh,
        case: Case,
    ):
        self.case = case
        config = EngineConfig(
            slots=case.slots,
            max_prompt=case.prompt_length,
            max_response=max(case.limits),
            group_size=case.samples,
            **{name: options[name] for name in ENGINE_OPTIONS if name in options},
        )
        self.engine = RolloutEngine(model, config, mesh, stop_ids=(), seed=0)
        self.params = self.engine.load_params(params)
        self.engine.compile(self.params)
        self.state = self.engine.init_decode_state()

    def decode(self, ids: np.ndarray, limits: Sequence[int]) -> int:
        """Answers the prompts, submitted at once; returns the number of tokens, sum(limits)."""
        n = self.case.samples
        requests = []
        for i, row in enumerate(ids):
            (limit,) = set(limits[i * n : (i + 1) * n])  # one limit for all samples of a request
            # in the given order, as if the lengths were unknown
            place = float(len(ids) - i)
            prompt = Prompt(i, i, row, "", "random", "", {}, expected_length=place)
            requests.append(GroupRequest(prompt, SamplingParams(n, limit)))
        self.state, responses, _ = run_requests(self.engine, self.params, self.state, requests)
        assert [len(r.tokens) for r in responses] == list(limits)
        return sum(len(r.tokens) for r in responses)


def clocked(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """(its result, wall seconds, CPU-seconds of all threads of this process)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, time.perf_counter() - wall, time.process_time() - cpu


class Rounds:
    """Rounds of a case, all programs of which have run, on the first device of this process."""

    def __init__(self, options: dict[str, Any], case: Case):
        self._model, self._case = DecoderConfig(**options["shape"]), case
        self._compilations = Compilations()
        mesh = sampler_mesh(1, jax.local_devices()[:1])
        params = random_params(self._model, options["dtype"], mesh)
        self._engine = Engine(self._model, params, options, mesh, case)
        self._decode(0, [min(limit, 4) for limit in case.limits])
        self._compilations.take()

    def play(self, turn: int) -> dict[str, Any]:
        """The record of a round, the first of which is 1."""
        tokens, seconds, cpu = self._decode(turn, self._case.limits)
        record = {"seconds": seconds, "cpu_s": cpu, "tokens": tokens}
        return record | {"compilations": self._compilations.take()}

    def _decode(self, turn: int, limits: Sequence[int]) -> tuple[int, float, float]:
        ids = self._case.prompt_ids(self._model.vocab_size, turn)
        return clocked(lambda: self._engine.decode(ids, limits))


def serve(options: dict[str, Any]) -> None:
    """Answers cases and rounds until stdin ends; see the module."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    rounds = None
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            case = Case(**request["case"] | {"limits": tuple(request["case"]["limits"])})
            rounds, answer = Rounds(options, case), {"case": case.name}
        else:
            answer = rounds.play(request["round"])
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Prints the tokens per second of a case."""
    jax.config.update("jax_platforms", "cpu")
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        serve(json.loads(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=16, help="that are decoded at once")
    parser.add_argument("--new", type=int, default=96, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds = Rounds(OPTIONS, fixed(args.responses, args.new))
    found = [rounds.play(turn) for turn in range(1, args.rounds + 1)]
    rates = [one["tokens"] / one["seconds"] for one in found]
    compiled = sum(one["compilations"] for one in found)
    print(
        f"{args.responses} responses of {args.new} tokens: {statistics.median(rates):.1f} tokens/s "
        f"(best {max(rates):.1f}); compilations {compiled}"
    )


if __name__ == "__main__":
    main()
