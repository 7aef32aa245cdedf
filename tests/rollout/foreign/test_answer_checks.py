"""Answers that are refused, and settings of engines that are."""

import socket
import threading

import numpy as np
import pytest
from support.waiting import HANG

from distflow_jax.parsing.http_call import CallFailed, HttpServer
from distflow_jax.rollout.foreign.engine_protocol import Answer, EngineRequest, checked_columns
from distflow_jax.rollout.foreign.openai_engine import (
    OpenAISettings,
    check_sampling,
    noise_seed,
    read_completion,
    read_steps,
)
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.rollout.response_checks import RefusedAnswer, ResponseLimits

GOOD = {"tokens": [4, 5, 2], "logp": [-0.5, 0.0, -1], "ended": True}


def checked(limit=5, held=3, known=3, **changes):
    answer = Answer(0, **(GOOD | changes))
    return checked_columns(answer, ResponseLimits(10, {2}), limit=limit, held=held, known=known)


def test_good_answer():
    tokens, logp, version = checked()
    assert tokens.tolist() == [4, 5, 2] and version.tolist() == [3, 3, 3]
    assert logp.dtype == np.float32 and version.dtype == tokens.dtype == np.int32
    assert checked(version=[1, 2, 3], held=1)[2].tolist() == [1, 2, 3]
    assert checked(tokens=[4, 5, 6], ended=False, limit=3)[0].tolist() == [4, 5, 6]
    # an end token as the last one that the limit allows, whichever the engine names as the reason
    assert checked(ended=False, limit=3)[0].tolist() == [4, 5, 2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": [], "logp": []}, "no token"),
        ({"tokens": [4, "5", 2]}, "no integers"),
        ({"tokens": [4, True, 2]}, "no integers"),
        ({"tokens": None}, "token ids that are no integers"),
        ({"tokens": "452"}, "token ids that are no integers"),
        ({"tokens": 4}, "token ids that are no integers"),
        ({"tokens": [[4], [5], [2]]}, "token ids that are no integers"),
        ({"tokens": [4, 10**30, 2]}, "token ids of more than 64 bits"),
        ({"tokens": [4, 10, 2]}, "token id 10, outside the vocabulary of 10"),
        ({"tokens": [4, -1, 2]}, "token id -1"),
        ({"tokens": [4, 2, 2]}, "end token 2 at place 1"),
        ({"tokens": [4, 5, 6]}, "no end token here"),
        ({"tokens": [4, 5, 6], "ended": False}, "after 3 of 5 tokens"),
        ({"limit": 2}, "at most 2"),
        ({"logp": None}, "no log-probs"),
        ({"logp": [-1.0, -1.0]}, "3 tokens with 2 log-probs"),
        ({"logp": [-1.0, None, -1.0]}, "without log-prob"),
        ({"logp": [-1.0, float("nan"), -1.0]}, "log-prob nan"),
        ({"logp": [-1.0, 0.5, -1.0]}, "log-prob 0.5"),
        ({"logp": [-1.0, -(10**400), -1.0]}, "a log-prob that no float holds"),
        ({"logp": [-1.0, -1e300, -1.0]}, "log-prob -inf"),
        ({"logp": [-1.0, -9999.0, -1.0]}, "log-prob -9999"),
        ({"logp": "abc"}, "log-probs that are no list"),
        ({"logp": -1.0}, "log-probs that are no list"),
        ({"logp": [-1.0, True, -1.0]}, "without log-prob"),
        ({"version": 3}, "versions that are no integers"),
        ({"version": ["3", "3", "3"]}, "versions that are no integers"),
        ({"version": [3, 3, 3.5]}, "versions that are no integers"),
        ({"version": [3, 3, 10**30]}, "versions of more than 64 bits"),
        ({"version": [3, 3]}, "2 versions"),
        ({"version": [3, 4, 3]}, "version 4"),
        ({"version": [2, 3, 3]}, "version 2"),
    ],
)
def test_refused_answer(changes, reason):
    with pytest.raises(RefusedAnswer, match=reason):
        checked(**changes)


def request(tokens=(7, 8)):
    return EngineRequest(1, 0, 0, np.array(tokens, np.int32), SamplingParams(1, 4))


def completion(**changes):
    choice = {
        "finish_reason": "length",
        "token_ids": [1, 2],
        "logprobs": {"tokens": ["token_id:1", "token_id:2"], "token_logprobs": [-1.0, -2.0]},
    }
    return {"choices": [choice | changes]}


def test_completion_is_read():
    answer = read_completion(completion(prompt_token_ids=[7, 8]), request())
    assert (answer.id, answer.tokens, answer.logp, answer.ended) == (1, [1, 2], [-1.0, -2.0], False)
    assert read_completion(completion(token_ids=None), request()).tokens == [1, 2]
    assert read_completion(completion(logprobs=None), request()).logp is None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, "no single choice"),
        ({"choices": []}, "no single choice"),
        ({"choices": [1]}, "no single choice"),
        (completion(prompt_token_ids=[1, 7, 8]), "another prompt"),
        (completion(finish_reason="abort"), "ended by 'abort'"),
        (completion(token_ids=None, logprobs={"tokens": ["a", "b"]}), "return_token_ids"),
        (completion(logprobs={"token_logprobs": 3}), "no list"),
        # texts of tokens that look like ids
        (completion(token_ids=None, logprobs={"tokens": ["1", "2"]}), "return_token_ids"),
        (completion(token_ids=[1, 3]), "log-probs of other tokens"),
        (completion(finish_reason="x" * 9999), r"ended by 'x{70,80}\.\.\.$"),
    ],
)
def test_completion_that_is_refused(found, reason):
    with pytest.raises(CallFailed, match=reason):
        read_completion(found, request())


def test_log_probs_must_be_of_the_temperature():
    for good in (SamplingParams(1, 4), SamplingParams(1, 4, 0.0), SamplingParams(1, 4, 1.0, 5)):
        check_sampling(good, "raw", "engine")
    check_sampling(SamplingParams(1, 4, 0.7), "processed", "engine")
    with pytest.raises(ValueError, match="temperature is 0.7; start vLLM with --logprobs-mode"):
        check_sampling(SamplingParams(1, 4, 0.7), "raw", "engine")
    with pytest.raises(ValueError, match="rollout.top_k=0"):
        check_sampling(SamplingParams(1, 4, 0.7, 5), "processed", "engine")


def test_settings():
    urls = ("", "localhost:8000", "ftp://a", "http://", "http://a:b", "http://[::g]:80")
    # a key behind a path would be dropped
    for url in (*urls, "http://a/x y", "http://a/v1?key=1", "http://a/#x", "http://a/\xfc"):
        with pytest.raises(ValueError, match="is no address"):
            HttpServer(url)
    with pytest.raises(ValueError, match="^'https://...@a:1/x' is no address") as told:
        HttpServer("https://me:secret@a:1/x")
    assert "secret" not in str(told.value)
    server = HttpServer("http://127.0.0.1:8000", "secret")
    assert "secret" not in repr(server)
    with pytest.raises(ValueError, match="logprobs must be one of"):
        OpenAISettings(server, logprobs="none")
    with pytest.raises(ValueError, match="slots"):
        OpenAISettings(server, slots=0)


@pytest.mark.parametrize(
    ("answer", "reason", "again"),
    [
        (b"HTTP/1.1 429 -\r\nRetry-After: 7\r\n\r\nbusy", "^HTTP 429 of /: busy$", 7),
        (b"HTTP/1.1 503 -\r\nRetry-After: 999999\r\n\r\n", "^HTTP 503 of /: $", 60),
        (
            b"HTTP/1.1 503 -\r\nRetry-After: Wed, 21 Oct\r\n\r\n\x1b[2Ja\nb",
            r"\\x1b\[2Ja b$",
            0,
        ),
        (b"SSH-2.0-OpenSSH\r\n", r"broke off: SSH-2.0-OpenSSH\\r\\n$", 0),
        (b"HTTP/1.1 200 -\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "broke off", 0),
    ],
)
def test_an_answer_that_is_none_is_said_in_one_line(answer, reason, again):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        server = HttpServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(CallFailed, match=reason) as told:
            server.call("GET", "/", seconds=HANG, most_bytes=1000)
        thread.join(HANG)
    assert told.value.again == again and str(told.value).isprintable()


def test_steps_of_a_load():
    entries = [["POST", "/load/$version", {"a": ["$folder", 3]}], ["GET", "/go"]]
    steps = read_steps(entries, "f")
    filled = steps[0].filled(folder="/w", version="7")
    assert (filled.path, filled.body) == ("/load/7", {"a": ["/w", 3]})
    assert steps[1].filled(folder="/w", version="7").body is None
    (step,) = read_steps([["POST", "/load?path=$folder", {"path": "$folder"}]], "f")
    step = step.filled(folder="/my runs/\xfc&", version="7")
    assert (step.path, step.body) == ("/load?path=/my%20runs/%C3%BC%26", {"path": "/my runs/\xfc&"})
    for entries, reason in (
        ("x", "a step is"),
        ([["POST"]], "a step is"),
        ([["POST", "x"]], "with /"),
        ([["POST", "/x y"]], "ASCII without spaces, got '/x y'"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_steps(entries, "f")


def test_seeds_differ():
    seeds = {noise_seed(1, counter, sample) for counter in range(50) for sample in range(8)}
    assert len(seeds) == 400 and all(0 <= seed < 2**53 for seed in seeds)
    assert noise_seed(1, 2, 3) == noise_seed(1, 2, 3) != noise_seed(2, 2, 3)
