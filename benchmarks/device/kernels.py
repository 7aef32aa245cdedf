"""Every implementation of attention that a device has, beside the others: error and seconds.

L tokens of a row, N heads, K key/value heads, H head dim.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from device.work import Work, step_run, update_run

from distflow_jax.config.implementation_table import (
    DECODE,
    IMPLEMENTATIONS,
    PREFILL,
    ROWS,
    Implementation,
    Need,
    lacks,
)
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.kernels.implementation_trial import Tried, tried
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.rollout.decode_state import EngineConfig, attention_need
from distflow_jax.rollout.sampler_trial import try_decode, try_prefill
from distflow_jax.training.row_trial import try_rows

PLAIN = "plain causal"  # a yardstick, which no packed row can have
_CHECKED = 512  # tokens of the plain sequence that is compared with float32


def of_platform(where: str, platform: str) -> dict[str, Implementation]:
    """Attentions that serve a place on a platform by name, also those that auto never takes."""
    on = Need(where, platform, 0, "").on
    return {one.name: one for one in IMPLEMENTATIONS if where in one.serves and on in one.platforms}


def time_kernels(model: str, work: Work) -> dict[str, Any]:
    """{place: {name: {"seconds"} or {"error"}}}; each is compared with float32 first.

    Rows: forward and backward of a packed row of the trainer, and of a plain causal sequence of its
    length. Prefill, and decode steps over pages: a call. Raises ValueError if sizes do not fit.
    """
    machine = Machine.current()
    engine = plan_run(step_run(model, work, jax.device_count()), machine)
    decoder, sampler = engine.source.config, engine.sizes.engine
    return {
        ROWS: _rows(model, work, machine),
        PREFILL: _sampler(PREFILL, decoder, sampler, machine.platform),
        DECODE: _sampler(DECODE, decoder, sampler, machine.platform),
    }


def _rows(model: str, work: Work, machine: Machine) -> dict[str, Any]:
    chosen, lacking, planned = [], {}, None
    for name in of_platform(ROWS, machine.platform):
        own = dataclasses.replace(work, attention=name)
        try:
            planned = plan_run(update_run(model, own, jax.device_count(), "none"), machine)
            chosen.append(planned.sizes.attention)
        except ValueError as error:
            lacking[name] = str(error)
    if planned is None:
        raise ValueError("; ".join(lacking.values()))
    decoder, forward = planned.source.config, planned.sizes.forward
    timed = try_rows(chosen, decoder, forward, row_tokens=work.row_tokens, shared=True)
    timed[PLAIN] = _plain(decoder, forward.compute_dtype, work.row_tokens, machine.platform)
    return _shown(timed, lacking)


def _sampler(
    where: str, model: DecoderConfig, engine: EngineConfig, platform: str
) -> dict[str, Any]:
    need = attention_need(model, engine.dtype, platform, where)
    serve = of_platform(where, platform)
    lacking = {name: lack for name, one in serve.items() if (lack := lacks(one, need))}
    names = [name for name in serve if name not in lacking]
    if where == PREFILL:
        names = ["loops" if name == "masked" else name for name in names]
    run = {PREFILL: try_prefill, DECODE: try_decode}[where]
    return _shown(run(tuple(names), model, engine), lacking)


def _plain(model: DecoderConfig, dtype: str, length: int, platform: str) -> Tried:
    """Forward and backward of a causal sequence of L tokens by jax.nn.dot_product_attention."""
    by = "cudnn" if Need(ROWS, platform, 0, "").on == "gpu" else "xla"

    def arguments(tokens: int) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
        return [
            jax.random.normal(key, (1, tokens, n, model.head_dim), jnp.float32).astype(dtype)
            for key, n in zip(keys, heads, strict=True)
        ]

    def run(implementation: str, kind: str, *arrays: jax.Array) -> list[jax.Array]:
        q, k, v, gradient = (x.astype(kind) for x in arrays)
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=implementation
        )
        out, back = jax.vjp(attend, q, k, v)
        return [out, *back(gradient)]

    mine, exact = functools.partial(run, by, dtype), functools.partial(run, "xla", "float32")
    return tried(mine, exact, arguments(min(length, _CHECKED)), (mine, arguments(length)))


def _shown(timed: Mapping[str, Tried], lacking: Mapping[str, str]) -> dict[str, Any]:
    """The results by name, with the reasons for those that could not be tried.

    0 seconds: compared with float32, and not timed.
    """
    found = {
        name: {"error": one.failure} if one.failure else {"seconds": one.seconds}
        for name, one in timed.items()
    }
    return found | {name: {"error": why} for name, why in lacking.items()}
