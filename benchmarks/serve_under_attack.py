"""Latency, memory and answers of a server under attack, beside the same server left in peace.

python benchmarks/serve_under_attack.py --seconds=600
python benchmarks/serve_under_attack.py --seconds=30     # a quick look

One scripts/serve.py, and 12 threads that wait for nothing but their answers. In a slice of peace
each sends small requests, through both protocols. In a slice of attack half of what each sends is
the same small requests. The rest are requests of 8 samples that are given up (before or after the
first token, or with the connection), garbage (wrong fields, damaged JSON, bytes that are no
HTTP/2), prompts of 1 and 3.9 MB, which are refused, and the longest prompts that are not. Slices
alternate, so that other jobs of the machine harm both alike; --seconds are those of all slices of
attack, and one of peace is half as long.

Answers are compared with those given one by one before. Memory is the server's resident memory
between slices, once no request runs: the median of the second half of the slices over that of the
first half, of each kind by itself, since memory that has just been freed is not given back at once.
The exit code is 1 if an answer differs or is missing, if a refusal has another code than those of
docs/serving.md, if p99 under attack is above --most times that in peace in either protocol, or if
memory has grown by more than 2 %.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from distflow_jax.serving.client import SamplerClient
from distflow_jax.serving.messages import SERVICE

ROOT = pathlib.Path(__file__).parents[1]
THREADS = 12
PROMPT, RESPONSE = 256, 32  # tokens at most
SMALL = 16  # tokens of a small request's response
MODEL = [
    "--config=configs/tiny.py",
    "--config.model.source=random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=320",
    f"--config.data.max_prompt_length={PROMPT}",
    f"--config.rollout.max_response_length={RESPONSE}",
    f"--config.training.row_tokens={PROMPT + RESPONSE}",
    "--config.training.logp_chunk=32",
]
QUESTIONS = [f"What is {3 * i} + {7 * i % 41}?" for i in range(24)]
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
MEMORY = 0.02  # growth of resident memory that counts as none
WARM_SECONDS = 20.0  # of attack, then of peace, before anything is measured
DRAIN_SECONDS = 60.0

GARBAGE = [
    *({"prompt": value} for value in ("", 3, None, [], {}, "\x00" * 5000)),
    *({"tokens": value} for value in ([-1], [1 << 70], [1.5], ["a"], [0] * 5000)),
    *({"messages": value} for value in ([], [1], [{"role": "user"}], [{"role": 1, "content": 2}])),
    *({"prompt": "x", "temperature": value} for value in (-1, 1e300, "hot", 1e-38)),
    *({"prompt": "x", "top_p": value} for value in (0, 2, 1e-50, "")),
    *({"prompt": "x", "num_samples": value} for value in (0, -1, 1 << 40, True)),
    *({"prompt": "x", "stop": value} for value in ("", [""], ["a"] * 99, "a" * 9999, 7)),
    *({"prompt": "x", name: 1} for name in ("tempreature", "\x1b[2J", "y" * 10_000)),
    {"prompt": "x", "tokens": [1]},
]


@dataclasses.dataclass
class Found:
    """Counts and latencies of 12 threads in slices of one kind."""

    ours: list[float] = dataclasses.field(default_factory=list)  # seconds of small requests
    jetstream: list[float] = dataclasses.field(default_factory=list)
    sent: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: "Found") -> None:
        """Takes what another slice has seen, too."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Attackers:
    """Clients of one server, and what it answers to each when alone."""

    def __init__(self, address: str):
        self.address = address
        self.client = SamplerClient(address)
        self.channel = grpc.insecure_channel(address)
        self._decode = jetstream_pb2_grpc.OrchestratorStub(self.channel).Decode
        self._sample = self.channel.unary_stream(f"/{SERVICE}/Sample")
        self._valid = json.dumps({"prompt": "What is 1 + 2?", "num_samples": 2, "max_tokens": 4})
        self._huge = [
            json.dumps({"prompt": "What is " * 487_000}).encode(),
            json.dumps({"tokens": [7] * 1_300_000}).encode(),
            json.dumps({"messages": [{"role": "user", "content": "x" * 3_800_000}]}).encode(),
            b'{"prompt":"' + b"\xf0\x9f\x98\x80" * 960_000 + b'"}',
            b"[" * 3_900_000,
            b"[" * 1_000_000,  # these two are read
            json.dumps({"prompt": "y" * 1_000_000}).encode(),
        ]
        self.alone = [(self._ours(i), self._jetstream(i)) for i in range(len(QUESTIONS))]
        self.long_alone = self._long(0)
        self.actions: dict[str, Callable[[random.Random, Found], None]] = {
            "given up": self._give_up,
            "garbage": self._garbage,
            "damaged": self._damaged,
            "no HTTP/2": self._no_http,
            "huge": self._send_huge,
            "longest": self._send_longest,
        }

    def close(self) -> None:
        """Ends the connections."""
        self.client.close()
        self.channel.close()

    def resting(self) -> bool:
        """Whether the server has nothing to do."""
        return self.client.status()["running"] == 0

    def run(self, seconds: float, *, attack: bool, seed: int) -> Found:
        """One slice of 12 threads."""
        found, end = Found(), time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(random.Random(f"{seed} {i}"), found))
            for i in range(THREADS)
        ]
        self._end, self._attack = end, attack
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _work(self, rng: random.Random, found: Found) -> None:
        while time.monotonic() < self._end:
            action = rng.choice(list(self.actions)) if self._attack and rng.random() < 0.5 else ""
            try:
                if action:
                    self.actions[action](rng, found)
                else:
                    self._small(rng, found)
                found.sent[action or "small"] += 1
            except grpc.RpcError as error:
                found.wrong.append(f"{action or 'small'}: {error.code()} {error.details()}")

    # -- small requests -------------------------------------------------------------------------

    def _small(self, rng: random.Random, found: Found) -> None:
        i, ours = rng.randrange(len(QUESTIONS)), rng.random() < 0.75
        started = time.perf_counter()
        answer = self._ours(i) if ours else self._jetstream(i)
        (found.ours if ours else found.jetstream).append(time.perf_counter() - started)
        if answer != self.alone[i][not ours]:
            found.wrong.append(f"{QUESTIONS[i]!r}: {answer!r} is not {self.alone[i][not ours]!r}")

    def _ours(self, i: int) -> tuple[str, list[int]]:
        """Sampled at temperature 1 where i is odd: the uid decides what is drawn."""
        (answer,) = self.client.responses(
            prompt=QUESTIONS[i], max_tokens=SMALL, uid=i, temperature=float(i % 2)
        )
        return answer["text"], answer["tokens"]

    def _jetstream(self, i: int) -> tuple[str, list[int]]:
        text = jetstream_pb2.DecodeRequest.TextContent(text=QUESTIONS[i])
        request = jetstream_pb2.DecodeRequest(text_content=text, max_tokens=SMALL)
        parts = [part.stream_content.samples[0].text for part in self._decode(request)]
        return "".join(parts), []

    # -- the attack -----------------------------------------------------------------------------

    def _give_up(self, rng: random.Random, found: Found) -> None:
        request = {"prompt": QUESTIONS[rng.randrange(24)], "num_samples": 8, "temperature": 1.0}
        match rng.randrange(4):
            case 0:  # at once
                call = self._sample(json.dumps(request).encode())
                time.sleep(rng.random() * 0.02)
                call.cancel()
            case 1:  # with some tokens
                events = self.client.sample(**request)
                for _ in range(rng.randint(1, 4)):
                    next(events)
                events.close()
            case 2:  # with the connection
                # a channel of its own, not one of grpc's pool
                channel = grpc.insecure_channel(
                    self.address, options=[("grpc.use_local_subchannel_pool", 1)]
                )
                call = channel.unary_stream(f"/{SERVICE}/Sample")(json.dumps(request).encode())
                next(call)
                channel.close()
            case _:  # through JetStream's protocol
                text = jetstream_pb2.DecodeRequest.TextContent(text=request["prompt"])
                call = self._decode(
                    jetstream_pb2.DecodeRequest(text_content=text, max_tokens=RESPONSE)
                )
                next(call)
                call.cancel()

    def _garbage(self, rng: random.Random, found: Found) -> None:
        self._refused(json.dumps(rng.choice(GARBAGE)).encode(), found, must=True)

    def _damaged(self, rng: random.Random, found: Found) -> None:
        data = bytearray(self._valid.encode())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        self._refused(bytes(data), found, must=False)  # some are other valid requests

    def _send_huge(self, rng: random.Random, found: Found) -> None:
        self._refused(rng.choice(self._huge), found, must=True)

    def _refused(self, data: bytes, found: Found, *, must: bool) -> None:
        try:
            for _ in self._sample(data):
                pass
        except grpc.RpcError as error:
            if error.code() not in REFUSALS:
                raise
            return
        if must:
            found.wrong.append(f"was accepted: {data[:80]!r}")

    def _no_http(self, rng: random.Random, found: Found) -> None:
        host, port = self.address.rsplit(":", 1)
        with contextlib.suppress(ConnectionError), socket.create_connection((host, port)) as raw:
            start = rng.choice(
                [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
            )
            raw.sendall(start + rng.randbytes(rng.randint(1, 5000)))

    def _send_longest(self, rng: random.Random, found: Found) -> None:
        if (answer := self._long(0)) != self.long_alone:
            found.wrong.append(f"the longest prompt: {answer!r} is not {self.long_alone!r}")

    def _long(self, uid: int) -> list[list[int]]:
        prompt = [65 + i % 26 for i in range(PROMPT)]
        answers = self.client.responses(tokens=prompt, num_samples=4, uid=uid)
        return [answer["tokens"] for answer in answers]


# -- the server ---------------------------------------------------------------------------------


@contextlib.contextmanager
def served() -> Iterator[tuple[subprocess.Popen, str]]:
    """A scripts/serve.py of MODEL, and its address; ended in order, and checked to end so."""
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), *MODEL, "--port=0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        (address,) = re.findall(r" on (\S+:\d+),$", lines[0].rstrip())
        yield process, address
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        if process.returncode != 0:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def resident(pid: int) -> int:
    """Bytes of memory in which a process is."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


def at_rest(attackers: Attackers, pid: int) -> int:
    """Resident memory once no request runs. RuntimeError if some never end."""
    end = time.monotonic() + DRAIN_SECONDS
    while not attackers.resting():
        if time.monotonic() > end:
            raise RuntimeError(f"requests still run {DRAIN_SECONDS:g} s after the last client")
        time.sleep(0.1)
    time.sleep(0.5)
    return resident(pid)


def measure(seconds: float, slice_seconds: float) -> dict[str, Any]:
    """Numbers of slices in turn, `seconds` of attack in all; see the module's docstring."""
    peace, attack = Found(), Found()
    memory: dict[str, list[int]] = {"peace": [], "attack": []}
    with served() as (process, address), contextlib.closing(Attackers(address)) as attackers:
        for hostile in (True, False):
            attackers.run(min(seconds, WARM_SECONDS), attack=hostile, seed=-1)
        for number in range(max(round(seconds / slice_seconds), 2)):
            for name, into in (("peace", peace), ("attack", attack)):
                length = slice_seconds if into is attack else slice_seconds / 2
                found = attackers.run(length, attack=into is attack, seed=number)
                into.add(found)
                memory[name].append(at_rest(attackers, process.pid))
    ratios = (p99(attack.ours) / p99(peace.ours), p99(attack.jetstream) / p99(peace.jetstream))
    return {
        "peace": seconds_of(peace),
        "attack": seconds_of(attack),
        "sent": dict(attack.sent),
        "wrong": peace.wrong + attack.wrong,
        "ratio": max(ratios),
        "memory": memory,
        "growth": max(growth(sizes) for sizes in memory.values()),
    }


def growth(sizes: list[int]) -> float:
    """The median of the second half over that of the first, less 1."""
    half = len(sizes) // 2
    return statistics.median(sizes[half:]) / statistics.median(sizes[:half]) - 1


def p99(values: list[float]) -> float:
    """The value that 1 % are above."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def seconds_of(found: Found) -> dict[str, dict[str, float]]:
    """{protocol: requests, median and p99 of their seconds}."""
    values = {"Sample": found.ours, "Decode": found.jetstream}
    return {
        name: {"requests": len(v), "median": statistics.median(v), "p99": p99(v)}
        for name, v in values.items()
    }


def main() -> int:
    """Prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of attack in all")
    parser.add_argument("--slice", type=float, default=20.0, help="seconds between changes")
    parser.add_argument("--most", type=float, default=2.0, help="p99 under attack over in peace")
    options = parser.parse_args()
    found = measure(options.seconds, min(options.slice, options.seconds))
    for kind in ("peace", "attack"):
        for server, values in found[kind].items():
            print(
                f"{kind:6} {server}: {values['requests']} small requests, median "
                f"{1e3 * values['median']:.1f} ms, p99 {1e3 * values['p99']:.1f} ms"
            )
    print("sent under attack:", ", ".join(f"{n} {kind}" for kind, n in found["sent"].items()))
    print(f"p99 under attack over p99 in peace: {found['ratio']:.2f} (at most {options.most:g})")
    for kind, sizes in found["memory"].items():
        print(
            f"resident memory after {kind}: growth {100 * growth(sizes):+.2f} %; MiB:",
            *(round(size / 2**20) for size in sizes),
        )
    print(f"wrong answers: {len(found['wrong'])}", *found["wrong"][:10], sep="\n  ")
    flat = found["growth"] <= MEMORY
    return 0 if found["ratio"] <= options.most and flat and not found["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
