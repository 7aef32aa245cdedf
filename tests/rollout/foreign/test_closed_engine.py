"""Resources left by a closed engine."""

import socket

import numpy as np
from support.tiny_model import TINY
from support.tiny_sampler import TOKENIZER
from support.waiting import HANG

from distflow_jax.parsing.http_call import HttpServer
from distflow_jax.rollout.foreign.engine_protocol import EngineRequest, Failure
from distflow_jax.rollout.foreign.openai_engine import OpenAIEngine, OpenAISettings
from distflow_jax.rollout.foreign.weight_folders import WeightFolders
from distflow_jax.rollout.requests import SamplingParams


def test_a_closed_engine_cuts_the_calls_that_run(tmp_path):
    """The server reads the call and does not answer, for which the engine would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANG)
        engine = OpenAIEngine(
            OpenAISettings(
                HttpServer(f"http://127.0.0.1:{server.getsockname()[1]}"),
                model="m",
                try_seconds=10 * HANG,
            ),
            WeightFolders(tmp_path, TINY, TOKENIZER),
            stops=[],
            seed=3,
        )
        sampling = SamplingParams(num_samples=1, limit=4)
        engine.submit([EngineRequest(7, 0, 0, np.arange(1, 4, dtype=np.int32), sampling)])
        connection, _ = server.accept()
        with connection:
            connection.settimeout(HANG)
            assert connection.recv(1)  # it has begun
            engine.close()
            while connection.recv(1 << 16):
                pass
            (failure,) = engine.results(HANG)
            assert isinstance(failure, Failure) and failure.id == 7 and failure.lost
