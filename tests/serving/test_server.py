"""distflow.Sampler over real gRPC: answers, refusals, stop strings, swaps, ends."""

import asyncio
import concurrent.futures
import itertools
import queue
import socket
import threading
import types
import urllib.request

import grpc
import numpy as np
import pytest
from support.refusals import BAD, BAD_BYTES, encode_any, refused
from support.serving import TOKENIZER, Serving, engine, expected, weights_of
from support.waiting import HANG, until

from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.scheduling.sequences import RequestGroup, WaitingQueue
from distflow_jax.serving.client import SamplerClient
from distflow_jax.serving.messages import SERVICE, Limits, decode, encode, sample_request
from distflow_jax.serving.prompts import PromptReader
from distflow_jax.serving.rpc import SamplerRpc
from distflow_jax.serving.sampler_thread import Failed, SamplerService, SamplerStopped
from distflow_jax.serving.served_weights import Weights
from distflow_jax.serving.server import ServerConfig, check_addresses

PROMPT = "12 + 35 ="


@pytest.fixture(scope="module")
def serving():
    with Serving(max_samples=16) as running:
        yield running


@pytest.fixture(scope="module")
def client(serving):
    with SamplerClient(serving.address) as client:
        yield client


def assert_is(answer, response):
    """The answer that came over the wire is the response."""
    assert answer["tokens"] == response.tokens.tolist()
    np.testing.assert_allclose(answer["logp"], response.logp, atol=1e-5)
    assert answer["end"] == ("stop" if response.finished else "length")
    assert answer["text"] == TOKENIZER.decode(response.tokens)


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}]
)
def test_responses_are_those_of_run_requests(client, how):
    answers = client.responses(prompt=PROMPT, num_samples=6, uid=11, **how)
    wanted = expected(PROMPT, uid=11, samples=6, **how)
    assert [a["sample"] for a in answers] == list(range(6))
    for answer, response in zip(answers, wanted, strict=True):
        assert_is(answer, response)
        assert answer["version"] == [2] * len(response.tokens)


def test_events_of_a_stream_are_the_response(client):
    first, *events = client.sample(prompt=PROMPT, num_samples=3, uid=4, max_tokens=50)
    assert first == {"uid": 4, "prompt_tokens": TOKENIZER.encode(PROMPT).tolist()}
    wanted = expected(PROMPT, uid=4, samples=3, limit=50)
    assert max(len(r.tokens) for r in wanted) > 4
    for sample, response in enumerate(wanted):
        mine = [e for e in events if e["sample"] == sample]
        assert len(mine) == -(-len(response.tokens) // 4)  # one event a call of the engine
        assert ["end" in e for e in mine] == [False] * (len(mine) - 1) + [True]
        whole = {"end": mine[-1]["end"], "text": "".join(e["text"] for e in mine)}
        for name in ("tokens", "logp"):
            whole[name] = [x for e in mine for x in e[name]]
        assert_is(whole, response)


def test_prompt_forms(client):
    """A text, its ids, and a conversation whose template gives that text."""
    turns = [{"role": "user", "content": "hi"}]
    text, ids = TOKENIZER.encode_prompt(turns)
    forms = ({"prompt": text}, {"tokens": ids.tolist()}, {"messages": turns})
    answers = [client.responses(uid=1, max_tokens=20, **form) for form in forms]
    assert answers[0] == answers[1] == answers[2]


def test_requests_take_slots_in_the_order_of_arrival():
    """However short: else those that come later and may be longer keep them out for ever."""
    limits, uids, queue = Limits(48, 200, 200, 16, 320), itertools.count(), WaitingQueue()
    for limit in (16, 200, 1, 200, 16):
        data = encode({"prompt": "hi", "max_tokens": limit})
        asked = sample_request(data, limits, PromptReader(TOKENIZER, 48), lambda: next(uids))
        queue.push(RequestGroup(asked.group.prompt.counter, asked.group, [0]))
    assert [queue.pop_group().id for _ in range(5)] == list(range(5))


def test_an_answer_may_be_large():
    """One event may have all tokens of a response: more than gRPC takes by itself, 4 MiB."""
    text = "x" * (5 << 20)
    answers = {
        "Sample": grpc.unary_stream_rpc_method_handler(
            lambda data, context: iter([encode({"uid": 1}), encode({"sample": 0, "text": text})])
        )
    }
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, answers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with SamplerClient(f"127.0.0.1:{port}") as client:
            assert client.responses(prompt="x", timeout=HANG) == [{"sample": 0, "text": text}]
    finally:
        server.stop(grace=None).wait()


def test_without_a_uid_each_request_has_its_own(client):
    uids, texts = [], []
    for _ in range(3):
        first, *events = client.sample(prompt=PROMPT, max_tokens=30, stream=False)
        uids.append(first["uid"])
        texts.append(events[0]["tokens"])
        again = client.responses(prompt=PROMPT, max_tokens=30, uid=first["uid"])
        assert again[0]["tokens"] == events[0]["tokens"]
    assert len(set(uids)) == 3 and len(set(map(tuple, texts))) == 3


def test_many_at_once_get_what_each_would_alone(client):
    """More responses than slots, from threads that share a connection."""
    asked = [
        {"prompt": "x" * (1 + 5 * i % 47), "uid": i, "num_samples": 1 + i % 3, "max_tokens": 5 + i}
        for i in range(24)
    ]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda request: client.responses(**request), asked))
    for request, got in zip(asked, answers, strict=True):
        wanted = expected(
            request["prompt"],
            uid=request["uid"],
            samples=request["num_samples"],
            limit=request["max_tokens"],
        )
        for answer, response in zip(got, wanted, strict=True):
            ties = np.flatnonzero(response.margin < 1e-4)  # may fall otherwise in another batch
            end = ties[0] if len(ties) else None
            assert answer["tokens"][:end] == response.tokens[:end].tolist()


# -- stop strings ----------------------------------------------------------------------------------


def test_stop_strings_cut_text_and_tokens_of_one_sample(client):
    """The text ends before the stop string, the tokens with the one that completes it."""
    whole = expected(PROMPT, uid=2, samples=4)
    long = max(whole, key=lambda r: len(r.tokens))
    text = TOKENIZER.decode(long.tokens)
    windows = (text[i : i + 2] for i in range(20, len(text) - 1))
    stop = next(w for w in windows if w.isascii() and w.isprintable())  # ends with its last token
    answers = client.responses(prompt=PROMPT, uid=2, num_samples=4, stop=[stop, "never"])
    assert answers[long.sample]["end"] == "stop_string"
    for answer, response in zip(answers, whole, strict=True):
        full = TOKENIZER.decode(response.tokens)
        if stop not in full:
            assert_is(answer, response)
            continue
        count = len(answer["tokens"])
        assert answer["end"] == "stop_string" and answer["text"] == full[: full.index(stop)]
        assert answer["tokens"] == response.tokens[:count].tolist()
        assert stop in TOKENIZER.decode(answer["tokens"])
        assert stop not in TOKENIZER.decode(answer["tokens"][:-1])
        assert len(answer["logp"]) == len(answer["version"]) == count


def test_streamed_text_never_shows_the_start_of_a_stop_string(client):
    text = client.responses(prompt=PROMPT, uid=2, temperature=0.0)[0]["text"]
    stop = text[9:14]
    pieces = [
        e["text"]
        for e in client.sample(prompt=PROMPT, uid=2, temperature=0.0, stop=stop)
        if "text" in e
    ]
    assert "".join(pieces) == text[: text.index(stop)]


def test_bad_requests_are_refused_in_a_sentence_and_harm_nobody(serving, client):
    wanted = expected(PROMPT, uid=5, samples=8)
    running = client.sample(prompt=PROMPT, uid=5, num_samples=8)
    events = [next(running)]
    with grpc.insecure_channel(serving.address) as channel:
        sample = channel.unary_stream(f"/{SERVICE}/Sample")
        for data, sentence in [(encode_any(m), s) for m, s in BAD] + BAD_BYTES:
            details = refused(lambda d=data: list(sample(d)), grpc.StatusCode.INVALID_ARGUMENT)
            assert sentence in details and "\n" not in details, details
            if (event := next(running, None)) is not None:
                events.append(event)
    events += running
    for response in wanted:
        tokens = [t for e in events[1:] if e["sample"] == response.sample for t in e["tokens"]]
        assert tokens == response.tokens.tolist()


def test_messages_beyond_the_longest_prompt_take_no_memory(serving):
    """gRPC itself refuses them, by their announced size."""
    with grpc.insecure_channel(serving.address) as channel:
        sample = channel.unary_stream(f"/{SERVICE}/Sample")
        for size in (1 << 20, 3_900_000):
            data = encode_any({"prompt": "x" * size})
            details = refused(lambda d=data: list(sample(d)), grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert "larger than max" in details and str(1 << 20) in details


# -- weights ---------------------------------------------------------------------------------------


def test_weights_are_swapped_under_running_requests(serving, client):
    running = client.sample(prompt=PROMPT, uid=6, num_samples=8)
    events = [next(running), next(running)]
    assert client.load_weights("5", 77) == {"version": 77, "step": 50}
    assert client.status()["version"] == 77
    (answer,) = client.responses(prompt=PROMPT, uid=6)
    assert_is(answer, expected(PROMPT, uid=6, seed=5)[0])
    assert answer["version"] == [77] * len(answer["tokens"])
    events += running
    before = expected(PROMPT, uid=6, samples=8)
    for response in before:
        mine = [e for e in events[1:] if e["sample"] == response.sample]
        tokens = [t for e in mine for t in e["tokens"]]
        version = np.array([v for e in mine for v in e["version"]])
        old = int((version == 2).sum())
        np.testing.assert_array_equal(version, np.where(np.arange(len(tokens)) < old, 2, 77))
        assert tokens[:old] == response.tokens[:old].tolist()
    assert client.load_weights("2") == {"version": 20, "step": 20}
    (answer,) = client.responses(prompt=PROMPT, uid=6)
    assert_is(answer, before[0])
    assert set(answer["version"]) == {20}
    client.load_weights("2", 2)


def test_keys_and_values_can_be_computed_again(serving, client):
    """With the same weights that changes nothing but the versions."""
    with serving.held(2) as go_on, concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = client.sample(prompt=PROMPT, uid=6, num_samples=10)
        events = [next(running), next(running)]
        load = pool.submit(client.load_weights, "2", 3, cache="recompute")
        until(lambda: load.done() or serving.server.sampler._work.qsize())  # after one round or two
        go_on()
        load.result(HANG)
    events += running
    versions = set()
    for response in expected(PROMPT, uid=6, samples=10):
        mine = [e for e in events[1:] if e["sample"] == response.sample]
        ties = np.flatnonzero(response.margin < 1e-4)
        end = ties[0] if len(ties) else None
        assert [t for e in mine for t in e["tokens"]][:end] == response.tokens[:end].tolist()
        versions |= {v for e in mine for v in e["version"]}
    assert versions == {2, 3}
    client.load_weights("2", 2)


def test_weights_that_cannot_be_read_change_nothing(serving, client):
    with grpc.insecure_channel(serving.address) as channel:
        load = channel.unary_unary(f"/{SERVICE}/LoadWeights")
        for message, code, sentence in [
            ({"path": "nowhere"}, grpc.StatusCode.NOT_FOUND, "nowhere holds no checkpoints/"),
            ({}, grpc.StatusCode.INVALID_ARGUMENT, "path must name"),
            ({"path": 5}, grpc.StatusCode.INVALID_ARGUMENT, "path must name"),
            ({"path": "5", "version": -1}, grpc.StatusCode.INVALID_ARGUMENT, "version must be"),
            ({"path": "5", "cache": 1}, grpc.StatusCode.INVALID_ARGUMENT, "cache must be"),
            ({"path": "5", "now": 1}, grpc.StatusCode.INVALID_ARGUMENT, "unknown field 'now'"),
        ]:
            assert sentence in refused(lambda m=message: load(encode(m)), code)
    assert client.status()["version"] == 2


class Loads:
    """Dependencies of SamplerRpc for LoadWeights: a service, and weights on a disk that waits for
    `go`."""

    def __init__(self):
        self.go, self.begun, self.read, self.swapped = threading.Event(), threading.Event(), [], []
        access = types.SimpleNamespace(checked_path=lambda path: path)
        nothing = (None, None, None)
        self.rpc = SamplerRpc(self, *nothing, self._read, access, facts={}, max_calls=4)

    def call(self, path):
        request = encode({"path": str(path)})
        return asyncio.create_task(self.rpc.load_weights(request, None))

    def load(self, params, version, *, cache):
        self.swapped.append(version)

    def _read(self, path):
        self.read.append(path)
        self.begun.set()
        assert self.go.wait(HANG)
        return object(), int(path)


def test_a_load_whose_client_has_gone_changes_nothing():
    """Its reading goes on, and what its client wants next waits for that."""
    loads = Loads()

    async def calls():
        gone, waits_in_vain = loads.call(10), loads.call(11)
        await asyncio.to_thread(loads.begun.wait)
        for call in (gone, waits_in_vain):
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
        assert loads.rpc.running == 0
        last = loads.call(12)
        await asyncio.sleep(0.1)
        assert loads.read == ["10"] and loads.rpc.running == 1
        loads.go.set()
        assert decode(await last) == {"version": 12, "step": 12}

    asyncio.run(calls())
    assert loads.read == ["10", "12"] and loads.swapped == [12]


def test_loads_swap_in_the_order_of_their_calls():
    loads = Loads()

    async def calls():
        called = [loads.call(path) for path in (3, 1, 2)]
        await asyncio.to_thread(loads.begun.wait)
        loads.go.set()
        await asyncio.gather(*called)

    asyncio.run(calls())
    assert loads.read == ["3", "1", "2"] and loads.swapped == [3, 1, 2]


# -- clients and servers that go -------------------------------------------------------------------


def test_a_client_that_goes_frees_its_slots(serving, client):
    before = serving.server.sampler.tokens
    uid = 6  # of responses that are long
    with serving.held(3):
        running = client.sample(prompt=PROMPT, uid=uid, num_samples=16)
        for _ in range(3):
            next(running)
        running.close()
        until(lambda: serving.server.running == 0)
    until(lambda: client.status()["free_slots"] == 8)
    whole = sum(len(r.tokens) for r in expected(PROMPT, uid=uid, samples=16))
    assert serving.server.sampler.tokens - before < whole / 2
    (answer,) = client.responses(prompt=PROMPT, uid=uid)
    assert_is(answer, expected(PROMPT, uid=uid)[0])


def test_a_deadline_frees_slots_too(serving, client):
    with serving.held(1):
        call = client.sample(prompt=PROMPT, uid=6, num_samples=16, timeout=0.5)
        refused(lambda: list(call), grpc.StatusCode.DEADLINE_EXCEEDED)
    until(lambda: client.status()["free_slots"] == 8)


def test_status_tells_limits(client):
    status = client.status()
    assert status["model"] == "tiny" and status["seed"] == 3 and status["healthy"]
    assert (status["max_prompt"], status["max_response"], status["max_samples"]) == (48, 200, 16)
    assert (status["slots"], status["vocab_size"]) == (8, 320)


@pytest.mark.parametrize(
    "grace, hurry, ends", [(HANG, False, True), (0.0, False, False), (HANG, True, False)]
)
def test_stopping_lets_requests_end_or_refuses_them(grace, hurry, ends):
    with Serving(grace_seconds=grace) as other, SamplerClient(other.address) as client:
        with other.held(2):
            running = client.sample(prompt=PROMPT, uid=6, num_samples=16)
            events = [next(running), next(running)]
            stopped = other.begin_stop(hurry)
            if ends:
                until(lambda: other.server._services[-1].stopping)
                refused(lambda: client.responses(prompt="x"), grpc.StatusCode.UNAVAILABLE)
            else:
                details = refused(lambda: list(running), grpc.StatusCode.UNAVAILABLE)
                assert details == "the server is stopping; ask again later"
        if ends:
            events += running
            assert sum("end" in e for e in events) == 16
        stopped.result(HANG)
        assert not other.server.sampler._thread.is_alive()
        assert not any(t.is_alive() for t in other.jetstream._driver._all_threads)


def test_weights_that_come_after_the_end_are_refused():
    """Reading them may take longer than the server lives."""
    with Serving() as other:
        pass
    with pytest.raises(SamplerStopped, match="the server is stopping"):
        other.server.sampler.load(None, 1)


def test_too_many_requests_are_refused():
    with Serving(max_waiting=2) as other, SamplerClient(other.address) as client:
        with other.held(0):
            calls = [client.sample(prompt=PROMPT, uid=6, num_samples=16) for _ in range(2)]
            for call in calls:
                next(call)
            full = grpc.StatusCode.RESOURCE_EXHAUSTED
            details = refused(lambda: client.responses(prompt="x"), full)
            assert "2 requests run or wait already" in details
            for call in calls:
                call.close()
            until(lambda: other.server.running == 0)
        assert client.responses(prompt="x", max_tokens=1)


def test_a_thread_that_fails_tells_its_callers_and_the_server():
    with Serving() as other, SamplerClient(other.address) as client:
        step, rounds = other.server.sampler.scheduler.step, itertools.count()

        def broken():
            if next(rounds) > 1:
                raise RuntimeError("a device is lost")
            return step()

        other.server.sampler.scheduler.step = broken
        running = client.sample(prompt=PROMPT, uid=6, num_samples=8)
        assert "log says why" in refused(lambda: list(running), grpc.StatusCode.INTERNAL)
        refused(lambda: client.responses(prompt="x"), grpc.StatusCode.INTERNAL)
        assert other.server.failed and not client.status()["healthy"]


def test_a_swap_that_fails_tells_who_waits_for_it():
    service = SamplerService(engine(), Weights(weights_of(2), 2), TOKENIZER)

    def broken(*arguments, **options):
        raise RuntimeError("a device is lost")

    service.scheduler.load = broken
    service.start()
    told = queue.SimpleQueue()

    def load():
        try:
            service.load(weights_of(2), 3)
        except Failed as error:
            told.put(str(error))

    threading.Thread(target=load, daemon=True).start()
    assert "log says why" in told.get(timeout=HANG)
    assert service.failed
    service.stop()


def test_a_host_that_is_not_this_machine_is_an_error():
    with pytest.raises(ValueError, match="cannot listen on no.such.host.invalid:9000"):
        check_addresses(ServerConfig(host="no.such.host.invalid"))
    check_addresses(ServerConfig(host="[::1]", port=0))


def test_metrics():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Serving(metrics_port=port) as other, SamplerClient(other.address) as client:
        (answer,) = client.responses(prompt=PROMPT, uid=1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            lines = page.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert float(values["distflow_responses_total"]) == 1
        assert float(values["distflow_tokens_total"]) == len(answer["tokens"])
        assert float(values["distflow_weights_version"]) == 2
        assert any(name.startswith("jetstream_prefill_backlog_size") for name in values)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_nothing_compiles_after_the_start(client):
    """For any request: lengths, numbers of samples, aborts."""
    counter = Compilations()
    for length in (1, 16, 17, 48):
        client.responses(prompt="y" * length, num_samples=1 + length % 7, stop="z", max_tokens=9)
    assert counter.take() == 0, counter.names()
    counter.close()
