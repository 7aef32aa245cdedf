"""Requests to JetStream's servicer and its answers, and its own server of an engine."""

import asyncio
import contextlib

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from distflow_jax.serving.jetstream import orchestrator
from support.serving import CONFIG

PROMPT = "12 + 35 ="
Text = jetstream_pb2.DecodeRequest.TextContent
Tokens = jetstream_pb2.DecodeRequest.TokenContent


def ask(prompt, max_tokens=CONFIG.max_response, **fields):
    content = (
        {"text_content": Text(text=prompt)}
        if isinstance(prompt, str)
        else {"token_content": Tokens(token_ids=prompt)}
    )
    return jetstream_pb2.DecodeRequest(max_tokens=max_tokens, **content, **fields)


async def decoded(stub, request):
    """(text, ids) of a whole response, its only sample."""
    text, ids = "", []
    async for response in stub.Decode(request):
        (sample,) = response.stream_content.samples
        text, ids = text + sample.text, ids + list(sample.token_ids)
    return text, ids


def without_end(response):
    """Its tokens, as JetStream gives them: the end token is for itself alone."""
    return response.tokens[: len(response.tokens) - response.finished].tolist()


# -- nothing of ours but the engine ----------------------------------------------------------------


def stock_driver(subject, params, interleaved):
    return orchestrator.Driver(
        prefill_engines=[subject],
        generate_engines=[subject],
        prefill_params=[params],
        generate_params=[params],
        interleaved_mode=interleaved,
        jax_padding=True,
    )


@contextlib.asynccontextmanager
async def stock_server(subject, params, interleaved):
    """A stub to JetStream's servicer over its Driver, in this event loop."""
    driver = stock_driver(subject, params, interleaved)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    servicer = orchestrator.LLMOrchestrator(driver=driver)
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield jetstream_pb2_grpc.OrchestratorStub(channel)
    finally:
        await asyncio.to_thread(driver.stop)
        await server.stop(None)
        assert not any(thread.is_alive() for thread in driver._all_threads)


def answer(stub, request):
    text, ids = "", []
    for response in stub.Decode(request):
        (sample,) = response.stream_content.samples
        text, ids = text + sample.text, ids + list(sample.token_ids)
    return text, ids
