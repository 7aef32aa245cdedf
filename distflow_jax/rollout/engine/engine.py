"""JetStream's Engine over the network that trains.

T tokens of a row of prompts, k tokens per generate call.
"""

import concurrent.futures
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.parameters import param_shardings
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.decode_state import (
    DecodeState,
    EngineConfig,
    StateShapes,
    check_length,
    check_speculation,
    longest_read,
)
from distflow_jax.rollout.engine.engine_programs import EnginePrograms
from distflow_jax.rollout.engine.result_tokens import JetStreamTokenizer, RolloutTokens
from distflow_jax.rollout.engine.slot_updates import (
    Injection,
    SlotRequest,
    change_columns,
    insert_columns,
    prompt_end,
)
from distflow_jax.rollout.engine_interface import Engine, EngineTokenizer, TokenizerParameters
from distflow_jax.rollout.prefill.image_programs import PromptSight
from distflow_jax.rollout.prefill.prefill import Prefix
from distflow_jax.rollout.prefill.prefix_cache import check_prefix_cache
from distflow_jax.rollout.requests import SamplingParams


def weight_layout(model: DecoderConfig, config: EngineConfig, mesh: Mesh) -> SamplerLayout:
    """Layout and number format of the weights of an engine on `mesh`."""
    platform = mesh.devices.flat[0].platform
    return SamplerLayout(model, platform, config.weights, config.weights_dtype)


class RolloutEngine(Engine):
    """Prefill, insert and generate over the devices of one sampler.

    `mesh` has axes ("data", "tensor"): slots are divided over data, heads over tensor. It lies
    within one process or spans several; all of its processes make the same calls in the same order
    and get the same tokens. `compile` compiles every program before the first request.
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
        if config.lanes % data or config.lanes > config.slots:
            raise ValueError(
                f"rollout lanes per process {config.lanes} must be divisible by the {data} data "
                f"ranks of its devices, and at most the {config.slots} slots"
            )
        longest = config.max_prompt + config.max_response
        if longest > model.max_position:
            raise ValueError(
                f"prompt {config.max_prompt} + response {config.max_response} tokens exceed the "
                f"model's {model.max_position} positions"
            )
        check_speculation(config)
        check_prefix_cache(config)
        self.model, self.config, self._mesh = model, config, mesh
        self.shapes = shapes = StateShapes(model, config, mesh)
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self._tokenizer = tokenizer
        self.programs = EnginePrograms(shapes, stop_ids=self.stop_ids, seed=seed)
        self.prompts = self.programs.prompts
        self.buckets = self.prompts.buckets  # compiled lengths of a row of prompts, tokens
        self.width = shapes.members  # slots that can share a prompt
        self.few_slots = self.programs.few_slots  # of a data rank: see `generate`
        # XLA:CPU has a thread per device: of several programs in flight, one whose first devices
        # wait for the last one can be left without a thread for that, for ever
        self._ahead: list[concurrent.futures.Future] = []  # programs that are being compiled
        self._one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    # -- JetStream's interface -------------------------------------------------------------------

    def load_params(self, params: Any, **kwargs) -> Any:
        """Puts a parameter tree on the engine's mesh, in its dtype and the layout it decodes in."""
        dtype = jnp.dtype(self.config.dtype)
        layout = param_shardings(self.model, self._mesh)
        placed = jax.tree.map(lambda x, s: jax.device_put(x.astype(dtype), s), params, layout)
        return weight_layout(self.model, self.config, self._mesh).convert_placed(placed)

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array,
        true_length: int,
        sight: PromptSight | None = None,
    ) -> Prefix:
        """Reads one prompt, the first `true_length` >= 1 of `padded_tokens` int [T].

        Whatever T the caller pads to (JetStream has lengths of its own), the prompt is laid out
        anew. With `existing_prefix` the tokens go on from there: the two together are the prompt.
        `sight`: the images of the whole prompt.
        """
        tokens = np.asarray(padded_tokens, np.int32)[: int(true_length)]
        before = 0 if existing_prefix is None else int(existing_prefix.length)
        check_length(before + len(tokens), longest_read(self.config))
        return self.prompts.read(params, tokens, existing_prefix, sight)

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        request: SlotRequest | None = None,
    ) -> DecodeState:
        """Starts a response to the prompt in `slot`. Donates decode_state."""
        request = request or SlotRequest(0, slot, SamplingParams(1, self.config.max_response))
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
        to the front and `valid` marks them; the end token is one of them.
        `few`: no data rank has more than `few_slots` active slots, which cost less then.
        """
        program = self.programs.generate_few if few else self.programs.generate
        decode_state, data = program(params, decode_state)
        return decode_state, RolloutTokens.of(data, self.config)

    def init_decode_state(self, *args, **kwargs) -> DecodeState:
        """All slots free."""
        return self.programs.init()

    def get_prefix_destination_sharding(self) -> Any:
        """A prefix is whole on every device of the mesh."""
        return NamedSharding(self._mesh, PartitionSpec())

    def get_tokenizer(self) -> TokenizerParameters:
        """JetStream's descriptor; the vocabulary itself comes with the model (build_tokenizer)."""
        return TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: TokenizerParameters) -> EngineTokenizer:
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

    # -- beyond JetStream, for the scheduler -----------------------------------------------------

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
        """Writes a prompt into the cache and starts responses to it. Donates the state.

        `entry`: as which of its data rank's prompts, -1 for one that is free; `members`: the
        number of each response among those that share the prompt, below `width`; `hold`: the prompt
        stays though no slot reads it. Returns the entry too. There must be pages for it.
        """
        rank, columns = insert_columns(self.shapes, slots, requests, members)
        entry, hold = np.int32(entry), np.bool_(hold)
        prefix = _in_turn(self._one_at_a_time, prefix)
        return _in_turn(
            self._one_at_a_time, self.programs.insert(state, prefix, rank, entry, hold, columns)
        )

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
        """Starts more responses to a prompt in the cache: see `start`. Of `prefix` only the logits
        and tokens are used."""
        rank, columns = insert_columns(self.shapes, slots, requests, members)
        entry, hold = np.int32(entry), np.bool_(hold)
        end = prompt_end(_in_turn(self._one_at_a_time, prefix))
        return _in_turn(
            self._one_at_a_time, self.programs.admit(state, end, rank, entry, hold, columns)
        )

    def change(
        self,
        state: DecodeState,
        *,
        drop: Sequence[int] = (),
        unhold: Sequence[tuple[int, int]] = (),
        inject: Sequence[Injection] = (),
        exit_below: int = 0,
    ) -> DecodeState:
        """Ends slots, frees their pages, and injects tokens into others. Donates the state.

        `unhold`: (data rank, entry) of prompts that no sequence waits for; `exit_below`: when
        `generate` comes back early.
        """
        columns = change_columns(self.shapes, drop, unhold, inject)
        return _in_turn(
            self._one_at_a_time, self.programs.change(state, *columns, np.int32(exit_below))
        )

    def collect(
        self, state: DecodeState, slots: Sequence[int], *, ends: Collection[int] = ()
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        """Reads the experts that the tokens of up to `width` slots were routed to; frees the slots
        of `ends`. Donates the state. For an engine with `record_experts`.

        Returns the experts too, int8 or int16 [width, T, layers, experts of a token], T for the
        longest prompt and response, -1 behind the last token that was fed; and the free pages of
        each data rank.
        """
        if not 0 < len(slots) <= self.width or not self.config.record_experts:
            raise ValueError(
                f"collect takes 1 to {self.width} slots of an engine that records experts, got "
                f"{list(slots)} and record_experts={self.config.record_experts}"
            )
        index = np.full(self.width, self.config.slots, np.int32)  # out of range: none
        index[: len(slots)] = slots
        return self.programs.collect(state, index, np.isin(index, list(ends)))

    def compile_ahead(self) -> None:
        """Starts to compile the programs that decode, in threads of their own; `compile` waits for
        them. They take half of the time, and need no array."""
        if not self._ahead:
            layout = weight_layout(self.model, self.config, self._mesh)
            params = layout.specs(self._mesh, self.config.dtype)
            threads = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="compile")
            self._ahead = [
                threads.submit(lambda program=program: program.lower().compile())
                for program in self.programs.decoding(params)
            ]
            threads.shutdown(wait=False)

    def compile(self, params: Any) -> None:
        """Runs every program once, so that nothing compiles after the first request."""
        self.compile_ahead()
        state, request = self.init_decode_state(), SlotRequest(0, 0, SamplingParams(1, 1))
        for prefix in self.prompts.every_shape(params):
            state, _ = self.start(prefix, state, [0], [request])
            state = self.join(prefix, state, [0], [request], entry=0, members=[0], hold=False)
        state = self.change(state)
        if self.config.record_experts:
            state, *_ = self.collect(state, [0])
        for program in self._ahead:
            program.result()
        for few in (False, True)[: 1 + bool(self.few_slots)]:
            state, result = self.generate(params, state, few=few)
            result.convert_to_numpy()


def _in_turn(wait: bool, x: Any) -> Any:
    """Outputs of a program, waited for where programs must not be in flight together."""
    return jax.block_until_ready(x) if wait else x
