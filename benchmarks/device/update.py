"""One optimizer step of a run's own compiled program, on full rows."""

import statistics
import time
from typing import Any

import jax
import numpy as np
from decode import random_params
from device.work import Work, update_run

from distflow_jax.batch import Placement, Rows, RowShape, Sequences, to_rows
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.model_flops import BatchWork as Tokens
from distflow_jax.models.model_flops import causal_pairs, training_flops
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.memory import peak_memory_gb
from distflow_jax.planning.chips import Chip
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.planning.run_models import optimizer_of
from distflow_jax.planning.unit_programs import Program
from distflow_jax.programs.costs import costs_of
from distflow_jax.runtime.build import make_meshes, trace
from distflow_jax.runtime.settled_implementations import settle_implementations
from distflow_jax.training.state import init_state

UPDATE = "actor_train"


def time_update(
    model: str, chip: Chip, work: Work, *, micro_rows: int, remat: str
) -> dict[str, Any]:
    """Seconds and model FLOPs utilisation of one optimizer step, compilation excluded.

    FLOPs are those of models/model_flops.py: causal attention counts as half of a square, and
    recomputation counts nothing. Raises ValueError if sizes do not fit together.
    """
    planned = plan_run(update_run(model, work, micro_rows, remat), Machine.current())
    settle_implementations(planned)
    config, decoder = planned.config, planned.source.config
    program = trace(planned)[UPDATE]
    started = time.perf_counter()
    costs = costs_of(program.traced, program.compile())
    compiling = time.perf_counter() - started

    mesh = make_meshes(planned.sizes)[planned.sizes.mesh.layout]
    optimizer, _ = optimizer_of(config, "ACTOR")
    params = random_params(decoder, "float32", mesh)
    states: dict[str, Any] = {"actor": init_state(params, decoder, optimizer, mesh)}
    del params  # the state has them, and is donated
    values = _values(program, decoder, work)
    seconds, compilations = [], Compilations()
    for step in range(1 + work.repeats):
        started = time.perf_counter()
        states, _, metrics = jax.block_until_ready(program(states, values))
        if step:
            seconds.append(time.perf_counter() - started)
        else:
            compilations.take()
    compilations.close()
    needed = _needed_flops(decoder, work)
    median = statistics.median(seconds)
    tokens = work.rows * work.row_tokens
    return {
        "micro_rows": micro_rows,
        "remat": remat,
        "attention": planned.sizes.attention.name,
        "attention_why": planned.sizes.attention.why,
        "compute_dtype": planned.sizes.forward.compute_dtype,
        "compile_seconds": compiling,
        "seconds": seconds,
        "median_seconds": median,
        "tokens_per_second": tokens / median,
        "model_flops": needed,
        "mfu": needed / (median * jax.device_count() * chip.flops),
        "hardware_flops": costs.flops,
        "program_gb": None if costs.peak_bytes is None else costs.peak_bytes / 2**30,
        "peak_gb_so_far": peak_memory_gb(),
        "compilations": compilations.take(),
        "grad_norm": float(metrics["actor/grad_norm"]),
    }


def _values(program: Program, model: DecoderConfig, work: Work) -> list[Any]:
    """The program's fields: full rows, and random numbers for all other fields."""
    spec = next(x for x in program.inputs if isinstance(x, Rows))
    mini_batches, count, length = spec.tokens.shape
    assert mini_batches == 1 and count >= work.rows, (spec.tokens.shape, work.rows)
    rng = np.random.default_rng(0)

    def ids(size: int) -> np.ndarray:
        return rng.integers(3, model.vocab_size, size, dtype=np.int32)

    numbers, response = range(work.rows), length - work.prompt
    sequences = Sequences(
        group=[i // 2 for i in numbers],
        member=[i % 2 for i in numbers],
        prompt=[ids(work.prompt) for _ in numbers],
        response=[ids(response) for _ in numbers],
        response_mask=[np.ones(response, bool) for _ in numbers],
    )
    at = tuple((i,) for i in numbers) + ((),) * (count - work.rows)
    shape = RowShape(1, count, length, spec.parent.shape[2])
    rows = to_rows(sequences, Placement(shape, (at,), False))
    placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), rows, spec)

    def numbers_of(spec: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = rng.normal(size=spec.shape) * rows.response_mask
        return jax.device_put(drawn.astype(spec.dtype), spec.sharding)

    return [placed if isinstance(x, Rows) else numbers_of(x) for x in program.inputs]


def _needed_flops(model: DecoderConfig, work: Work) -> float:
    window = model.sliding_window
    return training_flops(
        model,
        Tokens(
            tokens=work.rows * work.row_tokens,
            scored=work.rows * (work.row_tokens - work.prompt),
            pairs=work.rows * causal_pairs(work.row_tokens),
            near_pairs=work.rows * causal_pairs(work.row_tokens, window),
        ),
    )
