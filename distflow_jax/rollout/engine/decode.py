"""k decode steps in one program.

A step draws a token from the slot's logits, writes it out, and only then, if a slot still needs
it, runs the network: a response of n tokens costs n - 1 network steps, and the first token of every
response of a group comes from one prefill. Tokens that a slot is given instead (a tool's answer)
are fed in the same steps, beside the others' drawing.

With d tokens guessed in a step (ngram_speculation.py) the network reads them after the one that was
drawn, and those that are then drawn too, by the noise of their own position, are as good as drawn
one by one.

B slots in all, D data ranks, S slots of a rank, Q new tokens of a slot (1 + d), k steps, V
vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.models.moe import recorded_dtype
from distflow_jax.models.transformer import head_logits, hidden_states
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.programs.bounded_loops import bounded_while
from distflow_jax.rollout.decode_state import (
    DecodeState,
    StateShapes,
    longest_read,
    pages_of,
    result_tokens,
)
from distflow_jax.rollout.engine import ngram_speculation
from distflow_jax.rollout.engine.sampling import Draw, SlotSampling, draw, sample_key
from distflow_jax.rollout.kv_cache import kernel_attention, page_walk_attention
from distflow_jax.rollout.kv_cache import pages as cache_lib
from distflow_jax.rollout.kv_cache.page_walk_attention import slot_attention
from distflow_jax.rollout.kv_cache.shared_prompt_attention import Contexts, OverCache


class Step(NamedTuple):
    """The tokens of a step, each field [B, Q] but for the last two."""

    token: jax.Array  # int32
    logp: jax.Array  # float32
    margin: jax.Array  # float32
    valid: jax.Array  # bool: drawn, and part of the response
    proposed: jax.Array  # int32 [B]: tokens guessed and tried
    accepted: jax.Array  # int32 [B]: of these, those that were drawn too


class Fed(NamedTuple):
    """Keys, values, experts and hidden states of the tokens that were fed."""

    key: jax.Array  # [layers, B, Q, K, H], not in the cache yet
    value: jax.Array
    experts: jax.Array | None  # int8 or int16 [layers, B, Q, X], of X experts; None: not recorded
    hidden: jax.Array  # [B, Q, D]


def feed(
    params: Any, shapes: StateShapes, state: DecodeState, token_BQ: jax.Array, count_B: jax.Array
) -> Fed:
    """Runs the network on Q tokens per slot, of which the first `count_B` count; the others compute
    along."""
    by_rank, over = shapes.by_rank, _over_cache(shapes, state, count_B, token_BQ.shape[1])

    def attend(q, k, v, layer, *window):
        out = slot_attention(by_rank(q), by_rank(k), by_rank(v), layer, over, *window)
        return out.reshape(q.shape), (k, v)

    nth = jnp.arange(token_BQ.shape[1], dtype=jnp.int32)[None]
    position = state.length if state.shift is None else state.length + state.shift
    hidden, kept = hidden_states(
        shapes.model,
        params,
        token_BQ,
        position[:, None] + nth,
        attend,
        layer_inputs=jnp.arange(shapes.model.num_layers, dtype=jnp.int32),
        dtype=jnp.dtype(shapes.config.dtype),
        route=shapes.route,
    )
    (key, value), experts = (kept, None) if shapes.route is None else kept
    return Fed(key, value, experts, hidden)


def keep(
    shapes: StateShapes,
    state: DecodeState,
    key: jax.Array,
    value: jax.Array,
    experts: jax.Array | None,
    count_B: jax.Array,
) -> cache_lib.Cache:
    """The cache with the first `count_B` of each slot's tokens: key, value [layers, B, Q, K, H] and
    experts [layers, B, Q, X], as in `Fed`.

    Not a part of `feed`: a cache that is written in a branch of a program is copied by XLA.
    """
    cache = state.cache
    nth = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
    own = jnp.where(nth < count_B[:, None], state.own[:, None] + nth, -1)
    places = cache_lib.place(cache, shapes.by_rank(own))
    page, within = (x.reshape(shapes.ranks, -1) for x in places)
    split = (shapes.model.num_layers, shapes.ranks, -1)
    made = key, value, experts
    key, value, experts = jax.tree.map(lambda x: x.reshape(*split, *x.shape[3:]), made)
    mesh = shapes.mesh
    if "tpu" in (shapes.attention, mesh.devices.flat[0].platform):
        return kernel_attention.append_pages(cache, key, value, page, within, mesh, experts)
    return cache_lib.append(cache, key, value, page, within, experts)


def _over_cache(
    shapes: StateShapes, state: DecodeState, count_B: jax.Array, queries: int
) -> OverCache:
    """Over the pages of slots and of prompts, as the engine's platform does it."""
    windows = {"sliding_window": shapes.model.sliding_window, "queries": queries}
    cache, config, by_rank = state.cache, shapes.config, shapes.by_rank
    contexts = Contexts(
        own=by_rank(state.own),
        prompts=state.prompt_length,
        member=by_rank(state.member),
        # of slots that have ended the number among the prompt's members may be another's
        prompt=by_rank(jnp.where(count_B > 0, state.prompt, shapes.slots)),
    )
    longest = pages_of(longest_read(config), config.page_size)
    if shapes.attention == "pages":
        return page_walk_attention.over_cache(
            cache, contexts, members=shapes.members, longest=longest, **windows
        )
    return kernel_attention.over_cache(
        cache,
        contexts,
        members=shapes.members,
        longest=(pages_of(config.max_response, config.page_size), longest),
        mesh=shapes.mesh,
        implementation=shapes.attention,
        **windows,
    )


def _draw_next(
    state: DecodeState, keys_B: jax.Array, stop: jax.Array
) -> tuple[DecodeState, Draw, jax.Array]:
    """Draws one token for every active slot that is not fed its next. Returns the draw and the
    slots that drew, bool [B]; in the state every active slot has tokens to be fed."""
    forced = state.forced_left > 0
    drawing = state.active & ~forced
    drawn = draw(state.logits, keys_B, state.emitted, _sampling(state))
    emitted = state.emitted + drawing.astype(jnp.int32)
    stopped = jnp.any(drawn.token[:, None] == stop[None], axis=1)
    active = state.active & ~(drawing & (stopped | (emitted >= state.limit)))
    # the next token given, or the one just drawn, as a queue of one
    queue = state.forced.at[:, -1].set(jnp.where(forced, state.forced[:, -1], drawn.token))
    left = jnp.where(active, jnp.maximum(state.forced_left, 1), 0)
    state = state.replace(emitted=emitted, active=active, forced=queue, forced_left=left)
    return state, drawn, drawing


def _sampling(state: DecodeState) -> SlotSampling:
    return SlotSampling(state.temperature, state.top_k, state.top_p)


def _queued(state: DecodeState, count: int) -> jax.Array:
    """The next `count` tokens to be fed, int32 [B, count]; as many as are left of them count."""
    width = state.forced.shape[1]
    nth = jnp.arange(count, dtype=jnp.int32)[None]
    at = jnp.clip(width - state.forced_left[:, None] + nth, 0, width - 1)
    return jnp.take_along_axis(state.forced, at, axis=1)


def _take_where(
    state: DecodeState, need: jax.Array, take: Callable[[], tuple[jax.Array, ...]]
) -> tuple[DecodeState, jax.Array]:
    """`take` -> (owner and rank of each page, slots that got one) if any slot is in `need`.

    Also returns the slots that got one, bool [B]. The branch has nothing of the cache but what it
    changes: see `keep`.
    """
    cache = state.cache
    owner, rank, got = jax.lax.cond(jnp.any(need), take, lambda: (cache.owner, cache.rank, need))
    return state.replace(cache=dataclasses.replace(cache, owner=owner, rank=rank)), got


def _nothing_made(shapes: StateShapes, queries: int) -> tuple[jax.Array | None, ...]:
    """Keys, values, experts and logits of a step that feeds no slot.

    The old logits are not needed any more, since every active slot is fed before it draws: kept,
    they would cost a copy of [B, V] in every step.
    """
    c, slots = shapes.model, shapes.config.slots
    shape = (c.num_layers, slots, queries, c.num_kv_heads, c.head_dim)
    made, experts = jnp.zeros(shape, shapes.config.dtype), None
    if shapes.config.record_experts:
        experts = jnp.zeros((*shape[:3], c.experts_per_token), recorded_dtype(c.num_experts))
    return made, made, experts, jnp.zeros((slots, c.vocab_size), jnp.float32)


def step(
    params: Any, shapes: StateShapes, state: DecodeState, keys_B: jax.Array, stop: jax.Array
) -> tuple[DecodeState, Step]:
    """One token for every active slot; `stop` int32 [n] are the ids that end a response.

    A slot that finds no free page keeps its token and tries again in the next step.
    """
    state, drawn, drawing = _draw_next(state, keys_B, stop)
    need = state.active & (state.own % shapes.config.page_size == 0)

    def take():
        cache, got = cache_lib.take_low(
            shapes.released(state).cache,
            shapes.by_rank(need),
            shapes.by_rank(state.own // shapes.config.page_size),
            shapes.owners,
        )
        return cache.owner, cache.rank, got.reshape(need.shape)

    state, got = _take_where(state, need, take)
    fed = state.active & (~need | got)
    count = fed.astype(jnp.int32)

    def run():
        made = feed(params, shapes, state, _queued(state, 1), count)
        logits = head_logits(shapes.model, params, made.hidden[:, 0])
        return made.key, made.value, made.experts, logits

    def rest():
        return _nothing_made(shapes, 1)

    *made, logits = jax.lax.cond(jnp.any(fed), run, rest)
    state = state.replace(
        cache=keep(shapes, state, *made, count),
        logits=logits,
        length=state.length + count,
        own=state.own + count,
        forced_left=state.forced_left - count,
    )
    none = jnp.zeros_like(state.emitted)
    return state, Step(*(x[:, None] for x in (*drawn, drawing)), none, none)


def speculative_step(
    params: Any, shapes: StateShapes, state: DecodeState, keys_B: jax.Array, stop: jax.Array
) -> tuple[DecodeState, Step]:
    """One token for every active slot, and up to d more that were guessed. `stop` int32 [n].

    A slot is fed up to Q tokens: what it is given, or the token it drew, and then guesses. A guess
    holds where the token that the logits before it give, drawn by the noise of its position, is the
    same; the first that does not hold, and what comes after it, leave keys and values behind that
    lie beyond the slot's length until others take their places. A slot that finds no free page
    keeps what it is given and tries again in the next step.
    """
    config = shapes.config
    queries = 1 + config.speculative_tokens
    state, drawn, drawing = _draw_next(state, keys_B, stop)
    nth = jnp.arange(queries, dtype=jnp.int32)[None]

    given = jnp.minimum(state.forced_left, queries)
    guessing = nth >= given[:, None]
    token = _queued(state, queries)
    history = ngram_speculation.write(state.history, token, state.length, given)
    guess, known = ngram_speculation.propose(
        history, state.length + given, ngram=config.speculative_ngram, count=queries
    )
    at = jnp.clip(nth - given[:, None], 0, queries - 1)
    token = jnp.where(guessing, jnp.take_along_axis(guess, at, axis=1), token)
    # a slot ends by a token that it draws as its next: no guess is an end token or the last allowed
    ends = guessing & jnp.any(token[..., None] == stop[None, None], axis=2)
    most = jnp.min(jnp.where(ends, nth, queries), axis=1)
    most = jnp.minimum(most, given + state.limit - state.emitted - 1)
    wanted = jnp.where(state.active, jnp.where(known, most, given), 0)
    state, room = _make_room(shapes, state, wanted)
    count = jnp.clip(room, 0, wanted)  # the room of a slot that has ended is below 0

    def run():
        made = feed(params, shapes, state, token, count)
        flat = made.hidden.reshape(-1, made.hidden.shape[-1])
        logits = head_logits(shapes.model, params, flat).reshape(*made.hidden.shape[:2], -1)
        # after each token but the last, the one at the place of the next
        place = jnp.maximum(state.emitted[:, None] + nth[:, 1:] - given[:, None], 0)
        each = queries - 1
        verdict = draw(
            logits[:, :-1].reshape(-1, logits.shape[-1]),
            jnp.repeat(keys_B, each),
            place.reshape(-1),
            SlotSampling(*(jnp.repeat(x, each) for x in _sampling(state))),
        )
        verdict = Draw(*(x.reshape(-1, each) for x in verdict))
        holds = ~guessing[:, 1:] | (verdict.token == token[:, 1:])
        holds = jnp.pad(holds, ((0, 0), (1, 0)), constant_values=True) & (nth < count[:, None])
        good = jnp.cumprod(holds.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
        last = jnp.maximum(good - 1, 0)[:, None, None]
        logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]
        return made.key, made.value, made.experts, logits, verdict, good

    def rest():
        ints = jnp.zeros((config.slots, queries - 1), jnp.int32)
        floats = ints.astype(jnp.float32)
        return *_nothing_made(shapes, queries), Draw(ints, floats, floats), count

    *made, logits, verdict, good = jax.lax.cond(jnp.any(count > 0), run, rest)
    state = state.replace(
        cache=keep(shapes, state, *made, count),
        logits=logits,
        length=state.length + good,
        own=state.own + good,
        forced_left=state.forced_left - jnp.minimum(good, given),
        emitted=state.emitted + jnp.maximum(good - given, 0),
        history=ngram_speculation.write(history, token, state.length, good),
    )
    columns = (
        jnp.concatenate([first[:, None], more], axis=1)
        for first, more in zip(drawn, verdict, strict=True)
    )
    valid = jnp.concatenate([drawing[:, None], (guessing & (nth < good[:, None]))[:, 1:]], axis=1)
    tried, held = (jnp.maximum(x - given, 0) for x in (count, good))
    return state, Step(*columns, valid, tried, held)


def _make_room(
    shapes: StateShapes, state: DecodeState, wanted: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Takes a page for each slot that wants more tokens than its pages have room for, as far as
    there are free ones. `wanted` int32 [B], a page at most. Returns the room too, int32 [B]."""
    size = shapes.config.page_size
    pages = cache_lib.held_pages(state.cache, shapes.slots)
    room = pages.reshape(-1) * size - state.own
    more = wanted > room
    must = more & (room <= 0)

    def take():
        # slots that cannot go on at all come before those that would only guess
        cache, got = shapes.released(state).cache, []
        for need in (must, more & ~must):
            cache, found = cache_lib.take_low(cache, shapes.by_rank(need), pages, shapes.owners)
            got.append(found.reshape(-1))
        return cache.owner, cache.rank, got[0] | got[1]

    state, got = _take_where(state, more, take)
    return state, room + size * got.astype(jnp.int32)


def generate(
    shapes: StateShapes, stop_ids: tuple[int, ...], params, state: DecodeState
) -> tuple[DecodeState, jax.Array]:
    """Up to k steps; comes back early once `exit_below` or fewer slots are active.

    Returns int32 [B, 4 R + 3], R = k Q: tokens, packed to the front, and how many are valid, tokens
    of the response so far, log-probs and margins (their bits), 1 + the tokens still to be fed of a
    slot that goes on (0 otherwise), and free pages of its rank; where tokens are guessed, before
    the last two columns, how many were and how many of them held. It is whole on every device: each
    host of the mesh reads its own copy.
    """
    with use_mesh(shapes.mesh):
        k, slots = shapes.config.tokens_per_call, shapes.config.slots
        most = result_tokens(shapes.config)
        one_step = speculative_step if shapes.config.speculative_tokens else step
        keys = jax.vmap(sample_key, in_axes=(None, 0, 0))(state.seed, state.counter, state.sample)
        stop = jnp.asarray(stop_ids, jnp.int32)
        iota = jnp.arange(slots, dtype=jnp.int32)

        def go_on(carry):
            done, state, *_ = carry
            running = state.active.sum(dtype=jnp.int32)
            # the first step always runs: a call gives at least one token
            return (done < k) & (running > jnp.where(done == 0, 0, state.exit_below))

        def body(carry):
            done, state, count, (tokens, logp, margin), guesses = carry
            state, new = one_step(params, shapes, state, keys, stop)
            nth = jnp.cumsum(new.valid, axis=1, dtype=jnp.int32)
            at = jnp.where(new.valid, count[:, None] + nth - 1, most)

            def write(buffer, columns):
                return buffer.at[iota[:, None], at].set(columns, mode="drop")

            return (
                done + 1,
                state,
                count + nth[:, -1],
                (write(tokens, new.token), write(logp, new.logp), write(margin, new.margin)),
                guesses + jnp.stack([new.proposed, new.accepted], axis=1),
            )

        none = jnp.zeros(slots, jnp.int32)
        ints = jnp.zeros((slots, most), jnp.int32)
        floats = jnp.zeros((slots, most), jnp.float32)
        guesses = jnp.zeros((slots, 2), jnp.int32)
        start = (jnp.int32(0), state, none, (ints, floats, floats), guesses)
        _, state, count, (tokens, logp, margin), guesses = bounded_while(go_on, body, start, most=k)

        def bits(x):
            return jax.lax.bitcast_convert_type(x, jnp.int32)

        state = shapes.released(state)
        free = cache_lib.free_pages(state.cache, shapes.owners)
        valid = jnp.arange(most, dtype=jnp.int32)[None] < count[:, None]
        data = jnp.concatenate(
            [
                tokens,
                valid.astype(jnp.int32),
                state.emitted[:, None],
                bits(logp),
                bits(margin),
                *([guesses] if shapes.config.speculative_tokens else []),
                jnp.where(state.active, 1 + state.forced_left, 0)[:, None],
                jnp.repeat(free, shapes.slots)[:, None],
            ],
            axis=1,
        )
        whole = NamedSharding(shapes.mesh, PartitionSpec())
        return state, jax.lax.with_sharding_constraint(data, whole)
