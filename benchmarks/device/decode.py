"""Decoding with the run's own engine: tokens/s, and the share of the memory bandwidth."""

import statistics
from typing import Any

import numpy as np
from device.work import Work, random_ids, random_params
from jax.sharding import Mesh
from peers.paced import clocked

from distflow_jax.batch import Prompt
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights.source import open_model
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.memory import peak_memory_gb
from distflow_jax.parallel.mesh import sampler_mesh
from distflow_jax.planning.chips import Chip
from distflow_jax.pods.generation import Load, estimate_generation
from distflow_jax.pods.topology import present_pod
from distflow_jax.rollout.engine.engine import EngineConfig, RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, Response, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests


class Sampler:
    """A compiled engine, of which nothing ends a response early."""

    def __init__(self, model: DecoderConfig, config: EngineConfig, mesh: Mesh, params: Any):
        self.engine = RolloutEngine(model, config, mesh, stop_ids=(), seed=0)
        self._params = self.engine.load_params(params)
        self.engine.compile(self._params)
        self._state = self.engine.init_decode_state()

    def sample(self, turn: int, new: int, temperature: float = 1.0) -> list[Response]:
        """`new` tokens of every slot, in answer to prompts that differ between turns."""
        config, requests = self.engine.config, []
        vocab, prompts = self.engine.model.vocab_size, config.slots // config.group_size
        sampling = SamplingParams(config.group_size, new, temperature)
        rng = np.random.default_rng(turn)
        for i, row in enumerate(random_ids(rng, vocab, prompts, config.max_prompt)):
            requests.append(GroupRequest(Prompt(i, i, row, "", "random", "", {}), sampling))
        self._state, responses, _ = run_requests(self.engine, self._params, self._state, requests)
        assert [len(r.tokens) for r in responses] == [new] * config.slots
        return responses


def time_decode(model: str, chip: Chip, work: Work, dtype: str) -> dict[str, Any]:
    """Times a sampler whose slots all decode the same number of tokens, to prompts of one length.

    A step must read all weights, each slot's keys and values, and each prompt's once for all its
    responses (pods/generation.py). The share of the bandwidth is the time to read these at the
    chip's bandwidth, over the measured time without the first token.
    """
    config = EngineConfig(
        slots=work.slots,
        max_prompt=work.prompt,
        max_response=work.decoded,
        group_size=work.samples,
        tokens_per_call=16,
        page_size=128 if chip.platform == "tpu" else 64,
        dtype=dtype,
        attention=work.decode_attention,
    )
    compilations, mesh, decoder = Compilations(), sampler_mesh(1), open_model(model).config
    sampler = Sampler(decoder, config, mesh, random_params(decoder, dtype, mesh))
    sampler.sample(0, 4)
    compilations.take()
    first, seconds = [], []
    for turn in range(1, 1 + work.repeats):
        first.append(clocked(sampler.sample, turn, 1)[1])
        seconds.append(clocked(sampler.sample, turn, work.decoded)[1])
    compiled = compilations.take()
    compilations.close()
    ranks = mesh.shape["data"]
    load = Load(
        responses=work.slots // ranks,
        slots=work.slots // ranks,
        prompt=work.prompt,
        mean=work.decoded,
        longest=work.decoded,
        group=work.samples,
    )
    engine = sampler.engine
    bound = estimate_generation(present_pod(chip), decoder, engine.config, 1, load)
    least = bound.full.memory * chip.memory_bandwidth
    median = statistics.median(seconds)
    decoding = statistics.median(np.subtract(seconds, first))
    return {
        "dtype": dtype,
        "attention": engine.shapes.attention,
        "slots": work.slots,
        "prompt": work.prompt,
        "decoded": work.decoded,
        "samples": work.samples,
        "seconds": seconds,
        "first_token_seconds": first,
        "median_seconds": median,
        "tokens_per_second": work.slots * work.decoded / median,
        "decode_tokens_per_second": work.slots * (work.decoded - 1) / decoding,
        "least_bytes_per_device": least,
        "bandwidth_share": least / chip.memory_bandwidth / decoding,
        "peak_gb_so_far": peak_memory_gb(),
        "compilations": compiled,
    }
