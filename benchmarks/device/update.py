"""One optimizer step of a run's own compiled program, on full rows, and the most that fit."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from device.work import Work, random_params, random_sequences, update_run
from peers.paced import clocked

from distflow_jax.batch import Placement, Rows, RowShape, Sequences, to_rows
from distflow_jax.config.run_config import Config
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.model_flops import BatchWork, causal_pairs, training_flops
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.memory import GIB, peak_memory_gb
from distflow_jax.parallel.host_memory import device_memory_bytes
from distflow_jax.planning.chips import Chip
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.planning.run_models import optimizer_of
from distflow_jax.programs.costs import costs_of
from distflow_jax.runtime.build import make_meshes, trace
from distflow_jax.runtime.settled_implementations import settle_implementations
from distflow_jax.training.state import init_state


class RunUpdate:
    """The update of a run's own plan, compiled, with its costs and the seconds that this took.

    Raises ValueError if sizes do not fit together.
    """

    def __init__(self, config: Config):
        self.planned = plan_run(config, Machine.current())
        settle_implementations(self.planned)
        self.program = trace(self.planned)["actor_train"]
        started = time.perf_counter()
        self.costs = costs_of(self.program.traced, self.program.compile())
        self.compile_seconds = time.perf_counter() - started

    @property
    def model(self) -> DecoderConfig:
        """The model that is trained."""
        return self.planned.source.config

    @property
    def program_gb(self) -> float:
        """Memory that the program needs, in units of 2^30 bytes."""
        return (self.costs.peak_bytes or 0) / GIB

    def steps(
        self, sequences: Sequences, at: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[float, float, dict[str, Any]]]:
        """Makes steps from random weights on; yields (seconds, CPU-seconds, metrics) of each.

        `at`: the numbers of the sequences of each row. Fields beside the rows are random.
        """
        sizes = self.planned.sizes
        mesh = make_meshes(sizes)[sizes.mesh.layout]
        optimizer, _ = optimizer_of(self.planned.config, "ACTOR")
        params = random_params(self.model, "float32", mesh)
        states: dict[str, Any] = {"actor": init_state(params, self.model, optimizer, mesh)}
        del params  # the state has them, and is donated
        values = self._values(sequences, at)

        def step(states):
            return jax.block_until_ready(self.program(states, values))

        while True:
            (states, _, metrics), seconds, cpu = clocked(step, states)
            yield seconds, cpu, metrics

    def _values(self, sequences: Sequences, at: Sequence[tuple[int, ...]]) -> list[Any]:
        """The program's fields."""
        spec = next(x for x in self.program.inputs if isinstance(x, Rows))
        mini_batches, count, length = spec.tokens.shape
        assert mini_batches == 1 and count >= len(at), (spec.tokens.shape, len(at))
        places = (*at, *[()] * (count - len(at)))
        shape = RowShape(1, count, length, spec.parent.shape[2])
        shared = self.planned.config.training.share_prompts
        rows = to_rows(sequences, Placement(shape, (places,), shared))
        placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), rows, spec)
        rng = np.random.default_rng(0)

        def numbers_of(spec: jax.ShapeDtypeStruct) -> jax.Array:
            drawn = rng.normal(size=spec.shape) * rows.response_mask
            return jax.device_put(drawn.astype(spec.dtype), spec.sharding)

        return [placed if isinstance(x, Rows) else numbers_of(x) for x in self.program.inputs]


def time_update(
    model: str, chip: Chip, work: Work, *, micro_rows: int, remat: str
) -> dict[str, Any]:
    """Seconds and model FLOPs utilisation of an optimizer step, compilation excluded.

    FLOPs are those of models/model_flops.py: causal attention counts as half of a square, and
    recomputation counts nothing.
    """
    return _timed(RunUpdate(update_run(model, work, micro_rows, remat)), chip, work)


def _timed(update: RunUpdate, chip: Chip, work: Work) -> dict[str, Any]:
    """The measurement of a compiled update, whose rows are all full."""
    response, model = work.row_tokens - work.prompt, update.model
    lengths, rng = np.full((work.rows // 2, 2), response), np.random.default_rng(0)
    sequences = random_sequences(rng, model.vocab_size, work.prompt, lengths)
    seconds, compilations = [], Compilations()
    steps = update.steps(sequences, [(i,) for i in range(work.rows)])
    next(steps)
    compilations.take()
    for _ in range(work.repeats):
        took, _, metrics = next(steps)
        seconds.append(took)
    compilations.close()
    counted = BatchWork(
        tokens=work.rows * work.row_tokens,
        scored=work.rows * response,
        pairs=work.rows * causal_pairs(work.row_tokens),
        near_pairs=work.rows * causal_pairs(work.row_tokens, model.sliding_window),
    )
    needed, median = training_flops(model, counted), statistics.median(seconds)
    sizes, training = update.planned.sizes, update.planned.config.training
    return {
        "micro_rows": training.micro_batch_rows,
        "remat": training.remat,
        "attention": sizes.attention.name,
        "attention_why": sizes.attention.why,
        "compute_dtype": sizes.forward.compute_dtype,
        "compile_seconds": update.compile_seconds,
        "program_gb": update.program_gb,
        "seconds": seconds,
        "median_seconds": median,
        "tokens_per_second": counted.tokens / median,
        "model_flops": needed,
        "mfu": needed / (median * jax.device_count() * chip.flops),
        "hardware_flops": update.costs.flops,
        "peak_gb_so_far": peak_memory_gb(),
        "compilations": compilations.take(),
        "grad_norm": float(metrics["actor/grad_norm"]),
    }


def largest_batch(model: str, chip: Chip, work: Work, *, remat: str) -> dict[str, Any]:
    """Times the update with the most rows at a time that memory holds, by doubling.

    A step has one micro-batch. Programs are compiled until one needs more than the device has, or
    has `work.most_rows`; the largest that also runs counts. Raises ValueError if none does.
    """
    micro, memory = 2 * max(work.micro_rows), device_memory_bytes()
    tried: list[dict[str, Any]] = []
    fitting: list[tuple[RunUpdate, Work]] = []
    while micro <= work.most_rows:
        work = dataclasses.replace(work, rows=micro)
        tried.append({"micro_rows": micro})
        try:
            update = RunUpdate(update_run(model, work, micro, remat))
        except jax.errors.JaxRuntimeError as error:  # compilers for TPUs refuse what does not fit
            tried[-1]["error"] = _out_of_memory(error)
            break
        tried[-1]["program_gb"] = update.program_gb
        if memory and update.program_gb * GIB > memory:
            break
        fitting.append((update, work))
        micro *= 2
        # chosen by the first trial; a name is only checked
        work = dataclasses.replace(work, attention=update.planned.sizes.attention.name)
    for update, sizes in reversed(fitting):
        try:
            return _timed(update, chip, sizes) | {"tried": tried, "memory_gb": memory / GIB}
        except jax.errors.JaxRuntimeError as error:
            tried.append({"micro_rows": sizes.rows, "error": _out_of_memory(error)})
    raise ValueError(f"nothing fits that has more rows than part update: {tried}")


def _out_of_memory(error: jax.errors.JaxRuntimeError) -> str:
    """The first line of an error that memory ran out; raises any other error."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return str(error).partition("\n")[0]
