"""JetStream's Engine over the network that trains.

B slots, D data ranks, T tokens of a row of prompts, K key/value heads, H head dim, V vocabulary, k
tokens per generate call.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

from distflow_jax.models.config import DecoderConfig
from distflow_jax.models.parameters import arrange, param_shardings
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.programs.options import compiler_options
from distflow_jax.rollout import decode, decode_state, occupancy, prefill, recording, tail
from distflow_jax.rollout.decode_state import DecodeState, EngineConfig, StateShapes
from distflow_jax.rollout.jetstream_tokenizer import JetStreamTokenizer
from distflow_jax.rollout.prefill import Beginning, Prefix
from distflow_jax.rollout.prefix_cache import check_prefix_cache


@struct.dataclass
class RolloutTokens(engine_api.ResultTokens):
    """ResultTokens whose data also carries log-probs, margins (as float bits) and what is left."""

    logp_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))
    margin_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))
    speculation_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))

    def convert_to_numpy(self) -> "RolloutTokens":
        """The same on the host, in one transfer."""
        return self.replace(data=np.asarray(self.data))

    def logp(self) -> np.ndarray:
        """Log-probs of the tokens, float32 [B, k]; defined where valid. Host data only."""
        start, stop = self.logp_idx
        return np.ascontiguousarray(self.data[:, start:stop]).view(np.float32)

    def margin(self) -> np.ndarray:
        """Lead of each token over the runner-up in perturbed logits, float32 [B, k]."""
        start, stop = self.margin_idx
        return np.ascontiguousarray(self.data[:, start:stop]).view(np.float32)

    def speculation(self) -> np.ndarray:
        """Tokens guessed for each slot and how many of these held, int [B, 2]; [B, 0] where off."""
        return self.data[:, slice(*self.speculation_idx)]

    def counts(self) -> np.ndarray:
        """Tokens of each slot, int [B]."""
        return self.data[:, slice(*self.valid_idx)].sum(1)

    def active(self) -> np.ndarray:
        """Which slots go on, bool [B]."""
        return self.data[:, -2] > 0

    def free_pages(self) -> np.ndarray:
        """Free pages of each slot's data rank, int [B]."""
        return self.data[:, -1]


@dataclasses.dataclass(frozen=True)
class SlotRequest:
    """Per-response settings that JetStream's insert has no place for."""

    counter: int
    sample: int
    limit: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    emitted: int = 0  # tokens that the prefix holds of the response already
    keep: bool = False  # the slot's pages stay when the response has ended

    @property
    def values(self) -> dict[str, Any]:
        """By the field of the decode state that each sets."""
        named = dataclasses.asdict(self)
        return named | {"kept": named.pop("keep")}


@dataclasses.dataclass(frozen=True)
class Given:
    """Tokens that a slot is fed before it draws the next."""

    slot: int
    tokens: Sequence[int]
    limit: int  # longest response allowed from now on
    emitted: int  # tokens of the response with these


_COLUMNS = {"temperature": np.float32, "top_p": np.float32, "kept": bool}  # others: int32


class RolloutEngine(engine_api.Engine):
    """Prefill, insert and generate over the devices of one sampler.

    `mesh` has axes ("data", "tensor"): slots are divided over data, heads over tensor. It lies
    within one process, which then needs nobody else, or spans several, all of which make the same
    calls in the same order and get the same tokens. Every program is compiled by `compile` before
    the first request.
    """

    def __init__(
        self,
        model: DecoderConfig,
        config: EngineConfig,
        mesh: Mesh,
        *,
        stop_ids: tuple[int, ...],
        seed: int,
        tokenizer: Tokenizer | None = None,
    ):
        data = mesh.shape["data"]
        if config.slots % data:
            raise ValueError(
                f"rollout slots per process {config.slots} must be divisible by the {data} data "
                f"ranks of its devices; use {-(-config.slots // data) * data}"
            )
        longest = config.max_prompt + config.max_response
        if longest > model.max_position:
            raise ValueError(
                f"prompt {config.max_prompt} + response {config.max_response} tokens exceed the "
                f"model's {model.max_position} positions"
            )
        decode_state.check_speculation(config)
        decode_state.check_weights_dtype(config.weights_dtype)
        check_prefix_cache(config)
        self.model, self.config, self._mesh = model, config, mesh
        self.shapes = StateShapes(model, config, mesh)
        self.buckets = prefill.buckets(config)
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self._tokenizer = tokenizer
        self._result_tokens = decode_state.result_tokens(config)

        layout = self.shapes.shardings()
        whole = NamedSharding(mesh, PartitionSpec())
        options = compiler_options(mesh.devices.flat[0].platform, sampler=True)

        def program(function, *, out=None, donate=(), bound=()):
            # a state that changed its layout between two programs would recompile them
            return jax.jit(
                functools.partial(function, self.shapes, *bound),
                out_shardings=out,
                donate_argnums=donate,
                compiler_options=options,
            )

        self._init = jax.jit(functools.partial(self.shapes.empty, seed), out_shardings=layout)
        self._row = program(prefill.read_row)
        self._room = jax.jit(
            functools.partial(prefill.no_tokens, self.shapes), static_argnums=0, out_shardings=whole
        )
        self._widen = jax.jit(prefill.widen, static_argnums=3, out_shardings=whole)
        self._row_after = program(prefill.read_row_after)
        self._piece = program(prefill.read_piece, donate=3)
        self._insert = program(occupancy.insert, out=(layout, whole), donate=0)
        self._admit = program(occupancy.admit, out=layout, donate=0)
        self._change = program(occupancy.change, out=layout, donate=0)
        self._collect = program(recording.collect, out=(layout, whole, whole), donate=0)
        self._generate = program(
            decode.generate, out=(layout, whole), donate=1, bound=(self.stop_ids,)
        )
        self._small = tail.small_shapes(self.shapes)
        self._generate_few = program(
            tail.generate_few, out=(layout, whole), donate=1, bound=(self._small, self.stop_ids)
        )

    # -- what JetStream asks for ------------------------------------------------------------------

    def load_params(self, params: Any, **kwargs) -> Any:
        """Puts a parameter tree on the engine's mesh, in its dtype and the layout it decodes in."""
        dtype = jnp.dtype(self.config.dtype)
        layout = param_shardings(self.model, self._mesh)
        placed = jax.tree.map(lambda x, s: jax.device_put(x.astype(dtype), s), params, layout)
        kept = self.config.weights_dtype
        return arrange(self.model, self.config.weights, placed, dtype=kept)

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array,
        true_length: int,
    ) -> Prefix:
        """Reads one prompt, the first `true_length` >= 1 of `padded_tokens` int [T].

        Whatever T the caller pads to (JetStream has lengths of its own), the prompt is laid out
        anew. With `existing_prefix` the tokens go on from there: the two together are the prompt.
        """
        tokens = np.asarray(padded_tokens, np.int32)[: int(true_length)]
        before = 0 if existing_prefix is None else int(existing_prefix.length)
        self.check_length(before + len(tokens), decode_state.longest_read(self.config))
        if existing_prefix is None and len(tokens) <= self.buckets[-1]:
            return self.prefill_row(params, [tokens])[0]
        return self._prefill_pieces(params, tokens, existing_prefix)

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        request: SlotRequest | None = None,
    ) -> DecodeState:
        """Starts a response to the prompt in `slot`. Donates decode_state."""
        request = request or SlotRequest(0, slot, self.config.max_response)
        return self.bulk_insert(prefix, decode_state, [slot], [request])

    def bulk_insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slots: list[int],
        requests: list[SlotRequest],
    ) -> DecodeState:
        """Starts up to `group_size` responses to one prompt in slots of one data rank.

        They share the prompt's keys and values.
        """
        return self.start(prefix, decode_state, slots, requests)[0]

    def generate(
        self, params: Any, decode_state: DecodeState, *, few: bool = False
    ) -> tuple[DecodeState, RolloutTokens]:
        """k steps, of up to 1 + d tokens for every active slot. Donates decode_state.

        d: tokens that are guessed in a step (`speculative_tokens`), 0 where that is off. Returns
        early once `exit_below` or fewer slots are active. In the result a slot's tokens are packed
        to the front and `valid` tells how many there are; the end token is one of them.
        `few`: no data rank has more than `few_slots` active slots, which cost less then.
        """
        r = self._result_tokens
        counted = 2 if self.config.speculative_tokens else 0
        program = self._generate_few if few else self._generate
        decode_state, data = program(params, decode_state)
        return decode_state, RolloutTokens(
            data=data,
            tokens_idx=(0, r),
            valid_idx=(r, 2 * r),
            length_idx=(2 * r, 2 * r + 1),
            samples_per_slot=1,
            logp_idx=(2 * r + 1, 3 * r + 1),
            margin_idx=(3 * r + 1, 4 * r + 1),
            speculation_idx=(4 * r + 1, 4 * r + 1 + counted),
        )

    def init_decode_state(self, *args, **kwargs) -> DecodeState:
        """All slots free."""
        return self._init()

    def get_prefix_destination_sharding(self) -> Any:
        """A prefix is whole on every device of the mesh."""
        return NamedSharding(self._mesh, PartitionSpec())

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """JetStream's descriptor; the vocabulary itself comes with the model (build_tokenizer)."""
        return tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(
        self, metadata: tokenizer_pb2.TokenizerParameters
    ) -> tokenizer_api.Tokenizer:
        """The model's own tokenizer, as JetStream calls it. ValueError if the engine got none."""
        if self._tokenizer is None:
            raise ValueError("this engine was made without a tokenizer: pass tokenizer=...")
        return JetStreamTokenizer(self._tokenizer, self.stop_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self.config.slots

    @property
    def samples_per_slot(self) -> int:
        """One response per slot."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt, in tokens."""
        return self.config.max_prompt

    @property
    def mesh(self) -> Mesh:
        """The devices it runs on."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """Not used."""
        return None

    # -- beyond JetStream: what the scheduler needs -----------------------------------------------

    @property
    def width(self) -> int:
        """Slots that can share a prompt."""
        return self.shapes.members

    @property
    def few_slots(self) -> int:
        """Active slots of a data rank that `generate` can decode as `few`; 0: none."""
        return self._small.slots if self._small else 0

    def check_length(self, length: int, most: int | None = None) -> None:
        """ValueError for a prompt that is empty or longer than `max_prompt` (or `most`)."""
        most = most or self.config.max_prompt
        if not 0 < length <= most:
            raise ValueError(f"a prompt must have 1 to {most} tokens, got {length}")

    def prefill_row(
        self, params: Any, prompts: Sequence[np.ndarray], *, after: Prefix | None = None
    ) -> list[Prefix]:
        """Reads several prompts at once, that together fit the largest of `buckets`.

        `after`: what all of them begin with, from `prefill_beginning`; only what follows it is
        read, and has to fit.
        """
        before = 0 if after is None else int(after.length)
        row = prefill.pack([prompt[before:] for prompt in prompts], self.config)
        packed = row.tokens, row.segment, row.position, row.last
        if after is None:
            beginning = None
            (key, value, experts), logits = self._row(params, *packed)
        else:
            beginning = self._beginning(after)
            (key, value, experts), logits = self._row_after(params, *packed, beginning)
        return [
            Prefix(
                key,
                value,
                logits,
                np.int32(i),
                np.int32(offset),
                np.int32(len(prompt)),
                prefill.known_tokens(prompt, self.config),
                beginning,
                experts,
            )
            for i, (prompt, offset) in enumerate(zip(prompts, row.offsets, strict=True))
        ]

    def prefill_beginning(self, params: Any, tokens: np.ndarray) -> Prefix:
        """Reads what prompts begin with, up to `prefix_tokens`, into arrays to be kept: no longer
        than the longest beginning, nor than twice its own tokens (or a page)."""
        self.check_length(len(tokens), min(self.config.prefix_tokens, self.config.max_prompt))
        prefix = self.prefill(params=params, padded_tokens=tokens, true_length=len(tokens))
        # also where they have the size already: in one layout, rows after them are one program
        size = min(prefix.key.shape[1], prefill.beginning_room(self.config))
        kept = prefill.kept_of(prefix)
        key, value, experts = self._widen(kept, prefix.offset, prefix.beginning, size)
        return prefix.replace(key=key, value=value, experts=experts)

    def start(
        self,
        prefix: Prefix,
        state: DecodeState,
        slots: Sequence[int],
        requests: Sequence[SlotRequest],
        *,
        entry: int = -1,
        members: Sequence[int] | None = None,
        hold: bool = False,
    ) -> tuple[DecodeState, jax.Array]:
        """Makes a prompt resident and starts responses to it. Donates the state.

        `entry`: as which of its data rank's prompts, -1 for one that is free; `members`: the
        number of each response among those that share the prompt, below `width`; `hold`: the prompt
        stays though nobody answers it. Returns the entry too. There must be pages for it.
        """
        rank, columns = self._columns(slots, requests, members)
        return self._insert(state, prefix, rank, np.int32(entry), np.bool_(hold), columns)

    def join(
        self,
        prefix: Prefix,
        state: DecodeState,
        slots: Sequence[int],
        requests: Sequence[SlotRequest],
        *,
        entry: int,
        members: Sequence[int],
        hold: bool,
    ) -> DecodeState:
        """Starts more responses to a resident prompt: see `start`. Of `prefix` only the logits and
        tokens are used."""
        rank, columns = self._columns(slots, requests, members)
        entry, hold = np.int32(entry), np.bool_(hold)
        return self._admit(
            state, prefix.logits, prefix.row, prefix.tokens, rank, entry, hold, columns
        )

    def change(
        self,
        state: DecodeState,
        *,
        drop: Sequence[int] = (),
        unhold: Sequence[tuple[int, int]] = (),
        give: Sequence[Given] = (),
        exit_below: int = 0,
    ) -> DecodeState:
        """Ends slots, whose pages fall free, and feeds others. Donates the state.

        `unhold`: (data rank, entry) of prompts that nobody waits for; `exit_below`: when `generate`
        comes back early.
        """
        b, width = self.config.slots, self.config.max_forced
        ends, given, limit, emitted = np.zeros(b, bool), *np.zeros((3, b), np.int32)
        forced = np.zeros((b, width), np.int32)
        free = np.zeros((self.shapes.ranks, self.shapes.slots), bool)
        ends[list(drop)] = True
        for rank, entry in unhold:
            free[rank, entry] = True
        for one in give:
            if not 0 < len(one.tokens) <= width:
                raise ValueError(f"a slot can be given 1 to {width} tokens, got {len(one.tokens)}")
            forced[one.slot, width - len(one.tokens) :] = one.tokens
            given[one.slot], limit[one.slot] = len(one.tokens), one.limit
            emitted[one.slot] = one.emitted
        exit_below = np.int32(exit_below)
        return self._change(state, ends, free, forced, given, limit, emitted, exit_below)

    def collect(
        self, state: DecodeState, slots: Sequence[int], *, ends: Collection[int] = ()
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        """Which experts the tokens went through that up to `width` slots hold; frees those slots of
        `ends`, which were kept. Donates the state. For an engine with `record_experts`.

        Returns the experts too, int8 or int16 [width, T, layers, experts of a token], T for the
        longest prompt and response, -1 behind the last token that was fed; and the free pages of
        each data rank.
        """
        if not 0 < len(slots) <= self.width or not self.config.record_experts:
            raise ValueError(
                f"collect takes 1 to {self.width} slots of an engine that records experts, got "
                f"{list(slots)} and record_experts={self.config.record_experts}"
            )
        index = np.full(self.width, self.config.slots, np.int32)  # out of range: nobody
        index[: len(slots)] = slots
        return self._collect(state, index, np.isin(index, list(ends)))

    def compile(self, params: Any) -> None:
        """Runs every program once, so that nothing compiles after the first request."""
        state, request = self.init_decode_state(), SlotRequest(0, 0, 1)
        for bucket in self.buckets:
            (prefix,) = self.prefill_row(params, [np.zeros(bucket, np.int32)])
            state, _ = self.start(prefix, state, [0], [request])
            state = self.join(prefix, state, [0], [request], entry=0, members=[0], hold=False)
        if decode_state.longest_read(self.config) > self.buckets[-1]:
            token = np.zeros(1, np.int32)
            prefix = self._prefill_pieces(params, token, None)
            state, _ = self.start(prefix, state, [0], [request])
            state = self.join(prefix, state, [0], [request], entry=0, members=[0], hold=False)
            for bucket in self.buckets:
                (read,) = self.prefill_row(params, [np.zeros(bucket, np.int32)])
                self._prefill_pieces(params, token, read)
            self._prefill_pieces(params, token, prefix)
        if self.config.prefix_tokens:
            state = self._compile_beginnings(params, state)
        state = self.change(state)
        if self.config.record_experts:
            state, *_ = self.collect(state, [0])
        for few in (False, True)[: 1 + bool(self.few_slots)]:
            state, result = self.generate(params, state, few=few)
            result.convert_to_numpy()

    def temporaries(self, params: Any) -> int | None:
        """Bytes of a device that reading the longest row of prompts, or k steps of all slots, takes
        beside what it is handed: the larger, None where the platform does not tell.

        After `compile` with the same weights nothing is compiled for it.
        """
        row = prefill.pack([np.zeros(self.buckets[-1], np.int32)], self.config)
        programs = (
            self._row.lower(params, row.tokens, row.segment, row.position, row.last),
            self._generate.lower(params, self.shapes.specs()),
        )
        found = [program.compile().memory_analysis() for program in programs]
        return max((m.temp_size_in_bytes for m in found if m is not None), default=None)

    def _compile_beginnings(self, params, state):
        longest = min(self.config.prefix_tokens, self.config.max_prompt)
        in_pieces = decode_state.longest_read(self.config) > self.buckets[-1]
        token, request = np.zeros(1, np.int32), SlotRequest(0, 0, 1)
        for length in sorted({longest, *(b for b in self.buckets if b < longest)}):
            kept = self.prefill_beginning(params, np.zeros(length, np.int32))
            self._beginning(kept)
            if in_pieces:
                self._prefill_pieces(params, token, kept)
        kept = self.prefill_beginning(params, token)
        for bucket in self.buckets:
            prompt = np.zeros(1 + bucket, np.int32)
            (prefix,) = self.prefill_row(params, [prompt], after=kept)
            state, _ = self.start(prefix, state, [0], [request])
            state = self.join(prefix, state, [0], [request], entry=0, members=[0], hold=False)
        return state

    def _beginning(self, prefix: Prefix) -> Beginning:
        """One that is kept, with room for the longest, so that one program fits all."""
        room = prefill.beginning_room(self.config)
        key, value, experts = prefill.kept_of(prefix)
        if key.shape[1] != room:
            kept = (key, value, experts)
            key, value, experts = self._widen(kept, prefix.offset, None, room)
        return Beginning(key, value, prefix.length, experts)

    def _columns(self, slots, requests, members):
        width, size = self.shapes.members, self.shapes.slots
        if not 0 < len(slots) <= width or len(slots) != len(requests):
            raise ValueError(f"insert takes 1 to {width} slots with a request each")
        if len({slot // size for slot in slots}) != 1:
            raise ValueError(
                f"slots {list(slots)} lie on several data ranks of {size} slots each: a prompt is "
                "shared within one"
            )
        empty = width - len(slots)
        members = range(len(slots)) if members is None else members
        columns = {
            # out of range: dropped
            "slot": np.array([*slots, *[self.config.slots] * empty], np.int32),
            "member": np.array([*members, *[0] * empty], np.int32),
        }
        values = [r.values for r in requests]
        for name in values[0]:
            dtype = _COLUMNS.get(name, np.int32)
            columns[name] = np.array([*(v[name] for v in values), *[0] * empty], dtype)
        return np.int32(slots[0] // size), columns

    def _prefill_pieces(self, params, tokens, existing: Prefix | None) -> Prefix:
        size = self.buckets[-1]
        room = decode_state.longest_read(self.config) + size
        room = self.config.page_size * decode_state.pages_of(room, self.config.page_size)
        before = 0 if existing is None else int(existing.length)
        known = tokens
        if existing is not None and existing.tokens is not None:
            known = np.concatenate([np.asarray(existing.tokens)[:before], tokens])
        if existing is None:
            kept = self._room(room)
        else:
            kept = prefill.kept_of(existing)
            kept = self._widen(kept, existing.offset, existing.beginning, room)
        for at in range(0, len(tokens), size):
            piece = tokens[at : at + size]
            padded = np.pad(piece, (0, size - len(piece)))
            kept, logits = self._piece(params, padded, np.int32(len(piece)), kept, np.int32(before))
            before += len(piece)
        known = prefill.known_tokens(known, self.config)
        key, value, experts = kept
        start, length = np.int32(0), np.int32(before)
        return Prefix(key, value, logits, start, start, length, known, experts=experts)
