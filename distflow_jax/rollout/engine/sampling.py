"""Drawing tokens: temperature, top-k and top-p as traced values, noise keyed by (uid, position).

B slots, V vocabulary, M blocks of the vocabulary, W = V / M tokens per block.

No sort: thresholds are found by bisection over the bits of a float. No noise over the whole
vocabulary: a block is drawn by its log-sum-exp plus Gumbel noise, then a token within it, which is
the same distribution because the maximum of Gumbel variables is Gumbel again (Maddison et al. 2014,
arxiv.org/abs/1411.0030, sec. 3) and needs M + W instead of V random numbers per slot.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.programs.bounded_loops import seldom

_BLOCK = 128  # tokens per vocabulary block


class SlotSampling(NamedTuple):
    """Per-slot settings, each [B]."""

    temperature: jax.Array  # float32; 0 = greedy
    top_k: jax.Array  # int32; 0 = off
    top_p: jax.Array  # float32; 1 = off


class Draw(NamedTuple):
    """One token of each slot, each field [B]."""

    token: jax.Array  # int32
    logp: jax.Array  # float32, under softmax(logits / temperature), before top-k and top-p
    margin: jax.Array  # float32: how far the runner-up was behind, in perturbed logits


def sample_key(seed: jax.Array, counter: jax.Array, sample: jax.Array) -> jax.Array:
    """Key of one response from scalars: run seed and uid = (counter, sample), nothing else."""
    return jax.random.fold_in(jax.random.fold_in(seed, counter), sample)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 -> uint32 with the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = bits >> 31
    return jnp.where(sign == 1, ~bits, bits | jnp.uint32(0x80000000))


def _largest_threshold(value_BV: jax.Array, weight_BV: jax.Array, needed_B: jax.Array) -> jax.Array:
    """Largest uint32 t per slot with sum(weight where bits(value) >= t) >= needed, [B].

    32 halvings find it exactly; at t = 0 everything counts, so an answer always exists.
    """
    bits = _ordered_bits(value_BV)

    def halve(step, low):
        candidate = low | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        mass = jnp.sum(jnp.where(bits >= candidate[:, None], weight_BV, 0.0), axis=-1)
        return jnp.where(mass >= needed_B, candidate, low)

    return jax.lax.fori_loop(0, 32, halve, jnp.zeros(value_BV.shape[0], jnp.uint32))


def smallest_kept(
    logits_BV: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """The smallest logit / temperature within top-k, and within top-p of what is left, [B].

    Ties with the last token kept are kept too. top-p keeps the smallest set of most likely tokens
    whose probability reaches p (Holtzman et al. 2019, arxiv.org/abs/1904.09751). -inf where all are
    kept. A number per slot, and computed from logits that are there already: a branch that hands
    [B, V] on costs a copy of it in every step.
    """

    def by_count():
        logits = logits_BV / temperature[:, None]
        vocab = logits.shape[-1]
        needed = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab).astype(jnp.float32)
        least = _largest_threshold(logits, jnp.ones_like(logits), needed)
        return _smallest(logits, _ordered_bits(logits) >= least[:, None])

    with seldom():
        least_k = jax.lax.cond(
            jnp.any(top_k > 0), by_count, lambda: jnp.full(top_k.shape, -jnp.inf, jnp.float32)
        )

    def by_mass():
        logits = logits_BV / temperature[:, None]
        logits = jnp.where(logits >= least_k[:, None], logits, -jnp.inf)
        p = jax.nn.softmax(logits, axis=-1)
        least = _largest_threshold(p, p, top_p)
        kept = (_ordered_bits(p) >= least[:, None]) | (top_p >= 1.0)[:, None]
        return jnp.maximum(_smallest(logits, kept), least_k)

    with seldom():
        return jax.lax.cond(jnp.any(top_p < 1.0), by_mass, lambda: least_k)


def _smallest(x_BV: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.min(jnp.where(where, x_BV, jnp.inf), axis=-1)


def _best_two(x_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(index of the largest, its lead over the second largest)."""
    best = jnp.argmax(x_BN, axis=-1).astype(jnp.int32)
    top = jnp.max(x_BN, axis=-1)
    iota = jnp.arange(x_BN.shape[-1], dtype=jnp.int32)
    second = jnp.max(jnp.where(iota[None] == best[:, None], -jnp.inf, x_BN), axis=-1)
    return best, top - second


def draw(
    logits_BV: jax.Array,
    keys_B: jax.Array,
    position_B: jax.Array,
    params: SlotSampling,
) -> Draw:
    """One token per slot from softmax(logits / temperature) cut by top-k and top-p.

    `keys_B`: sample_key of each slot; `position_B`: index of the token within its response. A
    temperature of 0 takes the most likely token and reports log-probs at temperature 1. Log-probs
    are those before the cut, which a trainer's log-probs are compared with: see
    docs/decisions/decoding.md.
    """
    slots, vocab = logits_BV.shape
    greedy = params.temperature <= 0.0
    temperature = jnp.where(greedy, 1.0, params.temperature)
    top_k, top_p = jnp.where(greedy, 0, params.top_k), jnp.where(greedy, 1.0, params.top_p)
    least = smallest_kept(logits_BV, temperature, top_k, top_p)
    logits = logits_BV / temperature[:, None]
    logits = jnp.where(logits >= least[:, None], logits, -jnp.inf)
    blocks = -(-vocab // _BLOCK)
    padded = jnp.pad(logits, ((0, 0), (0, blocks * _BLOCK - vocab)), constant_values=-jnp.inf)
    padded = padded.reshape(slots, blocks, _BLOCK)
    top = jnp.max(logits, axis=-1)
    total_BM = jnp.sum(jnp.exp(padded - top[:, None, None]), axis=-1)
    lse = jnp.log(jnp.sum(total_BM, axis=-1)) + top
    cut = (top_k > 0) | (top_p < 1.0)

    def of_all():
        # of the logits that are there already, and a number per slot: see smallest_kept. The
        # largest logit is never cut
        whole = jnp.sum(jnp.exp(logits_BV / temperature[:, None] - top[:, None]), axis=-1)
        return jnp.where(cut, jnp.log(whole) + top, lse)

    with seldom():
        lse = jax.lax.cond(jnp.any(cut), of_all, lambda: lse)

    def noise(key, position):
        # one stream for the blocks and one for the tokens within a block
        block, token = jax.random.split(jax.random.fold_in(key, position))
        return jax.random.gumbel(block, (blocks,)), jax.random.gumbel(token, (_BLOCK,))

    noise_BM, noise_BW = jax.vmap(noise)(keys_B, position_B)
    quiet = greedy[:, None]
    score_BM = jnp.where(
        quiet, jnp.max(padded, axis=-1) - top[:, None], jnp.log(total_BM) + noise_BM
    )
    block, block_margin = _best_two(score_BM)
    within = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    score_BW = jnp.where(quiet, within, within + noise_BW)
    token, token_margin = _best_two(score_BW)
    chosen = jnp.take_along_axis(within, token[:, None], axis=1)[:, 0]
    return Draw(block * _BLOCK + token, chosen - lse, jnp.minimum(block_margin, token_margin))
