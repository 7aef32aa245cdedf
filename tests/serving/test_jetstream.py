"""JetStream's own Driver and servicer over our engine, as its tests drive its mock engine.

Twice: with nothing of ours but the engine, and as scripts/serve.py runs them.

Nightly: JetStream's and our server serve at once over 8 devices while weights are swapped.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import os
import time

import grpc
import jax
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from support.jetstream_requests import (
    PROMPT,
    answer,
    ask,
    decoded,
    stock_driver,
    stock_server,
    without_end,
)
from support.serving import (
    CONFIG,
    STOP_IDS,
    TOKENIZER,
    Serving,
    engine,
    expected,
    expected_all,
    make,
    service,
    weights_of,
)
from support.tiny_model import TINY, random_params
from support.waiting import HANG, until

from distflow_jax.commands.serve_command import resumable
from distflow_jax.rollout.engine_interface import Engine, EngineTokenizer, ResultTokens
from distflow_jax.serving.client import SamplerClient
from distflow_jax.serving.jetstream import (
    GREEDY,
    ServedDriver,
    ServiceEngine,
    orchestrator,
    service_config,
)
from distflow_jax.serving.served_weights import Weights

# -- every member of Engine ------------------------------------------------------------------------


def engines():
    weights = Weights(weights_of(2), 0)
    return [(service(), weights.params), (ServiceEngine(service(), weights, TOKENIZER), weights)]


@pytest.mark.parametrize("which", [0, 1], ids=["engine", "as served"])
def test_every_abstract_member(which):
    subject, params = engines()[which]
    assert isinstance(subject, Engine)
    members = {n for n, m in inspect.getmembers(Engine) if not n.startswith("_")}
    assert Engine.__abstractmethods__ <= members
    state = subject.init_decode_state()
    tokenizer = subject.build_tokenizer(subject.get_tokenizer())
    assert isinstance(tokenizer, EngineTokenizer)
    ids, length = tokenizer.encode(
        PROMPT, is_bos=True, max_prefill_length=subject.max_prefill_length, jax_padding=True
    )
    prefix = subject.prefill(params=params, padded_tokens=ids, true_length=length)
    moved = jax.device_put(prefix, subject.get_prefix_destination_sharding())
    state = subject.insert(moved, state, slot=3)
    orchestrator.delete_pytree(moved)
    state, result = subject.generate(params, state)
    result.copy_to_host_async()
    result = result.convert_to_numpy()
    assert isinstance(result, ResultTokens)
    slot = result.get_result_at_slot(3)
    assert slot.tokens.shape == slot.valid.shape == (subject.samples_per_slot, 4)
    assert slot.valid.all() and slot.lengths.tolist() == [4]
    assert not result.get_result_at_slot(2).valid.any()
    wanted = expected(PROMPT, samples=4)[3] if which == 0 else expected(PROMPT, temperature=0.0)[0]
    assert slot.tokens[0].tolist() == wanted.tokens[:4].tolist()
    assert subject.max_concurrent_decodes == CONFIG.slots
    assert subject.max_prefill_length >= CONFIG.max_prompt
    assert subject.mesh.axis_names == ("data", "tensor") and subject.colocated_cpus is None
    if which:
        assert subject.load_params() is params


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "disaggregated"])
def test_stock_driver_and_servicer(interleaved):
    """Without a request of ours, a slot's response is that of uid (0, slot)."""
    text = "a" * 33  # padded to 48 by the engine

    async def run():
        async with stock_server(service(), weights_of(2), interleaved) as stub:
            health = await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())
            assert health.is_live
            return await asyncio.gather(*(decoded(stub, ask(text)) for _ in range(5)))

    slots = [without_end(r) for r in expected(text, samples=CONFIG.slots)]
    answers = asyncio.run(run())
    for shown, ids in answers:
        assert ids in slots
        # one token at a time, as JetStream detokenizes: half a character is none
        assert shown == "".join(TOKENIZER.decode([i]) for i in ids)
    assert len({tuple(ids) for _, ids in answers}) > 1


def test_stock_driver_with_the_door_as_its_engine():
    """Greedy; ids as they are, though JetStream pads and marks them by itself."""

    async def run():
        weights = Weights(weights_of(2), 0)
        subject = ServiceEngine(service(), weights, TOKENIZER)
        async with stock_server(subject, weights, True) as stub:
            return await asyncio.gather(*(decoded(stub, ask("x" * n)) for n in (1, 20, 48)))

    for length, (_, ids) in zip((1, 20, 48), asyncio.run(run()), strict=True):
        assert ids == without_end(expected("x" * length, temperature=0.0)[0])


def test_stock_orchestrator_without_grpc():
    """As JetStream's test_orchestrator: the servicer called as a function."""

    async def run():
        weights = Weights(weights_of(2), 0)
        driver = stock_driver(ServiceEngine(service(), weights, TOKENIZER), weights, True)
        client = orchestrator.LLMOrchestrator(driver=driver)
        ids = []
        async for response in client.Decode(ask(PROMPT)):
            ids += response.stream_content.samples[0].token_ids
        await asyncio.to_thread(driver.stop)
        return ids

    assert asyncio.run(run()) == without_end(expected(PROMPT, temperature=0.0)[0])


# -- as served -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving():
    with Serving(max_waiting=40) as running:
        yield running


@pytest.fixture(scope="module")
def stub(serving):
    with grpc.insecure_channel(serving.address) as channel:
        yield jetstream_pb2_grpc.OrchestratorStub(channel)


def free_slots(serving):
    # one may be in the hand of the thread that waits for a request to put into it
    return serving.jetstream._driver._generate_slots[0].qsize()


def test_health(stub):
    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 8, 200])
def test_greedy_and_exactly_max_tokens(stub, limit):
    """Also where the limit falls within a call of the engine, or at its end."""
    (wanted,) = expected(PROMPT, limit=limit, temperature=0.0)
    text, ids = answer(stub, ask(PROMPT, limit))
    assert ids == without_end(wanted)
    assert text == TOKENIZER.decode(ids)


def test_ids_in_ids_out(stub):
    ids = TOKENIZER.encode(PROMPT).tolist()
    assert answer(stub, ask(ids)) == ("", without_end(expected(PROMPT, temperature=0.0)[0]))


def test_more_requests_than_slots(serving):
    prompts = ["z" * (1 + 5 * i % 47) for i in range(30)]
    limits = [5 + 3 * i for i in range(30)]

    async def run():
        async with grpc.aio.insecure_channel(serving.address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            asked = (decoded(stub, ask(p, n)) for p, n in zip(prompts, limits, strict=True))
            return await asyncio.gather(*asked)

    every = expected_all(list(zip(prompts, limits, strict=True)))
    for wanted, (text, ids) in zip(every, asyncio.run(run()), strict=True):
        assert ids == without_end(wanted) and text == TOKENIZER.decode(ids)


BAD = [
    (jetstream_pb2.DecodeRequest(max_tokens=5), "the prompt is empty"),
    (ask("", 5), "the prompt is empty"),
    (ask([], 5), "the prompt is empty"),
    (ask("x" * 49, 5), "has 49 tokens; this server reads at most 48"),
    (ask([1] * 49, 5), "has 49 tokens"),
    (ask([320], 5), "token id 320 is not in the vocabulary of 320"),
    (ask([-1], 5), "token id -1"),
    (ask("x", 0), "max_tokens must be from 1 to 200, got 0"),
    (ask("x", -4), "max_tokens must be from 1 to 200, got -4"),
    (ask("x", 201), "max_tokens must be from 1 to 200, got 201"),
    (ask([5, 6], 5, session_cache="past"), "session_cache is not supported"),
]


def test_what_would_kill_the_driver_is_refused(stub):
    running = stub.Decode(ask(PROMPT))
    for request, sentence in BAD:
        with pytest.raises(grpc.RpcError) as caught:
            answer(stub, request)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in caught.value.details()
    ids = [i for r in running for i in r.stream_content.samples[0].token_ids]
    assert ids == without_end(expected(PROMPT, temperature=0.0)[0])


@functools.cache
def long_greedy_prompt():
    """One whose greedy response is long."""
    prompts = ["x" * n for n in range(1, 9)]
    answers = expected_all([(p, CONFIG.max_response) for p in prompts])
    longest = max(range(8), key=lambda i: len(answers[i].tokens))
    assert len(answers[longest].tokens) > 60
    return prompts[longest]


def test_a_client_that_goes_frees_its_slot(serving, stub):
    prompt = long_greedy_prompt()
    calls = [stub.Decode(ask(prompt)) for _ in range(20)]
    next(calls[0])
    for call in calls:
        call.cancel()
    until(lambda: serving.server.running == 0)
    until(lambda: free_slots(serving) >= CONFIG.slots - 1)
    assert answer(stub, ask(prompt))[1] == without_end(expected(prompt, temperature=0.0)[0])


def test_a_full_queue_sheds_load(serving):
    async def run():
        async with grpc.aio.insecure_channel(serving.address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            asked = [asyncio.create_task(decoded(stub, ask("x" * 20))) for _ in range(120)]
            with serving.weights.turns:  # none is answered before one is refused
                await asyncio.wait(asked, timeout=HANG, return_when=asyncio.FIRST_COMPLETED)
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(run())
    refused = [a for a in answers if isinstance(a, grpc.aio.AioRpcError)]
    assert all(e.code() == grpc.StatusCode.RESOURCE_EXHAUSTED for e in refused)
    assert 0 < len(refused) < 120
    wanted = without_end(expected("x" * 20, temperature=0.0)[0])
    assert all(ids == wanted for _, ids in (a for a in answers if isinstance(a, tuple)))


def test_both_doors_at_once_and_weights_for_both(serving, stub):
    with SamplerClient(serving.address) as client:
        running = client.sample(prompt=PROMPT, uid=6, num_samples=8)
        next(running)
        wanted = [without_end(expected(PROMPT, temperature=0.0, seed=n)[0]) for n in (2, 5)]
        assert answer(stub, ask(PROMPT))[1] == wanted[0]
        client.load_weights("5", 1)
        assert answer(stub, ask(PROMPT))[1] == wanted[1] != wanted[0]
        client.load_weights("2", 2)
        assert answer(stub, ask(PROMPT))[1] == wanted[0]
        running.close()


def test_temperature_of_the_service():
    """Request n is sampled with uid (n, 0)."""
    with Serving(sampling=dataclasses.replace(GREEDY, temperature=1.0, top_p=0.9)) as other:
        with grpc.insecure_channel(other.address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            for uid in range(3):
                (wanted,) = expected(PROMPT, uid=uid, temperature=1.0, top_p=0.9)
                assert answer(stub, ask(PROMPT))[1] == without_end(wanted)


def num_streamed(call):
    return sum(len(r.stream_content.samples[0].token_ids) for r in call)


@pytest.mark.parametrize("grace, ends", [(HANG, True), (0.0, False)])
def test_stopping_lets_requests_end_or_refuses_them(grace, ends):
    prompt = long_greedy_prompt()
    wanted = len(without_end(expected(prompt, temperature=0.0)[0]))
    with Serving(grace_seconds=grace) as other:
        servicer, arrived = other.jetstream, []
        read = servicer._question
        servicer._question = lambda request: arrived.append(request) or read(request)
        with grpc.insecure_channel(other.address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            with other.weights.turns:  # none ends meanwhile
                calls = [stub.Decode(ask(prompt)) for _ in range(12)]
                until(lambda: len(arrived) == 12)  # one that comes later is refused
                stopped = other.begin_stop()
                until(lambda: servicer.stopping)
                with pytest.raises(grpc.RpcError) as caught:
                    answer(stub, ask("x", 5))
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
                for call in () if ends else calls:
                    with pytest.raises(grpc.RpcError) as caught:
                        num_streamed(call)
                    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            if ends:
                assert list(map(num_streamed, calls)) == [wanted] * 12
            stopped.result(HANG)
            assert not any(t.is_alive() for t in other.jetstream._driver._all_threads)


def test_the_last_response_may_end_between_two_looks_at_the_slots():
    """There JetStream's Driver asserts, and kills the process: ours goes on.

    Its look at the free slots is made slow, so that a response ends meanwhile.
    """
    starts = []

    class Counting(ServiceEngine):
        def init_decode_state(self, *args, **kwargs):
            starts.append(None)
            return super().init_decode_state()

    async def run():
        weights = Weights(weights_of(2), 0)
        driver = ServedDriver(Counting(service(), weights, TOKENIZER), max_waiting=8)
        slots = driver._generate_slots[0]
        look = slots.qsize

        def slow_look():
            count = look()
            time.sleep(0.03)
            return count

        slots.qsize = slow_look
        client = orchestrator.LLMOrchestrator(driver=driver)
        answers = []
        async with asyncio.timeout(HANG):
            while len(starts) < 2:  # until the loop had to start again
                ids = []
                async for response in client.Decode(ask(PROMPT)):
                    ids += response.stream_content.samples[0].token_ids
                answers.append(ids)
                await asyncio.sleep(0.1)
        await asyncio.to_thread(driver.stop)
        return answers

    answers = asyncio.run(run())
    wanted = without_end(expected(PROMPT, temperature=0.0)[0])
    assert all(ids == wanted for ids in answers)


@pytest.mark.parametrize("change", [service_config, resumable])
def test_all_slots_of_a_server_decode(change):
    """Also of a run with an environment: nothing waits for one here."""
    sizes = change(dataclasses.replace(CONFIG, slots=32, lanes=8))
    assert (sizes.slots, sizes.lanes, sizes.decode_slots) == (8, 0, 8)


@pytest.mark.slow
def test_both_doors_and_swaps_over_eight_devices():
    """Programs with collectives from several threads: without turns they would wait for ever."""
    sizes = dataclasses.replace(CONFIG, max_response=40, max_read=88)
    engines = make(sizes, (4, 2)), make(service_config(sizes), (4, 2))
    copy = jax.jit(lambda params: jax.tree.map(jax.numpy.copy, params))

    def load(path):
        params = engines[0].load_params(random_params(TINY, int(os.path.basename(path))))
        turn = served[0].weights.turns if served else contextlib.nullcontext()
        with turn:
            return jax.block_until_ready(copy(params)), 10

    served = []
    prompts = ["z" * (1 + 5 * i % 47) for i in range(16)]
    wanted = [without_end(r) for r in expected_all([(p, 40) for p in prompts])]
    with Serving(engines, load) as running, SamplerClient(running.address) as client:
        served.append(running)
        with grpc.insecure_channel(running.address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            with concurrent.futures.ThreadPoolExecutor(40) as pool:
                theirs = [pool.submit(answer, stub, ask(p, 40)) for p in prompts]
                how = {"temperature": 0, "max_tokens": 40}
                ours = [pool.submit(client.responses, prompt=p, **how) for p in prompts]
                for _ in range(3):  # the same weights again
                    client.load_weights("2")
                theirs = [f.result(timeout=HANG)[1] for f in theirs]
                ours = [f.result(timeout=HANG)[0]["tokens"] for f in ours]
    same = [mine == want for mine, want in zip(theirs, wanted, strict=True)]
    same += [mine[: len(want)] == want for mine, want in zip(ours, wanted, strict=True)]
    assert sum(same) >= 30  # sums over two devices may decide a near-tie otherwise


def test_stop_ids_are_the_engines():
    tokenizer = engine().build_tokenizer(engine().get_tokenizer())
    assert tokenizer.stop_tokens == set(STOP_IDS)
    np.testing.assert_array_equal(tokenizer.encode(PROMPT)[0], TOKENIZER.encode(PROMPT))
