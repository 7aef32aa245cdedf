"""Log-probabilities and entropies of chosen tokens without [R, L, V] logits in memory.

B rows, T positions, D hidden, V vocabulary, C chunk of positions.
"""

import functools

import jax
import jax.numpy as jnp

from distflow_jax.parallel.rules import constrain
from distflow_jax.programs.bounded_loops import bounded_loop


def _chunk(x: jax.Array, index: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1)


def _wanted_chunk(hidden_BTD: jax.Array, count_B: jax.Array, index: jax.Array, size: int):
    # 0 after the count, where a nan would reach the weight's gradient as 0 * nan
    position = index * size + jnp.arange(size, dtype=jnp.int32)
    wanted = position[None] < count_B[:, None]
    return jnp.where(wanted[..., None], _chunk(hidden_BTD, index, size), 0.0)


def _chunk_logits(hidden_BCD: jax.Array, weight_VD: jax.Array, inverse_t: jax.Array) -> jax.Array:
    logits = jnp.einsum("BCD,VD->BCV", hidden_BCD, weight_VD, preferred_element_type=jnp.float32)
    return logits * inverse_t


def _is_target(target_BC: jax.Array, vocab: int) -> jax.Array:
    # a comparison instead of a gather stays local if the vocabulary is divided over devices
    iota = jax.lax.broadcasted_iota(jnp.int32, (1, 1, vocab), 2)
    return iota == target_BC[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def token_logp(
    hidden_BTD: jax.Array,
    weight_VD: jax.Array,
    target_BT: jax.Array,
    count_B: jax.Array,
    temperature: jax.Array,
    chunk: int,
    keep: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the targets and entropies of softmax(hidden weight^T / temperature).

    Both are float32 [B, T]; `temperature` is a scalar. Only the first `count_B[b]` positions of a
    row are computed, the others are 0. Chunks of `chunk` positions, which must divide T, are
    processed until the fullest row is done, so positions after it cost nothing. Gradients flow to
    hidden and weight. For them logits are recomputed chunk by chunk, or with `keep` kept in memory,
    [B, T, V] in all.
    """
    return _forward(hidden_BTD, weight_VD, target_BT, count_B, temperature, chunk, False)[0]


def _over_chunks(count_B: jax.Array, chunk: int, length: int, body, init):
    """Runs `body(index, carry)` for every chunk with a wanted position.

    A single chunk runs without a loop, which would make XLA fill `init` with zeros to add to.
    """
    if length == chunk:
        return body(jnp.int32(0), init)
    trips = (jnp.max(count_B) + chunk - 1) // chunk
    return bounded_loop(trips, body, init, most=length // chunk)


def _forward(hidden, weight, target, count, temperature, chunk, keep):
    batch, length, _ = hidden.shape
    assert length % chunk == 0, (length, chunk)
    inverse_t = 1.0 / temperature
    vocab = weight.shape[0]

    def body(index, carry):
        logp, entropy, lse, kept = carry
        logits = _chunk_logits(_wanted_chunk(hidden, count, index, chunk), weight, inverse_t)
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        exp = jnp.exp(logits - top)
        total = exp.sum(-1)
        mean_logit = jnp.sum(exp * logits, -1) / total
        chunk_lse = jnp.log(total) + top[..., 0]
        chosen = jnp.sum(
            jnp.where(_is_target(_chunk(target, index, chunk), vocab), logits, 0.0), -1
        )
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        return (
            update(logp, chosen - chunk_lse, start_index=index * chunk),
            update(entropy, chunk_lse - mean_logit, start_index=index * chunk),
            update(lse, chunk_lse, start_index=index * chunk),
            kept.at[index].set(logits) if keep else None,
        )

    zeros, kept = jnp.zeros((batch, length), jnp.float32), None
    if keep:
        kept = jnp.zeros((length // chunk, batch, chunk, vocab), jnp.float32)
        kept = constrain(kept, "length", "batch", "length", "vocab")
    start = (zeros, zeros, zeros, kept)
    logp, entropy, lse, kept = _over_chunks(count, chunk, length, body, start)
    wanted = jnp.arange(length, dtype=jnp.int32)[None] < count[:, None]
    out = (jnp.where(wanted, logp, 0.0), jnp.where(wanted, entropy, 0.0))
    return out, (hidden, weight, target, count, temperature, lse, entropy, kept)


def _backward(chunk, keep, residuals, cotangents):
    hidden, weight, target, count, temperature, lse, entropy, kept = residuals
    wanted = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None] < count[:, None]
    d_logp, d_entropy = (jnp.where(wanted, g, 0.0) for g in cotangents)
    inverse_t = 1.0 / temperature
    vocab = weight.shape[0]

    def body(index, carry):
        d_hidden, d_weight = carry
        states = _wanted_chunk(hidden, count, index, chunk)
        logits = kept[index] if keep else _chunk_logits(states, weight, inverse_t)
        log_p = logits - _chunk(lse, index, chunk)[..., None]
        p = jnp.exp(log_p)
        g = _chunk(d_logp, index, chunk)[..., None]
        e = _chunk(d_entropy, index, chunk)[..., None]
        # d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
        onehot = _is_target(_chunk(target, index, chunk), vocab)
        h = _chunk(entropy, index, chunk)[..., None]
        d_logits = jnp.where(onehot, g, 0.0) - p * (g + e * (log_p + h))
        d_logits = (d_logits * inverse_t).astype(hidden.dtype)
        d_states = jnp.einsum("BCV,VD->BCD", d_logits, weight)
        d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_states, index * chunk, axis=1)
        # one dim to sum over: with two, XLA:CPU transposes d_logits in the fusion that computes it
        d_weight += jnp.einsum(
            "XV,XD->VD",
            d_logits.reshape(-1, vocab),
            states.reshape(-1, states.shape[-1]),
            preferred_element_type=jnp.float32,
        )
        return d_hidden, d_weight

    start = (jnp.zeros_like(hidden), jnp.zeros(weight.shape, jnp.float32))
    d_hidden, d_weight = _over_chunks(count, chunk, hidden.shape[1], body, start)
    return d_hidden, d_weight.astype(weight.dtype), None, None, None


token_logp.defvjp(_forward, _backward)
