"""One gRPC server over one set of weights: distflow.Sampler, and JetStream's protocol beside it."""

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.parsing.addresses import listen
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.serving.access import Access
from distflow_jax.serving.messages import Limits, most_bytes
from distflow_jax.serving.prompts import PromptReader
from distflow_jax.serving.rpc import LoadParams, SamplerRpc
from distflow_jax.serving.sampler_thread import SamplerService
from distflow_jax.serving.served_weights import Weights

_LOOK_SECONDS = 0.05  # between two looks at what still runs
_LEAST_BOUND, _MOST_BOUND = 1 << 20, 4 << 20  # bytes of a message; the latter is gRPC's own
_GRPC_OPTIONS = [
    ("grpc.so_reuseport", 0),  # no second server behind one port, of which requests get either
    # a client whose machine has failed closes nothing
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, and how it behaves."""

    model: str = ""  # a name for people
    seed: int = 0  # the engine's, for people: (seed, uid, sample) decides what is drawn
    host: str = "127.0.0.1"
    port: int = 9000  # 0: any free one
    metrics_port: int = 0  # of Prometheus metrics, on the same host; 0: none
    default_response: int = 0  # tokens of a response where a request does not say; 0: the engine's
    max_samples: int = 64  # responses to one request at most
    max_waiting: int = 1024  # requests to each service; those beyond are refused
    grace_seconds: float = 10.0  # for requests that run when the server is stopped
    access: Access = Access()


class Server:
    """All services, from `start` to `stop`, in the event loop that calls them.

    `others`: protocols beside distflow.Sampler, each as jetstream.py's JetStreamProtocol. Each has
    an engine, hence slots and a cache, of its own. All share the weights, and take turns. `seeing`:
    the tokenizer with the layout of images, of a model with a tower.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: RolloutEngine,
        weights: Weights,
        tokenizer: Tokenizer,
        load: LoadParams,
        *,
        others: Sequence[Any] = (),
        seeing: SeeingTokenizer | None = None,
    ):
        self.config, self.engine, self._weights = config, engine, weights
        self.others = others
        self._tokenizer, self._load, self._seeing = tokenizer, load, seeing
        self.port = 0  # that in use, once it has started
        sizes = engine.config
        self._limits = Limits(
            max_prompt=sizes.max_prompt,
            max_response=sizes.max_response,
            default_response=config.default_response or sizes.max_response,
            max_samples=config.max_samples,
            vocab_size=engine.model.vocab_size,
        )

    async def start(self) -> None:
        """Compiles, starts the threads, listens. ValueError if an address cannot be had."""
        config, weights = self.config, self._weights
        check_addresses(config)  # grpc would write pages of its own to stderr
        config.access.warn_if_open(config.host)
        self._prompts = PromptReader(self._tokenizer, self._limits.max_prompt, self._seeing)
        self._grpc = grpc.aio.server(
            options=[*_GRPC_OPTIONS, _message_bound(self._prompts)],
            interceptors=config.access.interceptors(),
        )
        self.port = self._listen(f"{config.host}:{config.port}")
        self._metrics = None
        if config.metrics_port:
            self._metrics = prometheus_client.start_http_server(
                config.metrics_port, addr=config.host.strip("[]")
            )
        self.engine.compile(weights.params)
        for other in self.others:
            other.compile()
        self.sampler = SamplerService(self.engine, weights, self._tokenizer)
        facts = {
            "model": config.model,
            "seed": config.seed,
            "started": round(time.time(), 3),
            "slots": self.engine.max_concurrent_decodes,
            "max_text": self._prompts.max_text,
            "image_bytes": self._prompts.image_bytes,
            **dataclasses.asdict(self._limits),
        }
        rpc = SamplerRpc(
            self.sampler,
            weights,
            self._prompts,
            self._limits,
            self._load,
            config.access,
            facts=facts,
            max_calls=config.max_waiting,
        )
        self._grpc.add_generic_rpc_handlers((rpc.handler(),))
        how = {"max_waiting": config.max_waiting, "metrics": bool(config.metrics_port)}
        self._services = [
            *(x.serve(self._grpc, self._prompts, self._limits, **how) for x in self.others),
            rpc,
        ]
        self.sampler.start()
        await self._grpc.start()
        if self._metrics is not None:
            self._collector = _Metrics(self)
            prometheus_client.REGISTRY.register(self._collector)

    def _listen(self, address: str) -> int:
        """Opens the port, with TLS where there is a certificate; returns its number."""
        credentials = self.config.access.credentials()
        try:
            if credentials is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ValueError(
                f"cannot listen on {address}: --tls_key must be the key of --tls_cert, both in PEM "
                "format"
            ) from error

    @property
    def running(self) -> int:
        """Requests that have not ended, of all services."""
        return sum(service.running for service in self._services)

    @property
    def version(self) -> int:
        """Version of the weights that are served."""
        return self._weights.version

    @property
    def failed(self) -> bool:
        """Whether it can answer no more."""
        return self.sampler.failed

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Lets what runs end within the grace (until `hurry`), refuses the rest, joins all threads.

        New requests are refused from now on.
        """
        for service in self._services:
            service.stopping = True
        clock = asyncio.get_running_loop().time
        end = clock() + self.config.grace_seconds
        while self.running and clock() < end and not (hurry and hurry.is_set()):
            await asyncio.sleep(_LOOK_SECONDS)
        for service in self._services:
            service.refuse()
        await self._grpc.stop(grace=1.0)
        self._prompts.close()
        # threads of all services hand their last tokens to this loop: it goes on until they have
        # ended
        for service in self._services:
            await asyncio.to_thread(service.stop)
        self._stop_metrics()

    def _stop_metrics(self) -> None:
        if self._metrics is not None:
            prometheus_client.REGISTRY.unregister(self._collector)
            server, thread = self._metrics
            server.shutdown()
            server.server_close()
            thread.join()


def _message_bound(prompts: PromptReader) -> tuple[str, int]:
    """The option by which gRPC refuses larger messages, before they take memory.

    Below the least bound a request that is too long is read, and refused with a sentence.
    """
    most = min(max(most_bytes(prompts.max_text), _LEAST_BOUND), _MOST_BOUND) + prompts.image_bytes
    return ("grpc.max_receive_message_length", most)


class _Metrics(Collector):
    """Numbers of our service, beside those that JetStream's Driver sets."""

    def __init__(self, server: Server):
        self._server = server

    def collect(self) -> Iterator[Any]:
        sampler = self._server.sampler
        for name, text, value in (
            ("running", "Requests that have not ended", self._server.running),
            ("free_slots", "Slots of Sample that are free", sampler.scheduler.free_slots),
            ("weights_version", "Version of the weights", self._server.version),
        ):
            yield GaugeMetricFamily(f"distflow_{name}", text, value=value)
        for name, text, value in (
            ("responses", "Responses of Sample that have ended", sampler.responses),
            ("tokens", "Tokens that Sample has given", sampler.tokens),
        ):
            yield CounterMetricFamily(f"distflow_{name}", text, value=value)


def check_addresses(config: ServerConfig) -> None:
    """Raises ValueError if `config` names an address that cannot be had now."""
    with contextlib.ExitStack() as both:
        both.enter_context(listen("--port", config.host, config.port))
        if config.metrics_port:
            both.enter_context(listen("--metrics_port", config.host, config.metrics_port))


async def serve_until_signal(server: Server, ready) -> int:
    """Runs a server until SIGINT or SIGTERM, a second of which ends the grace; an exit code.

    `ready` is called once requests are answered.
    """
    loop = asyncio.get_running_loop()
    asked, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if asked.is_set() else asked).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await server.start()
    ready(server)
    while not asked.is_set() and not server.failed:
        try:
            await asyncio.wait_for(asked.wait(), 0.5)
        except TimeoutError:
            pass
    await server.stop(hurry)
    return 1 if server.failed else 0
