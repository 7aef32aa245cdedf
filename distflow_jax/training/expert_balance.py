"""Load-balancing loss of a mixture's experts within each sequence, added to any objective.

DeepSeek-V3 (arxiv.org/abs/2412.19437), sec. 2.1.2, eq. 17-20, for the sequence of T tokens in a
layer with E experts, K of them for each token:

    L = coef * sum_i f_i P_i,
    f_i = E / (K T) * (tokens that expert i processes),    P_i = mean over tokens of p_i,

p being the router's probabilities. The sum is 1 if experts are used evenly, and E / K if all tokens
use the same experts. A shared prompt counts for each of its responses, so the loss does not depend
on packing. The loss is summed over the layers, so that a router's gradient does not depend on the
number of other routers, and averaged over the sequences of an optimizer step.

R rows, L tokens per row, S sequences per row, E experts, K experts of a token.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.packed import sums_of_segments
from distflow_jax.batch import Rows
from distflow_jax.models.decoder_config import DecoderConfig, decoder_of
from distflow_jax.models.moe import Route, best, replayed
from distflow_jax.parallel import context_parallel
from distflow_jax.training.objective import Metrics, Objective, at_least_one


class Balance(NamedTuple):
    """Router statistics of a forward pass over rows, summed over the rows' sequences."""

    loss: jax.Array  # float32 [layers]: sum of f_i P_i
    load: jax.Array  # float32 [layers, E]: (token, expert) pairs
    mismatch: jax.Array | None  # float32 [layers]: tokens with other experts than the router's


_watchers: contextvars.ContextVar[list[Balance] | None] = contextvars.ContextVar(
    "watchers", default=None
)


@contextlib.contextmanager
def watched() -> Iterator[list[Balance]]:
    """Collects the balance of each forward pass over a mixture that is traced in the block.

    The statistics of routers thus bypass the objectives, which compute losses from log-probs,
    values or scores.
    """
    found: list[Balance] = []
    token = _watchers.set(found)
    try:
        yield found
    finally:
        _watchers.reset(token)


def watching() -> list[Balance] | None:
    """The list of the enclosing `watched`, to add a forward pass's balance to; None outside."""
    return _watchers.get()


def tokens_of_sequences(rows: Rows) -> jax.Array:
    """Number of tokens of each sequence and its prompt, int32 [..., S]; 0 for empty slots."""
    ones = jnp.ones((*context_parallel.divide(rows.segment).shape, 1), jnp.int32)
    tokens = _of_sequences(ones, rows)
    return tokens[..., 0]


def _of_sequences(x: jax.Array, rows: Rows) -> jax.Array:
    """Sums of x [..., L, E] over each sequence with its prompt, [..., S, E].

    On a mesh with context parallelism x has the tokens of the row's shards.
    """
    size = rows.valid.shape[-1]
    segment = context_parallel.divide(rows.segment)
    sums = context_parallel.sum_over_shards(sums_of_segments(x, segment, 2 * size + 1))
    own = sums[..., 1 : size + 1, :]
    is_shared = rows.parent > size  # otherwise the prompt's tokens are in the sequence's segment
    prompt = jnp.take_along_axis(sums, rows.parent[..., None], axis=-2)
    whole = own + jnp.where(is_shared[..., None], prompt, 0)
    return jnp.where(rows.valid[..., None], whole, 0)


def balancing_route(rows: Rows, model: DecoderConfig) -> Route:
    """Route over packed rows, or their shards (parallel/context_parallel.py), with statistics.

    Takes the router's own choice, or the rows' recorded experts if these are the layer input. The
    layer output is a Balance without the dim of layers.
    """
    experts, count = model.num_experts, model.experts_per_token
    tokens = jnp.maximum(tokens_of_sequences(rows), 1).astype(jnp.float32)[..., None]

    def route(rows, tokens, probability, recorded):
        own = best(probability, count)
        expert = own if recorded is None else replayed(own, recorded)
        iota = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, experts), 3)
        through = jnp.sum(expert[..., None] == iota, axis=2, dtype=jnp.int32)
        load = _of_sequences(through.astype(jnp.float32), rows)
        share = experts / count * load / tokens
        mean = _of_sequences(probability, rows) / tokens
        mismatch = None
        if recorded is not None:
            differs = _differs(own, expert).astype(jnp.float32)
            mismatch = _of_sequences(differs[..., None], rows).sum()
        return expert, Balance(jnp.sum(share * mean), load.sum((0, 1)), mismatch)

    return jax.tree_util.Partial(route, rows, tokens)


def _differs(own: jax.Array, expert: jax.Array) -> jax.Array:
    """Whether the experts of a token, [..., K], differ from the router's own, in any order."""
    return ~(own[..., None] == expert[..., None, :]).any(-1).all(-1)


def _recorded_tokens(rows: Rows) -> jax.Array:
    """Number of tokens of all sequences, prompts included, with recorded experts; int32."""
    experts = context_parallel.divide(rows.experts[..., 0, :1])
    return _of_sequences((experts >= 0).astype(jnp.int32), rows).sum(dtype=jnp.int32)


class _Counts(NamedTuple):
    """Counts of one optimizer step or of a part of it, scalars; as denominators float32."""

    sequences: jax.Array
    pairs: jax.Array  # (token of a sequence, expert) pairs of a layer
    recorded: jax.Array  # tokens of sequences with recorded experts


def balanced(objective: Objective, coef: float) -> Objective:
    """Adds `coef` times the balance loss, and its metrics, to an objective that trains a mixture.

    Metrics: `balance_loss` is the mean over sequences and layers of sum f_i P_i (1: even), without
    `coef`. `expert_share_max` is the share of all tokens' choices that goes to the busiest expert
    of any layer (even: 1 / E). With replayed experts, `router_mismatch` is the share of recorded
    (token, layer) pairs for which the router would have chosen other experts. An objective without
    a mixture is returned unchanged.
    """
    network = objective.model
    model = decoder_of(network)
    if not model.num_experts:
        return objective
    loss_name, load_name = f"{objective.name}/balance_loss", f"{objective.name}/expert_load"

    def prepare(batch: Any, before: Any = None) -> tuple[Any, Any]:
        rows = batch.rows
        sequences = rows.valid.sum(dtype=jnp.int32)
        tokens = tokens_of_sequences(rows).astype(jnp.float32)
        recorded = jnp.int32(0) if rows.experts is None else _recorded_tokens(rows)
        counts = _Counts(sequences, tokens.sum() * model.experts_per_token, recorded)
        batch, own = objective.prepare(batch, None if before is None else before[0])
        return batch, (own, counts)

    def denominators_of(counts: Any) -> Any:
        own, of_balance = counts
        return objective.denominators(own), at_least_one(of_balance)

    def evaluate(
        params: Any, batch: Any, denominators: Any, temperature: jax.Array
    ) -> tuple[Any, Metrics]:
        denominators, counts = denominators
        with watched() as found:
            loss, metrics = objective.evaluate(params, batch, denominators, temperature)
        (balance,) = found
        per_layer = balance.loss / counts.sequences
        loss = loss + coef * per_layer.sum()
        sums = {loss_name: per_layer.mean(), load_name: balance.load / counts.pairs}
        if balance.mismatch is not None:
            share = balance.mismatch.mean() / counts.recorded
            sums[f"{objective.name}/router_mismatch"] = share
        return loss, metrics | {"sum": metrics["sum"] | jax.lax.stop_gradient(sums)}

    def finish(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        metrics = objective.finish(metrics)
        share = metrics.pop(load_name).max()
        return metrics | {f"{objective.name}/expert_share_max": share}

    return dataclasses.replace(
        objective,
        prepare=prepare,
        denominators=denominators_of,
        evaluate=evaluate,
        finish=finish,
    )
