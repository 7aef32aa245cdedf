"""JetStream's Engine over the network that trains.

B slots, T prompt bucket, K key/value heads, H head dim, V vocabulary, k tokens per generate call.

A decode step draws a token from the slot's logits, writes it out, and only then, if somebody still
needs it, runs the network: a response of n tokens costs n - 1 network steps, and the first token of
every response of a group comes from one prefill.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

from distflow_jax.models.attention import cached_attention, masked_attention
from distflow_jax.models.config import DecoderConfig
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.transformer import Decoder, bind, param_shardings
from distflow_jax.parallel.rules import sharding, use_mesh
from distflow_jax.rollout import cache as cache_lib
from distflow_jax.rollout.jetstream_tokenizer import JetStreamTokenizer
from distflow_jax.rollout.sampling import SamplingParams, draw, sample_key


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static sizes of an engine."""

    slots: int  # responses decoded side by side
    max_prompt: int  # tokens
    max_response: int  # tokens, the end token included
    tokens_per_call: int = 16  # k: decode steps between two looks from the host
    cache_block: int = 64  # tokens per cache block
    group_size: int = 8  # slots filled by one insert at most
    dtype: str = "float32"  # of weights, activations and cache


@struct.dataclass
class Prefix:
    """A prompt that has been read: keys and values [layers, T, K, H], next-token logits [V]."""

    key: Any
    value: Any
    logits: Any
    length: Any  # int32 scalar


@struct.dataclass
class DecodeState:
    """Everything a decode step reads and writes; B slots."""

    cache: cache_lib.Cache
    logits: Any  # float32 [B, V]: distribution of the next token
    length: Any  # int32 [B]: tokens in the cache
    emitted: Any  # int32 [B]: tokens of the response so far
    limit: Any  # int32 [B]: longest response allowed
    active: Any  # bool [B]
    counter: Any  # int32 [B]: uid, first half
    sample: Any  # int32 [B]: uid, second half
    temperature: Any  # float32 [B]
    top_k: Any  # int32 [B]
    top_p: Any  # float32 [B]
    seed: Any  # key of the run
    exit_below: Any  # int32: generate returns early once this many or fewer slots are active


@struct.dataclass
class RolloutTokens(engine_api.ResultTokens):
    """ResultTokens whose data also carries the log-probs (as float bits) and margins."""

    logp_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))
    margin_idx: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))

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


@dataclasses.dataclass(frozen=True)
class SlotRequest:
    """Per-response settings that JetStream's insert has no place for."""

    counter: int
    sample: int
    limit: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def prefill_buckets(max_prompt: int, block: int) -> tuple[int, ...]:
    """Prompt lengths that are compiled: block, 2 block, 4 block, ... up to max_prompt."""
    buckets = [block]
    while buckets[-1] < max_prompt:
        buckets.append(min(2 * buckets[-1], -(-max_prompt // block) * block))
    return tuple(buckets)


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
        self.model, self.config, self._mesh = model, config, mesh
        self.buckets = prefill_buckets(config.max_prompt, config.cache_block)
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self._seed = seed
        self._tokenizer = tokenizer

        jit = functools.partial(jax.jit, static_argnums=0)
        self._init = jax.jit(self._empty_state, out_shardings=self._state_shardings())
        self._prefill = functools.partial(jit(RolloutEngine._prefill_program), self)
        self._insert = functools.partial(jit(RolloutEngine._insert_program, donate_argnums=2), self)
        self._generate = functools.partial(
            jit(RolloutEngine._generate_program, donate_argnums=2), self
        )

    # -- what JetStream asks for ------------------------------------------------------------------

    def load_params(self, params: Any, **kwargs) -> Any:
        """Puts a parameter tree on the engine's mesh, in its dtype and the layout it decodes in."""
        dtype = jnp.dtype(self.config.dtype)
        layout = param_shardings(self.model, self._mesh)
        return jax.tree.map(lambda x, s: jax.device_put(x.astype(dtype), s), params, layout)

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array,
        true_length: int,
    ) -> Prefix:
        """Reads one prompt, the first `true_length` >= 1 of `padded_tokens` int [T].

        Whatever T the caller pads to (JetStream has lengths of its own), the prompt is padded anew
        to one of `buckets`. A prompt that was cut to its last T tokens is read as these.
        """
        if existing_prefix is not None:
            raise ValueError(
                "this engine reads a prompt in one piece: existing_prefix must be None"
            )
        tokens, length = self.pad(np.asarray(padded_tokens, np.int32)[: int(true_length)])
        return self._prefill(params, tokens, np.int32(length))

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
        """Starts up to `group_size` responses to one prompt, all from one prefill."""
        width = self.config.group_size
        if not 0 < len(slots) <= width or len(slots) != len(requests):
            raise ValueError(f"insert takes 1 to {width} slots with a request each")

        def column(values, dtype, empty=0):
            return np.array([*values, *[empty] * (width - len(slots))], dtype)

        return self._insert(
            prefix,
            decode_state,
            column(slots, np.int32, empty=self.config.slots),  # out of range: dropped
            column([r.counter for r in requests], np.int32),
            column([r.sample for r in requests], np.int32),
            column([r.limit for r in requests], np.int32),
            column([r.temperature for r in requests], np.float32),
            column([r.top_k for r in requests], np.int32),
            column([r.top_p for r in requests], np.float32),
        )

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, RolloutTokens]:
        """Up to k tokens for every active slot. Donates decode_state.

        Returns early once `exit_below` or fewer slots are active. In the result a slot's tokens are
        packed to the front and `valid` tells how many there are; the end token is one of them.
        """
        k = self.config.tokens_per_call
        decode_state, data = self._generate(params, decode_state)
        span = [(i * k, (i + 1) * k) for i in range(2)]
        return decode_state, RolloutTokens(
            data=data,
            tokens_idx=span[0],
            valid_idx=span[1],
            length_idx=(2 * k, 2 * k + 1),
            samples_per_slot=1,
            logp_idx=(2 * k + 1, 3 * k + 1),
            margin_idx=(3 * k + 1, 4 * k + 1),
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

    # -- beyond JetStream -------------------------------------------------------------------------

    def pad(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        """(prompt padded to its bucket, true length). ValueError beyond max_prompt."""
        if not 0 < len(tokens) <= self.config.max_prompt:
            raise ValueError(
                f"a prompt must have 1 to {self.config.max_prompt} tokens, got {len(tokens)}"
            )
        bucket = next(b for b in self.buckets if b >= len(tokens))
        return np.pad(np.asarray(tokens, np.int32), (0, bucket - len(tokens))), len(tokens)

    def set_exit_below(self, decode_state: DecodeState, count: int) -> DecodeState:
        """Sets when `generate` comes back early."""
        # not device_put: where several hosts share the mesh, it would ask all processes of the job
        value = jax.make_array_from_callback(
            (), decode_state.exit_below.sharding, lambda _: np.int32(count), dtype=np.int32
        )
        return decode_state.replace(exit_below=value)

    def compile(self, params: Any) -> None:
        """Runs every program once, so that nothing compiles after the first request."""
        state = self.init_decode_state()
        for bucket in self.buckets:
            tokens = np.zeros(min(bucket, self.config.max_prompt), np.int32)
            prefix = self.prefill(params=params, padded_tokens=tokens, true_length=len(tokens))
            state = self.insert(prefix, state, 0, SlotRequest(0, 0, 1))
        state = self.set_exit_below(state, 0)
        _, result = self.generate(params, state)
        result.convert_to_numpy()

    # -- programs ---------------------------------------------------------------------------------

    def _state_shardings(self) -> DecodeState:
        key_shape, value_shape = self._cache_shapes()
        b = self.config.slots

        def layout(axes, shape):
            return sharding(self._mesh, axes, shape)

        slot = layout(("batch",), (b,))
        whole = layout((), ())
        names = [f.name for f in dataclasses.fields(DecodeState)]
        return DecodeState(**dict.fromkeys(names, slot)).replace(
            cache=cache_lib.Cache(
                layout(cache_lib.KEY_AXES, key_shape), layout(cache_lib.VALUE_AXES, value_shape)
            ),
            logits=layout(("batch", "logits"), (b, self.model.vocab_size)),
            seed=whole,
            exit_below=whole,
        )

    def _cache_shapes(self):
        c = self.config
        tokens = c.max_prompt + c.max_response
        return cache_lib.cache_shapes(self.model, slots=c.slots, tokens=tokens, block=c.cache_block)

    def _empty_state(self) -> DecodeState:
        c, b = self.config, self.config.slots
        key_shape, value_shape = self._cache_shapes()
        return DecodeState(
            cache=cache_lib.Cache(jnp.zeros(key_shape, c.dtype), jnp.zeros(value_shape, c.dtype)),
            logits=jnp.zeros((b, self.model.vocab_size), jnp.float32),
            length=jnp.zeros(b, jnp.int32),
            emitted=jnp.zeros(b, jnp.int32),
            limit=jnp.zeros(b, jnp.int32),
            active=jnp.zeros(b, bool),
            counter=jnp.zeros(b, jnp.int32),
            sample=jnp.zeros(b, jnp.int32),
            temperature=jnp.ones(b, jnp.float32),
            top_k=jnp.zeros(b, jnp.int32),
            top_p=jnp.ones(b, jnp.float32),
            seed=jax.random.key(self._seed),
            exit_below=jnp.zeros((), jnp.int32),
        )

    def _pinned(self, state: DecodeState) -> DecodeState:
        # a state that changed its layout between two programs would recompile them
        return jax.lax.with_sharding_constraint(state, self._state_shardings())

    def _logits(self, decoder: Decoder, hidden: jax.Array) -> jax.Array:
        weight = decoder.head_weight(self.config.dtype)
        return jnp.einsum("BD,VD->BV", hidden, weight, preferred_element_type=jnp.float32)

    def _prefill_program(self, params, tokens_T, true_length):
        with use_mesh(self._mesh):
            decoder = bind(self.model, params)
            length = tokens_T.shape[0]
            position = jnp.arange(length, dtype=jnp.int32)[None]
            mask = jnp.tril(jnp.ones((length, length), bool))[None]

            def attend(q, k, v, _):
                return masked_attention(q, k, v, mask), (k[0], v[0])

            hidden, (key, value) = decoder.hidden(
                tokens_T[None], position, attend, dtype=jnp.dtype(self.config.dtype)
            )
            last = jax.lax.dynamic_slice_in_dim(hidden[0], true_length - 1, 1, axis=0)
            return Prefix(key, value, self._logits(decoder, last)[0], true_length)

    def _insert_program(
        self, prefix, state, slots, counter, sample, limit, temperature, top_k, top_p
    ):
        def put(column, values):
            return column.at[slots].set(values, mode="drop")

        count = slots.shape[0]
        return self._pinned(
            state.replace(
                cache=cache_lib.insert(state.cache, prefix.key, prefix.value, slots),
                logits=put(
                    state.logits,
                    jnp.broadcast_to(prefix.logits[None], (count, *prefix.logits.shape)),
                ),
                length=put(state.length, jnp.full(count, prefix.length)),
                emitted=put(state.emitted, jnp.zeros(count, jnp.int32)),
                limit=put(state.limit, limit),
                active=put(state.active, limit > 0),
                counter=put(state.counter, counter),
                sample=put(state.sample, sample),
                temperature=put(state.temperature, temperature),
                top_k=put(state.top_k, top_k),
                top_p=put(state.top_p, top_p),
            )
        )

    def _decode_network(self, decoder: Decoder, state: DecodeState, token_B) -> DecodeState:
        """Feeds one token per slot; slots that are not active compute along and keep nothing."""
        block = self.config.cache_block
        used = jnp.max(jnp.where(state.active, state.length, 0))
        used_blocks = (used + block - 1) // block

        def attend(q, k, v, layer):
            out = cached_attention(
                q[:, 0],
                k[:, 0],
                v[:, 0],
                state.cache.key,
                state.cache.value,
                layer,
                state.length,
                used_blocks,
            )
            return out[:, None], (k[:, 0], v[:, 0])

        hidden, (key, value) = decoder.hidden(
            token_B[:, None],
            state.length[:, None],
            attend,
            layer_inputs=jnp.arange(self.model.num_layers, dtype=jnp.int32),
            dtype=jnp.dtype(self.config.dtype),
        )
        beyond = state.cache.key.shape[1] * block
        where = jnp.where(state.active, state.length, beyond)
        return state.replace(
            cache=cache_lib.append(state.cache, key, value, where),
            logits=self._logits(decoder, hidden[:, 0]),
            length=jnp.where(state.active, state.length + 1, state.length),
        )

    def _generate_program(self, params, state):
        with use_mesh(self._mesh):
            decoder = bind(self.model, params)
            k, slots = self.config.tokens_per_call, self.config.slots
            keys = jax.vmap(sample_key, in_axes=(None, 0, 0))(
                state.seed, state.counter, state.sample
            )
            stop = jnp.asarray(self.stop_ids, jnp.int32)

            def go_on(carry):
                step, state, *_ = carry
                running = state.active.sum(dtype=jnp.int32)
                # the first step always runs: a caller that asks for tokens gets some
                return (step < k) & (running > jnp.where(step == 0, 0, state.exit_below))

            def decode(carry):
                step, state, tokens, valid, logp, margin = carry
                params_B = SamplingParams(state.temperature, state.top_k, state.top_p)
                drawn = draw(state.logits, keys, state.emitted, params_B)
                was_active = state.active

                def write(buffer, column):
                    return jax.lax.dynamic_update_slice_in_dim(
                        buffer, column[:, None], step, axis=1
                    )

                emitted = state.emitted + was_active.astype(jnp.int32)
                stopped = jnp.any(drawn.token[:, None] == stop[None], axis=1)
                state = state.replace(
                    emitted=emitted, active=was_active & ~stopped & (emitted < state.limit)
                )
                state = jax.lax.cond(
                    jnp.any(state.active),
                    lambda s: self._decode_network(decoder, s, drawn.token),
                    lambda s: s,
                    state,
                )
                return (
                    step + 1,
                    state,
                    write(tokens, drawn.token),
                    write(valid, was_active.astype(jnp.int32)),
                    write(logp, drawn.logp),
                    write(margin, drawn.margin),
                )

            ints = jnp.zeros((slots, k), jnp.int32)
            floats = jnp.zeros((slots, k), jnp.float32)
            start = (jnp.int32(0), state, ints, ints, floats, floats)
            _, state, tokens, valid, logp, margin = jax.lax.while_loop(go_on, decode, start)

            def bits(x):
                return jax.lax.bitcast_convert_type(x, jnp.int32)

            data = jnp.concatenate(
                [tokens, valid, state.emitted[:, None], bits(logp), bits(margin)], axis=1
            )
            # whole on every device: each host of the mesh reads its own copy
            whole = NamedSharding(self._mesh, PartitionSpec())
            return self._pinned(state), jax.lax.with_sharding_constraint(data, whole)
