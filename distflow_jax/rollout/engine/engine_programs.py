"""The programs of one engine: compiled functions from decode state to decode state.

D data ranks, S slots and P prompts of a rank, C responses, T tokens, X experts of a token.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.rollout.decode_state import (
    DecodeState,
    EngineConfig,
    StateShapes,
    longest_read,
    pages_of,
)
from distflow_jax.rollout.engine import (
    compact_decode,
    decode,
    slot_updates,
)
from distflow_jax.rollout.kv_cache import pages as cache_lib
from distflow_jax.rollout.prefill import prefill
from distflow_jax.rollout.prefill.prefill_programs import PrefillPrograms
from distflow_jax.rollout.sampler_program import sampler_program


def sampler_programs(model: DecoderConfig, config: EngineConfig) -> tuple[str, ...]:
    """Names of a sampler's largest programs: "prefill" of the longest row of prompts,
    "prefill_long" of a chunk of a prompt that no row holds, "decode" of k steps of all slots, and
    "encode_images" of a model with a tower."""
    long = ("prefill_long",) if prefill.takes_chunks(config) else ()
    images = ("encode_images",) if model.vision is not None else ()
    return ("prefill", *long, "decode", *images)


class EnginePrograms:
    """Programs with the sizes and layouts of `shapes`; each donates the decode state it is given.

    `prompts` read prompts. `few_slots`: active slots of a data rank that `generate_few` decodes; 0
    where there is no such program.
    """

    def __init__(self, shapes: StateShapes, *, stop_ids: tuple[int, ...], seed: int):
        layout, whole = shapes.shardings(), NamedSharding(shapes.mesh, PartitionSpec())
        program = functools.partial(sampler_program, shapes)
        self._shapes = shapes
        self.prompts = PrefillPrograms(shapes)
        self.init = jax.jit(functools.partial(shapes.empty, seed), out_shardings=layout)
        self.insert = program(slot_updates.insert, out=(layout, whole), donate=0)
        self.admit = program(slot_updates.admit, out=layout, donate=0)
        self.change = program(slot_updates.change, out=layout, donate=0)
        self.collect = program(collect, out=(layout, whole, whole), donate=0)
        small = compact_decode.small_shapes(shapes)
        self.few_slots = small.slots if small else 0
        sampling_program = functools.partial(program, out=(layout, whole), donate=1)
        if shapes.lanes < shapes.slots:
            lanes = compact_decode.narrowed(shapes, shapes.lanes)
            self.generate = sampling_program(compact_decode.generate_few, lanes, stop_ids)
        else:
            self.generate = sampling_program(decode.generate, stop_ids)
        self.generate_few = sampling_program(compact_decode.generate_few, small, stop_ids)

    def decoding(self, params: Any) -> list[jax.stages.Traced]:
        """The programs that decode, the largest to compile. `params` as in `traced`."""
        programs = [self.generate] + [self.generate_few] * bool(self.few_slots)
        return [program.trace(params, self._shapes.specs()) for program in programs]

    def temporaries(self, params: Any) -> int | None:
        """Bytes of a device for the temporary buffers of the largest of the `traced` programs.

        None where the platform does not report it. Compiles nothing after `RolloutEngine.compile`
        with the same weights.
        """
        programs = self.traced(params).values()
        found = [program.lower().compile().memory_analysis() for program in programs]
        return max((m.temp_size_in_bytes for m in found if m is not None), default=None)

    def traced(self, params: Any) -> dict[str, jax.stages.Traced]:
        """The largest programs, by `sampler_programs`. `params` may be ShapeDtypeStructs with
        shardings."""
        found = {
            "prefill": self.prompts.trace_longest_row(params),
            "decode": self.generate.trace(params, self._shapes.specs()),
        }
        if prefill.takes_chunks(self._shapes.config):
            found["prefill_long"] = self.prompts.trace_chunk(params)
        if self.prompts.images is not None:
            found["encode_images"] = self.prompts.images.trace(params)
        return found


def collect(
    shapes: StateShapes, state: DecodeState, slot: jax.Array, ends: jax.Array
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Reads the experts of the tokens that some slots hold, and frees those of `ends`.

    Experts lie in the cache's pages beside keys and values and share their fate. A response that
    has ended keeps its pages until its experts have been read. A token's experts are those that
    made its keys and values: where weights were swapped and the cache was kept, the older weights'
    choice, of a response that was read again the choice of those that read it last.

    `slot` int32 [C], out of range for none; `ends` bool [C]. Returns the state, the experts int8 or
    int16 [C, T, layers, X], T for the longest prompt and response, -1 where there is no token, and
    the free pages of each rank, int32 [D].
    """
    with use_mesh(shapes.mesh):
        ranks, slots = shapes.ranks, shapes.slots
        experts = jax.vmap(
            lambda rank, cache: _of_rank(shapes, slot, rank, cache),
            in_axes=(0, _RankCache(1, 0, 0, 0, 0, 0)),
        )(
            jnp.arange(ranks, dtype=jnp.int32),
            _RankCache(
                state.cache.experts,
                *_tables(shapes, state.cache),
                state.prompt_length,
                shapes.by_rank(state.prompt),
                shapes.by_rank(state.length),
            ),
        )
        experts = ~experts.sum(0, dtype=experts.dtype)  # one rank has it, the others zeros
        gone = jnp.where(ends, slot, ranks * slots)
        state = shapes.released(state.replace(kept=state.kept.at[gone].set(False, mode="drop")))
        free = cache_lib.free_pages(state.cache, shapes.owners)
        whole = NamedSharding(shapes.mesh, PartitionSpec())
        experts, free = (jax.lax.with_sharding_constraint(x, whole) for x in (experts, free))
        return state, experts, free


def _tables(shapes: StateShapes, cache: cache_lib.Cache) -> tuple[jax.Array, jax.Array]:
    """Pages of slots [D, S, n] and of prompts [D, P, n]."""
    config, slots = shapes.config, shapes.slots
    own = pages_of(config.max_response, config.page_size)
    prompts = pages_of(longest_read(config), config.page_size)
    return (
        cache_lib.tables(cache, first=0, count=slots, longest=own),
        cache_lib.tables(cache, first=slots, count=slots, longest=prompts),
    )


class _RankCache(NamedTuple):
    """The cache of one data rank, or the axes that ranks are on."""

    experts: Any  # int8 or int16 [layers, N, W, X], of N pages
    own_table: Any  # int32 [S, n]: pages of slots
    prompt_table: Any  # int32 [P, n]: pages of prompts
    prompt_length: Any  # int32 [P]
    prompt: Any  # int32 [S]: which one each slot reads
    length: Any  # int32 [S]: tokens of each slot, the prompt's included


def _of_rank(shapes: StateShapes, slot: jax.Array, rank: jax.Array, cache: _RankCache) -> jax.Array:
    """The experts of one rank's slots, [C, T, layers, X], with inverted bits: 0 where there is no
    token, or another rank has the slot."""
    experts, own_table, prompt_table, prompt_length, prompt, length = cache
    config, slots, size = shapes.config, shapes.slots, shapes.config.page_size
    is_here = (slot >= rank * slots) & (slot < (rank + 1) * slots)
    index = jnp.clip(slot - rank * slots, 0, slots - 1)
    entry = jnp.minimum(prompt[index], slots - 1)
    before = prompt_length[entry][:, None]
    at = jnp.arange(config.max_prompt + config.max_response, dtype=jnp.int32)[None]
    in_prompt, after = at < before, jnp.maximum(at - before, 0)

    def pages(table, owner, place):
        most = table.shape[1] - 1
        return jnp.take_along_axis(table[owner], jnp.minimum(place // size, most), axis=1)

    place = jnp.where(in_prompt, at, after)
    of_prompt, own = pages(prompt_table, entry, place), pages(own_table, index, place)
    page, within = jnp.where(in_prompt, of_prompt, own), place % size
    # advanced indices around a slice put the indexed dims first: [C, T, layers, X]
    found = experts[:, jnp.minimum(page, experts.shape[1] - 1), :, within]
    known = is_here[:, None] & (at < length[index][:, None])
    return jnp.where(known[..., None, None], ~found, 0)
