"""scripts/serve.py as a process: what it answers is what generate.py writes; how it ends.

Nightly: 64 concurrent clients get what `generate.py` writes; token, certificate and folders of a
server by its flags; without JetStream it serves distflow.Sampler.
"""

import concurrent.futures
import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading

import grpc
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from support import haste
from support.paths import ROOT
from support.programs import certificate
from support.waiting import HANG

from distflow_jax.serving.client import SamplerClient

SMALL = [
    "--config=configs/tiny.py",
    "--config.model.source=random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=320",
    "--config.data.max_prompt_length=96",
    "--config.rollout.max_response_length=24",
]
QUESTIONS = [f"What is {3 * i} + {7 * i % 41}{' please' * (i % 6)}?" for i in range(64)]


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=haste.environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


class Served:
    """A running serve.py: its ready line, address, and later its end."""

    def __init__(self, *arguments, program=("scripts/serve.py",)):
        self.process = start(*program, *SMALL, "--port=0", *arguments)
        self.lines = []
        ready = threading.Event()

        def read():
            for line in self.process.stdout:
                self.lines.append(line.decode().rstrip())
                if self.lines[-1].startswith("  peak memory"):
                    ready.set()
            ready.set()

        self._reader = threading.Thread(target=read)
        self._reader.start()
        assert ready.wait(HANG) and self.lines, self.process.stderr.read().decode()
        (self.address,) = re.findall(r" on (\S+:\d+),$", self.lines[0])

    def end(self, number=signal.SIGTERM):
        """(exit code, lines of stdout, stderr)."""
        self.process.send_signal(number)
        code = self.process.wait(HANG)
        self._reader.join()
        return code, self.lines, self.process.stderr.read().decode()


@contextlib.contextmanager
def served(*arguments, **program):
    running = Served(*arguments, **program)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def generated(tmp_path, *arguments):
    """Answers of generate.py to QUESTIONS, read from its file."""
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(QUESTIONS))
    process = start("scripts/generate.py", *SMALL, f"--file={file}", *arguments)
    output, errors = process.communicate(timeout=HANG)
    assert process.returncode == 0, errors.decode()
    text = output.decode("utf-8")
    heads = [text.index(f"--- {question} [0]\n") for question in QUESTIONS]
    ends = [*heads[1:], len(text)]
    return [
        text[at + len(f"--- {question} [0]\n") : end - 1]
        for at, end, question in zip(heads, ends, QUESTIONS, strict=True)
    ]


def test_a_signal_ends_it_in_order():
    with served(f"--grace_seconds={HANG:g}") as running:
        ready, sizes, memory = running.lines
        assert ready.startswith("ready: random:llama?hidden=64") and "(version 0)" in ready
        assert sizes == "  32 slots for each of two protocols, prompt 96 + response 24 tokens,"
        assert re.fullmatch(r"  peak memory [\d.]+ [MG]iB", memory)
        assert running.address.startswith("127.0.0.1:")
        with SamplerClient(running.address) as client:
            events = client.sample(prompt="What", num_samples=40)
            first = next(events)
            running.process.send_signal(signal.SIGINT)
            rest = list(events)
        assert first["prompt_tokens"] == list(b"What") and sum("end" in e for e in rest) == 40
        code = running.process.wait(HANG)
        running._reader.join()
        assert (code, running.lines[3:], running.process.stderr.read()) == (0, ["stopped"], b"")


def test_mistakes_take_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = {
            f"--port={port}": rf"--port: cannot listen on 127.0.0.1:{port} \(.*\); name an address",
            f"--metrics_port={port}": rf"--metrics_port: cannot listen on .*:{port} ",
            "--run=nowhere": "--run=nowhere does not exist",
            "--top_p=0": "--top_p must be above 0",
        }
        started = {flag: start("scripts/serve.py", *SMALL, "--port=0", flag) for flag in expected}
        for flag, process in started.items():
            output, errors = process.communicate(timeout=HANG)
            assert process.returncode == 2, errors.decode()
            (line,) = errors.decode().strip().splitlines()
            assert line.startswith("error: ") and output == b""
            assert re.search(expected[flag], line), line


@pytest.mark.slow
def test_token_certificate_and_folders_by_flags(tmp_path):
    """Of serve_command.py: what the flags name is what a client needs."""
    cert, key, token, runs = (tmp_path / name for name in ("cert", "key", "token", "runs"))
    certificate(cert, key)
    token.write_text("an open secret\n")
    runs.mkdir()
    flags = [f"--token_file={token}", f"--tls_cert={cert}", f"--tls_key={key}"]
    with served(*flags, f"--load_folders={runs}") as running:
        with SamplerClient(running.address, token="an open secret", ca_file=cert) as client:
            assert len(client.responses(prompt="What", max_tokens=4)) == 1
            for path, code in (
                (str(runs / "first"), grpc.StatusCode.NOT_FOUND),
                (str(tmp_path), grpc.StatusCode.PERMISSION_DENIED),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    client.load_weights(path)
                assert caught.value.code() == code
        with SamplerClient(running.address, token="another", ca_file=cert) as client:
            with pytest.raises(grpc.RpcError) as caught:
                client.status()
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert running.end()[0] == 0


WITHOUT_JETSTREAM = """
import sys
sys.modules["jetstream"] = None
from distflow_jax.commands.main import run_script
run_script("serve")
"""


@pytest.mark.slow
def test_without_jetstream_it_warns_and_serves_the_sampler(tmp_path):
    greedy = generated(tmp_path)
    with served(program=("-c", WITHOUT_JETSTREAM)) as running:
        assert (
            running.lines[1] == "  32 slots for distflow.Sampler, prompt 96 + response 24 tokens,"
        )
        with SamplerClient(running.address) as client:
            turns = [{"role": "user", "content": QUESTIONS[0]}]
            (answer,) = client.responses(messages=turns, temperature=0)
        assert answer["text"] == greedy[0]
        with grpc.insecure_channel(running.address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                stub = jetstream_pb2_grpc.OrchestratorStub(channel)
                stub.HealthCheck(jetstream_pb2.HealthCheckRequest())
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        code, lines, errors = running.end()
    assert (code, lines[3:]) == (0, ["stopped"])
    (warning,) = errors.splitlines()
    assert warning.endswith(
        "warning: JetStream's protocol is not served: google-jetstream is not installed: "
        "pip install --no-deps google-jetstream==0.2.2"
    )


@pytest.mark.slow
def test_64_at_once_get_what_generate_writes(tmp_path):
    """Both protocols at once, greedy and sampled, whole and cut by limits of their own."""
    greedy = generated(tmp_path)
    sampled = generated(tmp_path, "--temperature=1.0", "--top_p=0.95")
    raw = generated(tmp_path, "--raw")
    with served("--metrics_port=0", "--slots=16") as running:
        with (
            SamplerClient(running.address) as client,
            grpc.insecure_channel(running.address) as channel,
        ):
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)

            def ours(i, **how):
                turns = [{"role": "user", "content": QUESTIONS[i]}]
                _, *events = client.sample(messages=turns, uid=i, **how)
                tokens = [t for event in events for t in event["tokens"]]
                return "".join(event["text"] for event in events), tokens

            def jetstreams(i):
                text = jetstream_pb2.DecodeRequest.TextContent(text=QUESTIONS[i])
                request = jetstream_pb2.DecodeRequest(text_content=text, max_tokens=24)
                return "".join(r.stream_content.samples[0].text for r in stub.Decode(request))

            with concurrent.futures.ThreadPoolExecutor(128) as pool:
                through_jetstream = [pool.submit(jetstreams, i) for i in range(64)]
                ours_greedy = list(pool.map(lambda i: ours(i, temperature=0), range(64)))
                how = {"temperature": 1.0, "top_p": 0.95}
                ours_sampled = list(pool.map(lambda i: ours(i, **how), range(64)))
                cut = pool.map(lambda i: ours(i, max_tokens=1 + i % 24, **how), range(64))
                cut = list(cut)
        assert [text for text, _ in ours_greedy] == greedy
        assert [text for text, _ in ours_sampled] == sampled
        assert [f.result() for f in through_jetstream] == raw
        assert [t for _, t in cut] == [t[: 1 + i % 24] for i, (_, t) in enumerate(ours_sampled)]
        assert len(set(sampled)) == 64
        code, lines, errors = running.end()
        assert (code, lines[3:], errors) == (0, ["stopped"], "")
