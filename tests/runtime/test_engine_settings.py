"""The flag --engine and its settings' file: each mistake is one line that names value and fix."""

import json

import pytest

from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.runtime.samplers.foreign_engines import EngineSettings, read_engine


def settings_file(tmp_path, **values):
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_engines():
    assert read_engine("own") is None
    choice = read_engine("openai:http://gpu-0:8000/v1")
    assert (choice.kind, choice.address) == ("openai", "http://gpu-0:8000")
    assert choice.settings == EngineSettings()
    choice = read_engine("distflow:[::1]:9000")
    assert (choice.kind, choice.address) == ("distflow", "[::1]:9000")


def test_settings(tmp_path):
    steps = [["POST", "/load", {"path": "$folder"}]]
    path = settings_file(tmp_path, slots=3, load_steps=steps, logprobs="processed")
    choice = read_engine("openai:http://gpu-0:8000", path)
    assert choice.settings.slots == 3
    choice.check(SamplingParams(4, 8, 0.7))
    with pytest.raises(ValueError, match="rollout.top_k=0"):
        choice.check(SamplingParams(4, 8, 0.7, 5))


@pytest.mark.parametrize(
    "flag, values, reason",
    [
        ("", {}, "give own, openai:http://HOST:PORT or distflow:HOST:PORT"),
        ("vllm:http://a:1", {}, "give own, openai:http://HOST:PORT"),
        ("openai:", {}, "is no address of a server"),
        ("openai:a:1", {}, "is no address of a server"),
        ("distflow:a", {}, "must be HOST:PORT, got 'a'"),
        ("distflow:http://a:1", {}, "must be HOST:PORT, got 'http://a:1'"),
        *((f"openai:http://{host}:1", {}, "is no address") for host in ("", "a b", "a..b", "[::")),
        *((f"openai:http://a:{port}", {}, "is no address") for port in ("", "x", 0, 65536)),
        ("own", {"slots": 3}, "is for external engines"),
        ("openai:http://a:1", {"slot": 3}, "unknown key 'slot' .*slots"),
        ("openai:http://a:1", {"slots": 0}, "slots must be an integer"),
        ("openai:http://a:1", {"try_seconds": -1}, "try_seconds must be a positive"),
        ("openai:http://a:1", {"logprobs": "all"}, "logprobs must be one of"),
        ("openai:http://a:1", {"dtype": "int8"}, "dtype must be float32, bfloat16 or float16"),
        ("openai:http://a:1", {"load_steps": "x"}, "load_steps must be a list"),
        ("openai:http://a:1", {"load_steps": [["POST"]]}, "a step is a list such as"),
        ("openai:http://a:1", {"key_file": "nowhere"}, "key_file=nowhere does not exist"),
    ],
)
def test_mistakes(tmp_path, flag, values, reason):
    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        read_engine(flag, settings_file(tmp_path, **values) if values else "")


def test_settings_that_are_no_file():
    with pytest.raises(OSError):
        read_engine("openai:http://a:1", "nowhere.json")
