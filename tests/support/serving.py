"""A tiny engine, and a server of it that runs in a thread beside the test."""

import asyncio
import contextlib
import functools
import os
import threading

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests
from distflow_jax.serving.access import Access
from distflow_jax.serving.jetstream import GREEDY, JetStreamProtocol, prepare, service_config
from distflow_jax.serving.served_weights import Weights
from distflow_jax.serving.server import Server, ServerConfig
from support.tiny_model import TINY, mesh_of, prompt_of, random_params
from support.waiting import HANG

prepare()  # for JetStream's own Driver
TOKENIZER = Tokenizer.byte_level(TINY.vocab_size)
STOP_IDS = (258, *range(4))  # a response ends after some sixty tokens
CONFIG = EngineConfig(
    slots=8,
    max_prompt=48,
    max_response=200,
    tokens_per_call=4,
    page_size=16,
    group_size=4,
    max_read=248,
)


@functools.cache
def weights_of(seed):
    """The engine's weights number `seed`."""
    return engine().load_params(random_params(TINY, seed))


def make(config, axes=(1, 1)):
    mesh = mesh_of(*axes, names=("data", "tensor"))
    return RolloutEngine(TINY, config, mesh, stop_ids=STOP_IDS, seed=3, tokenizer=TOKENIZER)


@functools.cache
def engine():
    """One engine for all tests of a process."""
    return make(CONFIG)


@functools.cache
def service():
    """The one of JetStream's service."""
    return make(service_config(CONFIG))


@functools.cache
def expected(prompt, *, uid=0, samples=1, limit=200, seed=2, **how):
    """The answer of the engine: one call of run_requests."""
    request = GroupRequest(
        prompt_of(uid, TOKENIZER.encode(prompt)), SamplingParams(samples, limit, **how)
    )
    state = engine().init_decode_state()
    return run_requests(engine(), weights_of(seed), state, [request])[1]


def expected_all(asked):
    """Greedy answers to many: (prompt, limit) each."""
    requests = [
        GroupRequest(prompt_of(i, TOKENIZER.encode(prompt)), SamplingParams(1, limit, 0.0))
        for i, (prompt, limit) in enumerate(asked)
    ]
    state = engine().init_decode_state()
    return run_requests(engine(), weights_of(2), state, requests)[1]


class Serving:
    """A server in a thread of its own, until the `with` block ends."""

    def __init__(
        self, engines=None, load=None, tokenizer=TOKENIZER, seeing=None, sampling=GREEDY, **changes
    ):
        changes = {"access": Access(load_folders=(".",))} | changes
        config = ServerConfig(model="tiny", seed=3, port=0, **changes)
        first, second = engines or (engine(), service())
        load = load or self.load
        self.weights = Weights(load("2")[0], 2)
        others = [JetStreamProtocol(second, self.weights, tokenizer, sampling)]
        self.server = Server(
            config, first, self.weights, tokenizer, load, others=others, seeing=seeing
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stopped = False

    @staticmethod
    def load(path):
        """Weights number N, of step 10 N, from "N"."""
        path = os.path.basename(path)
        if not path.isdigit():
            raise FileNotFoundError(f"{path} holds no checkpoints/: is it the --workdir of a run?")
        return weights_of(int(path)), 10 * int(path)

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HANG)

    @contextlib.contextmanager
    def held(self, rounds):
        """A block in which the sampler stands still after so many rounds; yields what ends that."""
        scheduler, goes_on, left = self.server.sampler.scheduler, threading.Event(), rounds
        step = scheduler.step

        def held_step():
            nonlocal left
            left -= 1
            assert left >= 0 or goes_on.wait(HANG)
            return step()

        scheduler.step = held_step
        try:
            yield goes_on.set
        finally:
            goes_on.set()
            del scheduler.step

    def begin_stop(self, hurry=False):
        """Starts to stop the server; a future of its end."""
        self._stopped = True
        event = asyncio.Event()
        if hurry:
            event.set()
        return asyncio.run_coroutine_threadsafe(self.server.stop(event), self._loop)

    @property
    def jetstream(self):
        """JetStream's servicer."""
        return self.server._services[0]

    @property
    def address(self):
        return f"127.0.0.1:{self.server.port}"

    def __enter__(self):
        self._thread.start()
        self.run(self.server.start())
        return self

    def __exit__(self, *exception):
        if not self._stopped:
            self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG)
        self._loop.close()
