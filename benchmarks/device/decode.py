"""Decoding with the run's own engine: tokens/s, and the share of the memory bandwidth."""

import statistics
from typing import Any

import numpy as np
from decode import Case, Engine, clocked, random_params
from device.work import Work

from distflow_jax.models.weights.source import open_model
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.memory import peak_memory_gb
from distflow_jax.parallel.mesh import sampler_mesh
from distflow_jax.planning.chips import Chip
from distflow_jax.pods.generation import Load, estimate_generation
from distflow_jax.pods.topology import present_pod

TOKENS_PER_CALL = 16


def time_decode(model: str, chip: Chip, work: Work, dtype: str) -> dict[str, Any]:
    """Times a sampler whose slots all decode the same number of tokens, to prompts of one length.

    A step must read all weights, each slot's keys and values, and each prompt's once for all its
    responses (pods/generation.py). The share of the bandwidth is the time to read these at the
    chip's bandwidth, over the measured time without the first token.
    """
    source = open_model(model)
    mesh = sampler_mesh(1)
    case = Case(
        name="device",
        prompts=work.slots // work.samples,
        samples=work.samples,
        prompt_length=work.prompt,
        slots=work.slots,
        limits=(work.decoded,) * work.slots,
    )
    options = {
        "tokens_per_call": TOKENS_PER_CALL,
        "page_size": 128 if chip.platform == "tpu" else 64,
        "dtype": dtype,
        "attention": work.decode_attention,
    }
    compilations = Compilations()
    params = random_params(source.config, dtype, mesh)
    side = Engine(source.config, params, options, mesh, case)
    del params  # the engine has its own copy
    vocab = source.config.vocab_size
    side.decode(case.prompt_ids(vocab, 0), (4,) * work.slots)
    compilations.take()
    first, seconds = [], []
    for turn in range(1, 1 + work.repeats):
        ids = case.prompt_ids(vocab, turn)
        first.append(clocked(lambda ids=ids: side.decode(ids, (1,) * work.slots))[1])
        seconds.append(clocked(lambda ids=ids: side.decode(ids, case.limits))[1])
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
    bound = estimate_generation(present_pod(chip), source.config, side.engine.config, 1, load)
    least = bound.full.memory * chip.memory_bandwidth
    median = statistics.median(seconds)
    decoding = statistics.median(np.subtract(seconds, first))
    return {
        "dtype": dtype,
        "attention": side.engine.shapes.attention,
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
