"""Load balance of a mixture's experts within each sequence, as a part of any objective's loss.

DeepSeek-V3 (arxiv.org/abs/2412.19437), sec. 2.1.2, eq. 17-20, for the sequence of T tokens in a
layer with E experts, K of them for each token:

    L = coef * sum_i f_i P_i,
    f_i = E / (K T) * (tokens that go through expert i),    P_i = mean over tokens of p_i,

p the router's probabilities. The sum is 1 where experts are used evenly, and E / K where all tokens
go through the same. A prompt that several responses share counts for each of them: how sequences
are packed does not matter. The loss is summed over the layers, so that a router's gradient does not
depend on how many others there are, and is the mean over the sequences of an optimizer step.

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
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel
from distflow_jax.models.moe import Route, best, replayed
from distflow_jax.parallel import context_parallel
from distflow_jax.training.objective import Metrics, Objective


class Balance(NamedTuple):
    """What a forward pass over rows tells of its routers; sums over the rows' sequences."""

    loss: jax.Array  # float32 [layers]: sum of f_i P_i
    load: jax.Array  # float32 [layers, E]: pairs of a token and an expert that it goes through
    mismatch: jax.Array | None  # float32 [layers]: tokens that the router would send elsewhere


_watchers: contextvars.ContextVar[list[Balance] | None] = contextvars.ContextVar(
    "watchers", default=None
)


@contextlib.contextmanager
def watched() -> Iterator[list[Balance]]:
    """Collects the balance of each forward pass over a mixture that is traced within it.

    So the loss of routers, which lie deep in the network, takes no part in what objectives compute
    from log-probs, values or scores.
    """
    found: list[Balance] = []
    token = _watchers.set(found)
    try:
        yield found
    finally:
        _watchers.reset(token)


def watching() -> list[Balance] | None:
    """Where to add the balance of a forward pass; None where nobody asks for it."""
    return _watchers.get()


def tokens_of_sequences(rows: Rows) -> jax.Array:
    """Tokens of each sequence with its prompt's, int32 [..., S]; 0 where there is none."""
    ones = jnp.ones((*context_parallel.divide(rows.segment).shape, 1), jnp.int32)
    tokens = _of_sequences(ones, rows)
    return tokens[..., 0]


def _of_sequences(x: jax.Array, rows: Rows) -> jax.Array:
    """Sums of x over each sequence, its prompt's tokens included, [..., S, E]. x: [..., L, E], or
    of the parts that devices have of a row."""
    size = rows.valid.shape[-1]
    segment = context_parallel.divide(rows.segment)
    sums = context_parallel.sum_over_shards(sums_of_segments(x, segment, 2 * size + 1))
    own = sums[..., 1 : size + 1, :]
    is_shared = rows.parent > size  # else the prompt's tokens are of the sequence's own segment
    prompt = jnp.take_along_axis(sums, rows.parent[..., None], axis=-2)
    whole = own + jnp.where(is_shared[..., None], prompt, 0)
    return jnp.where(rows.valid[..., None], whole, 0)


def balancing_route(rows: Rows, model: DecoderConfig) -> Route:
    """The router's own choice over packed rows, or the parts that devices have of them
    (parallel/context_parallel.py); or what the rows have recorded, which is the layer's input then.
    Its layer output is a Balance without layers."""
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
    """Whether the experts of a token, [..., K], are not its own, whatever their order."""
    return ~(own[..., None] == expert[..., None, :]).any(-1).all(-1)


def _recorded_tokens(rows: Rows) -> jax.Array:
    """Tokens of all sequences, their prompts included, whose experts are recorded; int32."""
    experts = context_parallel.divide(rows.experts[..., 0, :1])
    return _of_sequences((experts >= 0).astype(jnp.int32), rows).sum(dtype=jnp.int32)


class _Counts(NamedTuple):
    """Of one optimizer step, float32 scalars."""

    sequences: jax.Array
    pairs: jax.Array  # of a token of a sequence and an expert that it goes through, in a layer
    recorded: jax.Array  # tokens of sequences whose experts are recorded


def balanced(objective: Objective, coef: float) -> Objective:
    """`objective` with `coef` times the balance loss, and metrics of it, where it trains a mixture.

    Metrics: `balance_loss`, the mean over sequences and layers of sum f_i P_i (1: even), without
    `coef`, and `expert_share_max`, the share of all tokens' choices that falls to the busiest
    expert of any layer (even: 1 / E). Where experts are replayed `router_mismatch`, too: the share
    of (token, layer) pairs, of what is recorded, for which the router would have chosen other
    experts. What trains no mixture is returned as it is.
    """
    network = objective.model
    model = network.trunk if isinstance(network, ScalarModel) else network
    if not model.num_experts:
        return objective
    loss_name, load_name = f"{objective.name}/balance_loss", f"{objective.name}/expert_load"

    def prepare(batch: Any) -> tuple[Any, Any]:
        rows = batch.rows
        sequences = rows.valid.sum(dtype=jnp.int32)
        tokens = tokens_of_sequences(rows).astype(jnp.float32)
        recorded = 0 if rows.experts is None else _recorded_tokens(rows)
        counts = (sequences, tokens.sum() * model.experts_per_token, recorded)
        batch, denominators = objective.prepare(batch)
        counts = (jnp.maximum(jnp.asarray(x, jnp.float32), 1.0) for x in counts)
        return batch, (denominators, _Counts(*counts))

    def evaluate(
        params: Any, batch: Any, denominators: Any, temperature: jax.Array
    ) -> tuple[jax.Array, Metrics]:
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

    return dataclasses.replace(objective, prepare=prepare, evaluate=evaluate, finish=finish)
