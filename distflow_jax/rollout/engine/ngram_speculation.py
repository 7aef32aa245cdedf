"""Guesses at what comes next, from what a slot's own text repeats.

B slots, X tokens of a slot's history at most, C tokens proposed.

Text that comes back (a name, an equation carried from line to line, a quoted question) is guessed
by looking up where its last n tokens stood before (prompt lookup: Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding). Guesses cost the network a few more tokens in the
same pass. Which of them hold is decided by the tokens that plain decoding draws (Leviathan et al.
2022, arxiv.org/abs/2211.17192, with a proposal that is certain of itself and noise that is tied to
the position), so they change how fast tokens come, never which.
"""

import jax
import jax.numpy as jnp


def write(
    history_BX: jax.Array, token_BQ: jax.Array, start_B: jax.Array, count_B: jax.Array
) -> jax.Array:
    """The history with the first `count_B` of `token_BQ` from place `start_B` on."""
    # every place looks for its token: no scatter, and slots stay on their devices
    queries = token_BQ.shape[1]
    which = jnp.arange(history_BX.shape[1], dtype=jnp.int32)[None] - start_B[:, None]
    new = jnp.take_along_axis(token_BQ, jnp.clip(which, 0, queries - 1), axis=1)
    return jnp.where((which >= 0) & (which < count_B[:, None]), new, history_BX)


def propose(
    history_BX: jax.Array, end_B: jax.Array, *, ngram: int, count: int
) -> tuple[jax.Array, jax.Array]:
    """The tokens after the latest earlier occurrence of each row's last `ngram` tokens.

    A row has `end_B` tokens. Returns int32 [B, C], C = `count`, and bool [B]: whether the n-gram
    occurred before. Where fewer than C tokens followed it, they are repeated: a text with a period
    of p tokens is guessed to continue.
    """
    place = jnp.arange(history_BX.shape[1], dtype=jnp.int32)[None]
    last = end_B[:, None] - 1
    hit = (place >= ngram - 1) & (place < last)  # where the earlier ones end
    for back in range(ngram):
        wanted = jnp.take_along_axis(history_BX, jnp.maximum(last - back, 0), axis=1)
        hit &= jnp.roll(history_BX == wanted, back, axis=1)
    latest = jnp.max(jnp.where(hit, place, -1), axis=1)
    period = jnp.maximum(end_B - 1 - latest, 1)[:, None]
    nth = jnp.arange(count, dtype=jnp.int32)[None] % period
    at = jnp.clip(latest[:, None] + 1 + nth, 0, history_BX.shape[1] - 1)
    return jnp.take_along_axis(history_BX, at, axis=1), latest >= 0
