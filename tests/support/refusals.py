"""Requests to distflow.Sampler that are refused, and with which words."""

import json

import grpc
import pytest


def refused(call, code):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() == code, caught.value
    return caught.value.details()


# -- refusals --------------------------------------------------------------------------------------

BAD = [
    ({}, "exactly one of prompt"),
    ({"prompt": "x", "tokens": [1]}, "got prompt and tokens"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"tokens": []}, "the prompt is empty"),
    ({"prompt": "x" * 49}, "has 49 tokens; this server reads at most 48"),
    ({"prompt": "x" * 577}, "has 577 characters; this server reads at most 48 tokens, which hold"),
    ({"messages": [{"role": "user", "content": "x" * 577}]}, "the prompt has 577 characters"),
    ({"messages": [{"role": "user", "content": ""}] * 49}, "49 messages have more tokens than"),
    ({"prompt": "x" * 1_000_000}, "bytes; one with a prompt of 48 tokens has at most"),
    ({"tokens": [0] * 300_000}, "bytes; one with a prompt of 48 tokens has at most"),
    ({"prompt": 3}, "prompt must be a string"),
    ({"prompt": "\ud800"}, "not valid Unicode"),
    ({"tokens": [320]}, "token id 320 is not in the vocabulary of 320"),
    ({"tokens": [-1]}, "token id -1"),
    ({"tokens": [1.5]}, "tokens must be a list of integers"),
    ({"tokens": [1 << 70]}, "not in the vocabulary"),
    ({"messages": [{"role": "user"}]}, "message 0 must have role and content"),
    ({"messages": []}, "messages must be a list"),
    ({"prompt": "x", "temperature": -0.5}, "temperature must be 0, which is greedy, or at least"),
    ({"prompt": "x", "temperature": 1e300}, "temperature is too large"),
    ({"prompt": "x", "temperature": 1e-38}, "or at least 1e-30, got 1e-38"),
    ({"prompt": "x", "temperature": "hot"}, 'temperature must be a number, got "hot"'),
    ({"prompt": "x", "top_p": 0}, "top_p must be above 0"),
    (
        {"prompt": "x", "top_p": 1.1},
        "top_p must be above 0 (at least 1.17549e-38) and at most 1, got 1.1",
    ),
    (
        {"prompt": "x", "top_p": 1e-50},
        "top_p must be above 0 (at least 1.17549e-38) and at most 1, got 1e-50",
    ),
    ({"prompt": "x", "top_p": 1e-40}, "got 1e-40"),
    ({"prompt": "x", "top_k": -1}, "top_k must be from 0"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens must be from 1 to 200, got 0"),
    ({"prompt": "x", "max_tokens": 201}, "max_tokens must be from 1 to 200, got 201"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens must be an integer"),
    ({"tokens": [5, 6], "begun": 2}, "begun must be from 0 to 1, got 2"),
    ({"tokens": [5, 6], "begun": -1}, "begun must be from 0 to 1, got -1"),
    ({"prompt": "x", "num_samples": 0}, "num_samples must be from 1 to 16, got 0"),
    ({"prompt": "x", "num_samples": 17}, "num_samples must be from 1 to 16, got 17"),
    ({"prompt": "x", "uid": 1 << 31}, "uid must be from 0"),
    ({"prompt": "x", "stop": ""}, "a stop string is empty"),
    ({"prompt": "x", "stop": ["a", ""]}, "a stop string is empty"),
    ({"prompt": "x", "stop": ["a"] * 17}, "17 stop strings are too many"),
    ({"prompt": "x", "stop": "a" * 1025}, "a stop string has 1025 characters"),
    ({"prompt": "x", "\ud800\n": 1}, r"unknown field '\ud800\n'"),
    ({"prompt": "x", "y" * 10_000: 1}, "unknown field 'yyyy"),
    ({"prompt": "x", "stream": 1}, "stream must be true or false"),
    ({"prompt": "x", "tempreature": 1}, "unknown field 'tempreature'"),
]
BAD_BYTES = [
    (b"\xff\xfe", "not valid UTF-8"),
    (b"{", "not valid JSON"),
    (b"[1]", "must be a JSON object"),
    (b'{"prompt":"x","temperature":NaN}', "not valid JSON: NaN"),
    (b"[" * 100_000, "not valid JSON"),
]


def encode_any(message):
    """Also what the client's own encoding refuses: half of a surrogate pair."""
    return json.dumps(message).encode()
