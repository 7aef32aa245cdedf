"""k decode steps in one program.

A step draws a token from the slot's logits, writes it out, and only then, if somebody still needs
it, runs the network: a response of n tokens costs n - 1 network steps, and the first token of every
response of a group comes from one prefill. Tokens that a slot is given instead (a tool's answer)
are fed in the same steps, beside the others' drawing.

B slots in all, D data ranks, S slots of a rank, k steps, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.models.transformer import Decoder, bind
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.rollout import cache as cache_lib
from distflow_jax.rollout.decode_state import DecodeState, StateShapes, longest_read, pages_of
from distflow_jax.rollout.kernel_attention import append_pages, over_table
from distflow_jax.rollout.paged_attention import (
    Group,
    OverPages,
    over_pages,
    own_chunks,
    prompt_chunks,
    slot_attention,
)
from distflow_jax.rollout.sampling import Draw, SamplingParams, draw, sample_key


def head_logits(decoder: Decoder, hidden: jax.Array, dtype: str) -> jax.Array:
    """Next-token logits float32 [B, V] of hidden states [B, D]."""
    weight = decoder.head_weight(dtype)
    return jnp.einsum("BD,VD->BV", hidden, weight, preferred_element_type=jnp.float32)


def feed(
    decoder: Decoder, shapes: StateShapes, state: DecodeState, token_B: jax.Array, fed_B: jax.Array
) -> DecodeState:
    """Runs the network on one token per slot; what is not `fed` computes along and keeps nothing
    but logits that nobody will draw from."""
    cache, by_rank = state.cache, shapes.by_rank
    over_own, over_prompts = _attentions(shapes, state)

    def attend(q, k, v, layer):
        out = slot_attention(
            by_rank(q),
            by_rank(k),
            by_rank(v),
            layer,
            over_own=over_own,
            over_prompts=over_prompts,
            # of slots that have ended the number among the prompt's members may be another's
            prompt=by_rank(jnp.where(fed_B, state.prompt, shapes.slots)),
            member=by_rank(state.member),
            number=shapes.slots,
            members=min(shapes.config.group_size, shapes.slots),
        )
        return out.reshape(q.shape), (k, v)

    hidden, (key, value) = decoder.hidden(
        token_B[:, None],
        state.length[:, None],
        attend,
        layer_inputs=jnp.arange(shapes.model.num_layers, dtype=jnp.int32),
        dtype=jnp.dtype(shapes.config.dtype),
    )
    split = (shapes.model.num_layers, shapes.ranks, shapes.slots)
    key, value = (x.reshape(*split, *x.shape[3:]) for x in (key, value))
    page, within = cache_lib.place(cache, by_rank(jnp.where(fed_B, state.own, -1)))
    if shapes.attention == "tpu":
        keys, values = append_pages(cache, key, value, page, within, shapes.mesh)
        cache = dataclasses.replace(cache, key=keys, value=values)
    else:
        cache = cache_lib.append(cache, key, value, page, within)
    return state.replace(
        cache=cache,
        logits=head_logits(decoder, hidden[:, 0], shapes.config.dtype),
        length=state.length + fed_B.astype(jnp.int32),
        own=state.own + fed_B.astype(jnp.int32),
    )


def _attentions(shapes: StateShapes, state: DecodeState) -> tuple[OverPages, OverPages]:
    """Over the pages of slots and of prompts, as the engine's platform does it."""
    cache, slots, config = state.cache, shapes.slots, shapes.config
    own, prompts = shapes.by_rank(state.own), state.prompt_length
    if shapes.attention == "pages":
        chunks = own_chunks(cache, slots), prompt_chunks(cache, slots, shapes.owners)
        groups = Group(0, own, chunks[0]), Group(slots, prompts, chunks[1])
        return tuple(
            lambda q, layer, group=group: over_pages(q, cache, layer, group) for group in groups
        )

    def by_kernel(first, tokens, length):
        longest = pages_of(tokens, config.page_size)
        table = cache_lib.tables(cache, first=first, count=slots, longest=longest)
        options = {"mesh": shapes.mesh, "implementation": shapes.attention}
        return lambda q, layer: over_table(q, cache, layer, table, length, **options)

    longest = longest_read(config)
    return by_kernel(0, config.max_response, own), by_kernel(slots, longest, prompts)


def step(
    decoder: Decoder, shapes: StateShapes, state: DecodeState, keys_B: jax.Array, stop: jax.Array
) -> tuple[DecodeState, Draw, jax.Array]:
    """One token for every active slot. Returns what was drawn and by whom, bool [B].

    A slot that finds no free page keeps its token and tries again in the next step.
    """
    forced = state.forced_left > 0
    drawing = state.active & ~forced
    params = SamplingParams(state.temperature, state.top_k, state.top_p)
    drawn = draw(state.logits, keys_B, state.emitted, params)
    emitted = state.emitted + drawing.astype(jnp.int32)
    stopped = jnp.any(drawn.token[:, None] == stop[None], axis=1)
    active = state.active & ~(drawing & (stopped | (emitted >= state.limit)))
    state = state.replace(emitted=emitted, active=active)

    # the next token given, or the one just drawn, as a queue of one
    width = state.forced.shape[1]
    queue = state.forced.at[:, -1].set(jnp.where(forced, state.forced[:, -1], drawn.token))
    left = jnp.where(active, jnp.maximum(state.forced_left, 1), 0)
    at = jnp.clip(width - left, 0, width - 1)
    token = jnp.take_along_axis(queue, at[:, None], axis=1)[:, 0]

    need = active & (state.own % shapes.config.page_size == 0)

    def take(state):
        state = shapes.released(state)
        cache, got = cache_lib.take_low(
            state.cache,
            shapes.by_rank(need),
            shapes.by_rank(state.own // shapes.config.page_size),
            shapes.owners,
        )
        return state.replace(cache=cache), got.reshape(need.shape)

    state, got = jax.lax.cond(jnp.any(need), take, lambda s: (s, need), state)
    fed = active & (~need | got)
    state = state.replace(forced=queue, forced_left=left - fed.astype(jnp.int32))
    state = jax.lax.cond(
        jnp.any(fed), lambda s: feed(decoder, shapes, s, token, fed), lambda s: s, state
    )
    return state, drawn, drawing


def generate(
    shapes: StateShapes, stop_ids: tuple[int, ...], params, state: DecodeState
) -> tuple[DecodeState, jax.Array]:
    """Up to k steps; comes back early once `exit_below` or fewer slots are active.

    Returns int32 [B, 4 k + 3]: tokens, packed to the front, and how many are valid, tokens of the
    response so far, log-probs and margins (their bits), whether the slot goes on, and free pages of
    its rank. It is whole on every device: each host of the mesh reads its own copy.
    """
    with use_mesh(shapes.mesh):
        decoder = bind(shapes.model, params)
        k, slots = shapes.config.tokens_per_call, shapes.config.slots
        keys = jax.vmap(sample_key, in_axes=(None, 0, 0))(state.seed, state.counter, state.sample)
        stop = jnp.asarray(stop_ids, jnp.int32)
        iota = jnp.arange(slots, dtype=jnp.int32)

        def go_on(carry):
            done, state, *_ = carry
            running = state.active.sum(dtype=jnp.int32)
            # the first step always runs: a caller that asks for tokens gets some
            return (done < k) & (running > jnp.where(done == 0, 0, state.exit_below))

        def body(carry):
            done, state, count, tokens, logp, margin = carry
            state, drawn, drawing = step(decoder, shapes, state, keys, stop)
            at = jnp.where(drawing, count, k)

            def write(buffer, column):
                return buffer.at[iota, at].set(column, mode="drop")

            return (
                done + 1,
                state,
                count + drawing.astype(jnp.int32),
                write(tokens, drawn.token),
                write(logp, drawn.logp),
                write(margin, drawn.margin),
            )

        ints = jnp.zeros((slots, k), jnp.int32)
        floats = jnp.zeros((slots, k), jnp.float32)
        start = (jnp.int32(0), state, jnp.zeros(slots, jnp.int32), ints, floats, floats)
        _, state, count, tokens, logp, margin = jax.lax.while_loop(go_on, body, start)

        def bits(x):
            return jax.lax.bitcast_convert_type(x, jnp.int32)

        state = shapes.released(state)
        free = cache_lib.free_pages(state.cache, shapes.owners)
        valid = jnp.arange(k, dtype=jnp.int32)[None] < count[:, None]
        data = jnp.concatenate(
            [
                tokens,
                valid.astype(jnp.int32),
                state.emitted[:, None],
                bits(logp),
                bits(margin),
                state.active[:, None].astype(jnp.int32),
                jnp.repeat(free, shapes.slots)[:, None],
            ],
            axis=1,
        )
        whole = NamedSharding(shapes.mesh, PartitionSpec())
        return state, jax.lax.with_sharding_constraint(data, whole)
