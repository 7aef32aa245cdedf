"""The RPCs of distflow.Sampler: Sample, LoadWeights, Status. Messages are those of messages.py.

Handlers are generic ones on bytes, so that no generated code is needed on either side.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import jax

from distflow_jax.serving.access import Access
from distflow_jax.serving.messages import (
    MAX_UID,
    SERVICE,
    STOPPING,
    Limits,
    LoadRequest,
    encode,
    load_request,
    sample_request,
    sentence,
)
from distflow_jax.serving.prompts import PromptReader
from distflow_jax.serving.sampler_thread import Call, Failed, SamplerService, SamplerStopped
from distflow_jax.serving.served_weights import Weights

log = logging.getLogger("distflow_jax")

# (params on the engine's mesh, training step) of a run's folder; FileNotFoundError, ValueError
LoadParams = Callable[[str], tuple[Any, int]]

# of the packages that read checkpoints, for files that are no checkpoint of theirs
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)
_FIRST_OWN_UID = 1 << 30  # of requests that name none


class SamplerRpc:
    """The RPCs of distflow.Sampler, in the server's event loop."""

    def __init__(
        self,
        service: SamplerService,
        weights: Weights,
        prompts: PromptReader,
        limits: Limits,
        load: LoadParams,
        access: Access,
        *,
        facts: Mapping[str, Any],
        max_calls: int,
    ):
        self._max_calls, self._loads, self._reading = max_calls, 0, 0
        self._access = access
        self._service, self._weights, self._limits = service, weights, limits
        self._prompts, self._load, self._facts = prompts, load, facts
        self._uids = itertools.count(_FIRST_OWN_UID)
        self._loading = asyncio.Lock()
        self._calls: set[Call] = set()
        self.stopping = False

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._calls) + self._loads + self._reading

    def refuse(self) -> None:
        """Ends the calls that run, with UNAVAILABLE."""
        for call in self._calls:
            call.deliver(_Stopping())

    def stop(self) -> None:
        """Ends the sampler's thread."""
        self._service.stop()

    def handler(self) -> grpc.GenericRpcHandler:
        """To be added to a grpc.aio server."""
        methods = {
            "Sample": grpc.unary_stream_rpc_method_handler(self.sample),
            "LoadWeights": grpc.unary_unary_rpc_method_handler(self.load_weights),
            "Status": grpc.unary_unary_rpc_method_handler(self.status),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def sample(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Responses to one prompt, event by event."""
        await self._refuse_if_stopping(context)
        if len(self._calls) + self._reading >= self._max_calls:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._max_calls} requests run or wait already; ask again later",
            )
        self._reading += 1
        try:
            request = await self._prompts.apart(
                sample_request, data, self._limits, self._prompts, self._new_uid
            )
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence(error))
        finally:
            self._reading -= 1
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        call = Call(request, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        with self._opened(call):
            try:
                self._service.sample(call)
                prompt = request.group.prompt
                yield encode({"uid": prompt.counter, "prompt_tokens": prompt.tokens.tolist()})
                while (event := await events.get()) is not None:
                    if isinstance(event, Exception):
                        raise event
                    yield encode(event)
            except _Stopping:
                await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
            except SamplerStopped as error:
                await context.abort(_code(error), str(error))

    async def load_weights(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Reads weights while others sample, then swaps them for both services.

        Loads are one at a time, in the order of their calls. That of a client that has gone before
        the swap changes nothing: the client may write other files in the place of those it named.
        """
        await self._refuse_if_stopping(context)
        try:
            request = load_request(data)
            path = self._access.checked_path(request.path)
            request = dataclasses.replace(request, path=path)
        except PermissionError as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, sentence(error))
        except (ValueError, OSError, RuntimeError) as error:  # of Path.resolve: a loop of links
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence(error))
        self._loads += 1
        try:
            step, version = await self._load_in_turn(request)
        except FileNotFoundError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, sentence(error))
        except (ValueError, OSError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence(error))
        except SamplerStopped as error:
            await context.abort(_code(error), sentence(error))
        except jax.errors.JaxRuntimeError as error:
            log.exception("weights cannot be placed on the devices")
            await context.abort(grpc.StatusCode.INTERNAL, sentence(error))
        except _DAMAGE as error:
            log.exception("%s cannot be read", request.path)
            reason = f"the checkpoint is damaged: {type(error).__name__}: {sentence(error)}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        finally:
            self._loads -= 1
        return encode({"version": version, "step": step})

    async def status(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """The server's model and load."""
        healthy = not self._service.failed and not self.stopping
        return encode(
            {
                **self._facts,
                "healthy": healthy,
                "version": self._weights.version,
                "running": self.running,
                "free_slots": self._service.scheduler.free_slots,
            }
        )

    async def _load_in_turn(self, request: LoadRequest) -> tuple[int, int]:
        """(step, version), once no earlier load is being read, whether its client is there or not.

        A thread cannot be cancelled: the lock is held until it has ended.
        """
        await self._loading.acquire()
        gone = threading.Event()
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(None, self._read_and_swap, request, gone)
        reading.add_done_callback(lambda _: self._loading.release())
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            gone.set()
            raise

    def _read_and_swap(self, request: LoadRequest, gone: threading.Event) -> tuple[int, int]:
        params, step = self._load(request.path)
        if gone.is_set():
            raise SamplerStopped(f"the client of LoadWeights of {request.path} has gone")
        version = step if request.version is None else request.version
        self._service.load(params, version, cache=request.cache)
        return step, version

    async def _refuse_if_stopping(self, context: grpc.aio.ServicerContext) -> None:
        if self.stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)

    def _new_uid(self) -> int:
        return next(self._uids) & MAX_UID

    @contextlib.contextmanager
    def _opened(self, call: Call):
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)
            self._service.cancel(call)


def _code(error: SamplerStopped) -> grpc.StatusCode:
    failed = isinstance(error, Failed)
    return grpc.StatusCode.INTERNAL if failed else grpc.StatusCode.UNAVAILABLE


class _Stopping(Exception):
    """Put among a call's events to end it."""
