"""JetStream's own service: its Driver and servicer over our engine.

The Driver is JetStream's, thread for thread. What it has no place for goes around it: it hands a
request's content to the tokenizer, what that gives to `prefill`, and what that gives to `insert`,
all untouched, so that a `Question` can carry a limit and ids through it.

What the released Driver needs to run for long (version 0.2.2, the last one):
- it frees prefixes by jax.tree_map, which jax has removed: `prepare` gives it a function of ours;
- it raises, and kills the process, where the last response ends between two of its looks at the
  free slots: `ServedDriver` starts the thread's loop again, which nothing was running in;
- it kills the process for a request it cannot read: `JetStreamServicer` refuses those before.
"""

import contextlib
import dataclasses
import itertools
import logging
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import jax
import numpy as np
from flax import struct

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.decode_state import DecodeState, EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.engine.result_tokens import JetStreamTokenizer, RolloutTokens
from distflow_jax.rollout.engine.slot_updates import SlotRequest
from distflow_jax.rollout.engine_interface import (
    INSTALLED,
    Engine,
)
from distflow_jax.rollout.jetstream_install import INSTALL
from distflow_jax.rollout.prefill.prefill import Prefix
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.serving.messages import (
    MAX_UID,
    STOPPING,
    Limits,
    prompt_length_error,
    sentence,
    token_ids_error,
)
from distflow_jax.serving.prompts import PromptReader
from distflow_jax.serving.served_weights import Weights
from distflow_jax.serving.text_stream import TextStream

if not INSTALLED:
    raise ImportError(f"google-jetstream is not installed: {INSTALL}", name="jetstream")


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Restores the root logger, which the import sets to DEBUG with a handler on stdout.

    That handler would print every line that jax and asyncio log.
    """
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


# after engine_interface.py, which has imported JetStream's interface without seqio
with _root_logger_kept():
    from jetstream.core import orchestrator
    from jetstream.core.metrics.prometheus import JetstreamMetricsCollector
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

# the lengths that JetStream pads to
_PADDED_LENGTHS = tuple(1 << n for n in range(4, 16))
# JetStream's protocol has no fields for it; the limit is that of each question
GREEDY = SamplingParams(num_samples=1, limit=1, temperature=0.0)


def prepare() -> None:
    """Makes the imported orchestrator run on today's jax. To be called before a Driver."""
    orchestrator.delete_pytree = delete_arrays


def delete_arrays(tree: Any) -> None:
    """Frees the device memory of a prefix at once."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def service_config(config: EngineConfig) -> EngineConfig:
    """Sizes for JetStream's service: a cache in which every slot has room for a prompt of its own.

    Its Driver shares no prompts, takes a slot without tokens for one that has ended, and cannot
    preempt a sequence: no slot may ever wait for a page, or for a lane.
    """
    slots = config.decode_slots
    return dataclasses.replace(config, slots=slots, lanes=0, group_size=1, cache_tokens=0)


class Question(str):
    """A prompt on its way through the Driver: a text to it, ids and a limit to the engine."""

    ids: np.ndarray  # int32 [T]
    limit: int  # tokens
    active: orchestrator.ActiveRequest | None  # the Driver's own record, once there is one

    def __new__(cls, ids: np.ndarray, limit: int):
        """A question with an empty text: the ids are what is read."""
        self = super().__new__(cls, "")
        self.ids, self.limit, self.active = ids, limit, None
        return self


@struct.dataclass
class LimitedPrefix:
    """A prefix with the limit of the response to it, in tokens."""

    prefix: Prefix
    limit: int = struct.field(pytree_node=False)


class ServiceTokenizer(JetStreamTokenizer):
    """Lets a `Question` through as it is; a plain text as the engine's own tokenizer does."""

    def encode(self, s: str, **kwargs) -> tuple[Any, int]:
        """(the question or ids, number of ids)."""
        if isinstance(s, Question):
            return s, len(s.ids)
        return super().encode(s, **kwargs)


class ServiceEngine(Engine):
    """An engine that takes the weights served at each call, and takes turns with other threads.

    The engine has the sizes of `service_config`. Params are a `Weights`. A call returns when its
    result is there, so that another thread waits for one call at most.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        weights: Weights,
        tokenizer: Tokenizer,
        sampling: SamplingParams = GREEDY,
    ):
        self._engine, self._weights = engine, weights
        self._tokenizer, self._sampling = tokenizer, sampling
        self._counter = itertools.count()

    def load_params(self, *args, **kwargs) -> Weights:
        """The weights that are served now."""
        return self._weights

    def prefill(
        self,
        *,
        params: Weights,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
    ) -> LimitedPrefix:
        """Reads a question, or tokens as RolloutEngine.prefill does."""
        limit = self._engine.config.max_response
        if isinstance(padded_tokens, Question):
            padded_tokens, limit = padded_tokens.ids, padded_tokens.limit
        with params.turns:
            prefix = self._engine.prefill(
                params=params.params,
                existing_prefix=existing_prefix,
                padded_tokens=padded_tokens,
                true_length=true_length,
            )
            return LimitedPrefix(jax.block_until_ready(prefix), limit)

    def insert(self, prefix: LimitedPrefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Starts the response in `slot`, with noise of its own."""
        uid = next(self._counter) % MAX_UID
        request = SlotRequest(uid, 0, dataclasses.replace(self._sampling, limit=prefix.limit))
        with self._weights.turns:
            # a response that the Driver has dropped may still be in the slot, and have pages
            state = self._engine.change(decode_state, drop=[slot])
            state = self._engine.insert(prefix.prefix, state, slot, request)
            return jax.block_until_ready(state)

    def generate(
        self, params: Weights, decode_state: DecodeState
    ) -> tuple[DecodeState, RolloutTokens]:
        """One call of the engine, with the weights of now."""
        with params.turns:
            return jax.block_until_ready(self._engine.generate(params.params, decode_state))

    def init_decode_state(self, *args, **kwargs) -> DecodeState:
        """All slots free."""
        with self._weights.turns:
            return jax.block_until_ready(self._engine.init_decode_state())

    def get_prefix_destination_sharding(self) -> Any:
        """As the engine's."""
        return self._engine.get_prefix_destination_sharding()

    def get_tokenizer(self) -> Any:
        """As the engine's."""
        return self._engine.get_tokenizer()

    def build_tokenizer(self, metadata: Any) -> ServiceTokenizer:
        """The model's own tokenizer."""
        return ServiceTokenizer(self._tokenizer, self._engine.stop_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self._engine.max_concurrent_decodes

    @property
    def samples_per_slot(self) -> int:
        """One response per slot."""
        return self._engine.samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        """The shortest of JetStream's lengths that is at least the engine's."""
        longest = self._engine.max_prefill_length
        return next((n for n in _PADDED_LENGTHS if n >= longest), _PADDED_LENGTHS[-1])

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices it runs on."""
        return self._engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """Not used."""
        return self._engine.colocated_cpus


class ServedDriver(orchestrator.Driver):
    """JetStream's Driver with a bound on what waits, and a loop that outlives its last request."""

    def __init__(self, engine: ServiceEngine, *, max_waiting: int, metrics_collector: Any = None):
        self._max_waiting = max_waiting
        params = engine.load_params()
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,
            jax_padding=False,
            metrics_collector=metrics_collector,
        )

    def place_request_on_prefill_queue(self, request: orchestrator.ActiveRequest) -> None:
        """As the Driver's; queue.Full (the servicer: RESOURCE_EXHAUSTED) beyond `max_waiting`."""
        if self._prefill_backlog.qsize() >= self._max_waiting:
            raise queue.Full
        if isinstance(request.prefill_content, Question):
            request.prefill_content.active = request
        super().place_request_on_prefill_queue(request)

    def _generate_thread(self, idx: int) -> None:
        slots = self._generate_slots[idx]
        while True:
            try:
                return super()._generate_thread(idx)
            except AssertionError:
                # All slots fell free after the Driver had counted them. Then nothing runs, and its
                # loop can begin again with a new decode state (the old one is gone with its frame).
                if slots.qsize() < self._generate_engines[idx].max_concurrent_decodes:
                    raise


@dataclasses.dataclass(frozen=True)
class JetStreamProtocol:
    """JetStream's protocol for a server: an engine of its own, and how it samples.

    The engine has the sizes of `service_config`, and shares the weights with the server's.
    """

    engine: RolloutEngine
    weights: Weights
    tokenizer: Tokenizer
    sampling: SamplingParams = GREEDY

    def compile(self) -> None:
        """Compiles every program of the engine."""
        self.engine.compile(self.weights.params)

    def serve(
        self,
        server: grpc.aio.Server,
        prompts: PromptReader,
        limits: Limits,
        *,
        max_waiting: int,
        metrics: bool,
    ) -> "JetStreamServicer":
        """Starts the Driver's threads and adds the servicer to a server that has not started."""
        prepare()
        driver = ServedDriver(
            ServiceEngine(self.engine, self.weights, self.tokenizer, self.sampling),
            max_waiting=max_waiting,
            metrics_collector=JetstreamMetricsCollector() if metrics else None,
        )
        servicer = JetStreamServicer(driver, self.tokenizer, limits, prompts, max_waiting)
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
        return servicer


class JetStreamServicer(orchestrator.LLMOrchestrator):
    """JetStream's servicer, which refuses what its Driver could not read, and frees slots.

    The text of a token is not known from that token alone where it ends within a character: it is
    decoded along the response, so that all texts together are that of the whole.
    """

    def __init__(
        self,
        driver: ServedDriver,
        tokenizer: Tokenizer,
        limits: Limits,
        prompts: PromptReader,
        max_calls: int,
    ):
        super().__init__(driver)
        self._tokenizer, self._limits = tokenizer, limits
        self._prompts, self._max_calls, self._reading = prompts, max_calls, 0
        self._questions: dict[int, Question] = {}  # by id() of the request that asks it
        self.stopping = False

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._questions) + self._reading

    def refuse(self) -> None:
        """Ends the requests that run, with UNAVAILABLE."""
        for question in self._questions.values():
            if question.active is not None:
                question.active.return_channel.set_exception(_StopChannel())

    def stop(self) -> None:
        """Ends the Driver's threads."""
        self._driver.stop()

    async def Decode(
        self, request: jetstream_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
        """As JetStream's, for requests that can be answered."""
        if self.stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
        if self._reading >= self._max_calls:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._max_calls} requests wait already; ask again later",
            )
        self._reading += 1
        try:
            question = await self._prompts.apart(self._question, request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence(error))
        finally:
            self._reading -= 1
        text = TextStream(self._tokenizer)
        wants_text = request.WhichOneof("content") == "text_content"
        with self._opened(request, question):
            try:
                async for response in super().Decode(request, context):
                    if wants_text:
                        for sample in response.stream_content.samples:
                            sample.text = "".join(text.push(i) for i in sample.token_ids)
                    yield response
                if wants_text and (rest := text.rest()):
                    content = jetstream_pb2.DecodeResponse.StreamContent(
                        samples=[jetstream_pb2.DecodeResponse.StreamContent.Sample(text=rest)]
                    )
                    yield jetstream_pb2.DecodeResponse(stream_content=content)
            except _StopChannel:
                await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)

    def _get_prefill_content(self, request: jetstream_pb2.DecodeRequest) -> tuple[Question, bool]:
        question = self._questions[id(request)]
        return question, request.WhichOneof("content") == "token_content"

    def should_buffer_response(self, response: Any) -> bool:
        """Never: Decode holds back what is not a whole character."""
        return False

    def _question(self, request: jetstream_pb2.DecodeRequest) -> Question:
        """The request as the engine reads it. ValueError says what is wrong with it."""
        content = request.WhichOneof("content")
        if content is None:
            raise ValueError("the prompt is empty; give text_content or token_content")
        if request.session_cache:
            raise ValueError("session_cache is not supported; leave it empty")
        if content == "text_content":
            ids = self._prompts.encode(request.text_content.text)
        else:
            ids = np.array(request.token_content.token_ids, np.int32)
        longest = self._limits.max_response
        wrong = prompt_length_error(len(ids), self._limits) or token_ids_error(ids, self._limits)
        if wrong is None and not 1 <= request.max_tokens <= longest:
            wrong = f"max_tokens must be from 1 to {longest}, got {request.max_tokens}"
        if wrong:
            raise ValueError(wrong)
        return Question(ids, request.max_tokens)

    @contextlib.contextmanager
    def _opened(self, request: jetstream_pb2.DecodeRequest, question: Question) -> Iterator[None]:
        self._questions[id(request)] = question
        try:
            yield
        finally:
            del self._questions[id(request)]
            if question.active is not None:
                # where the client has gone, the Driver finds the response too long at its next
                # look, and frees the slot
                question.active.max_tokens = -1


class _StopChannel(Exception):
    """Put into a response's channel to end it."""
