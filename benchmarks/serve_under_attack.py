"""Latency, memory and answers of a server under attack, beside the same server left in peace.

python benchmarks/serve_under_attack.py --seconds=600
python benchmarks/serve_under_attack.py --seconds=30     # a quick look

One scripts/serve.py, and 12 threads that wait for nothing but their answers. In a slice of peace
each sends small requests, through both protocols; in a slice of attack half of what each sends are
`Attackers.actions`. Slices alternate, so that other jobs of the machine harm both alike; --seconds
are those of all slices of attack, and one of peace is half as long.

Memory is the server's resident memory between slices, once no request runs, of each kind by itself,
since memory that has just been freed is not given back at once. The exit code is 1 if an answer is
missing or differs from that given alone, if a refusal has another code than those of
docs/serving.md, if p99 under attack is above --most times that in peace in either protocol, or if
memory has grown by more than 2 %.
"""

import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import grpc
from command_line import parser_of
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from programs import running

from distflow_jax.serving.client import SamplerClient
from distflow_jax.serving.messages import SERVICE

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
MEMORY = 0.02  # growth of resident memory under attack that counts as none, or that in peace
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
    """Measurements of 12 threads in slices of one kind, peace or attack."""

    # seconds of small requests, by protocol
    seconds: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {"Sample": [], "Decode": []}
    )
    sent: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)  # bytes at rest after each slice

    def p99(self, protocol: str) -> float:
        """Seconds that 1 % of the small requests exceed."""
        return statistics.quantiles(self.seconds[protocol], n=100, method="inclusive")[98]

    def growth(self) -> float:
        """Memory of the second half of the slices over that of the first, less 1."""
        half = len(self.memory) // 2
        return statistics.median(self.memory[half:]) / statistics.median(self.memory[:half]) - 1


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
        self._alone = {
            (protocol, i): self._answer(protocol, i)
            for protocol in ("Sample", "Decode")
            for i in range(len(QUESTIONS))
        }
        self._long_alone = self._long()
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

    def run(self, seconds: float, found: Found, *, attack: bool, seed: int) -> None:
        """One slice of 12 threads, and its end: RuntimeError if some requests never end."""
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(random.Random(f"{seed} {i}"), end, found))
            for i in range(THREADS)
        ]
        self._attack = attack
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end = time.monotonic() + DRAIN_SECONDS
        while self.client.status()["running"]:
            if time.monotonic() > end:
                raise RuntimeError(f"requests still run {DRAIN_SECONDS:g} s after the last client")
            time.sleep(0.1)
        time.sleep(0.5)

    def _work(self, rng: random.Random, end: float, found: Found) -> None:
        while time.monotonic() < end:
            action = rng.choice(list(self.actions)) if self._attack and rng.random() < 0.5 else ""
            try:
                if action:
                    self.actions[action](rng, found)
                else:
                    self._small(rng, found)
                found.sent[action or "small"] += 1
            except grpc.RpcError as error:
                found.wrong.append(f"{action or 'small'}: {error.code()} {error.details()}")

    def _small(self, rng: random.Random, found: Found) -> None:
        i, protocol = rng.randrange(len(QUESTIONS)), rng.choices(("Sample", "Decode"), (3, 1))[0]
        started = time.perf_counter()
        answer = self._answer(protocol, i)
        found.seconds[protocol].append(time.perf_counter() - started)
        if answer != self._alone[protocol, i]:
            found.wrong.append(f"{QUESTIONS[i]!r}: {answer!r} is not {self._alone[protocol, i]!r}")

    def _answer(self, protocol: str, i: int) -> tuple[str, list[int]]:
        """The answer to small request `i`: its text, and its tokens by our own protocol.

        By that protocol, odd requests are sampled at temperature 1: the uid decides the draw.
        """
        if protocol == "Sample":
            (answer,) = self.client.responses(
                prompt=QUESTIONS[i], max_tokens=SMALL, uid=i, temperature=float(i % 2)
            )
            return answer["text"], answer["tokens"]
        parts = self._decode(decode_request(QUESTIONS[i], SMALL))
        return "".join(part.stream_content.samples[0].text for part in parts), []

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
                call = self._decode(decode_request(request["prompt"], RESPONSE))
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
        if (answer := self._long()) != self._long_alone:
            found.wrong.append(f"the longest prompt: {answer!r} is not {self._long_alone!r}")

    def _long(self) -> list[list[int]]:
        prompt = [65 + i % 26 for i in range(PROMPT)]
        answers = self.client.responses(tokens=prompt, num_samples=4, uid=0)
        return [answer["tokens"] for answer in answers]


def decode_request(prompt: str, max_tokens: int) -> jetstream_pb2.DecodeRequest:
    """A request of JetStream's protocol."""
    text = jetstream_pb2.DecodeRequest.TextContent(text=prompt)
    return jetstream_pb2.DecodeRequest(text_content=text, max_tokens=max_tokens)


# -- the server ---------------------------------------------------------------------------------


def resident(pid: int) -> int:
    """Bytes of memory in which a process is."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


def address_of(process: subprocess.Popen, log: pathlib.Path) -> str:
    """Where a server answers, once it says so. RuntimeError if it ends before."""
    while not (found := re.search(r" on (\S+:\d+),$", log.read_text(), re.MULTILINE)):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    return found[1]


def measure(seconds: float, slice_seconds: float, log: pathlib.Path) -> tuple[Found, Found]:
    """Measurements in peace and under attack, in slices by turns; `seconds` of attack in total.

    RuntimeError if the server does not end in order.
    """
    peace, attack = Found(), Found()
    with running(["scripts/serve.py", *MODEL, "--port=0"], log) as process:
        with contextlib.closing(Attackers(address_of(process, log))) as attackers:
            for hostile in (True, False):
                attackers.run(min(seconds, WARM_SECONDS), Found(), attack=hostile, seed=-1)
            for number in range(max(round(seconds / slice_seconds), 2)):
                for found, length in ((peace, slice_seconds / 2), (attack, slice_seconds)):
                    attackers.run(length, found, attack=found is attack, seed=number)
                    found.memory.append(resident(process.pid))
    if process.returncode != 0:
        raise RuntimeError(f"the server ended with exit code {process.returncode}")
    return peace, attack


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of attack in all")
    parser.add_argument("--slice", type=float, default=20.0, help="seconds between changes")
    parser.add_argument("--most", type=float, default=2.0, help="p99 under attack over in peace")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        slices = min(options.slice, options.seconds)
        peace, attack = measure(options.seconds, slices, pathlib.Path(folder, "server.log"))
    for kind, found in (("peace", peace), ("attack", attack)):
        for protocol, seconds in found.seconds.items():
            print(
                f"{kind:6} {protocol}: {len(seconds)} small requests, median "
                f"{1e3 * statistics.median(seconds):.1f} ms, p99 {1e3 * found.p99(protocol):.1f} ms"
            )
        print(
            f"resident memory after {kind}: growth {100 * found.growth():+.2f} %; MiB:",
            *(round(size / 2**20) for size in found.memory),
        )
    print("sent under attack:", ", ".join(f"{n} {kind}" for kind, n in attack.sent.items()))
    ratio = max(attack.p99(protocol) / peace.p99(protocol) for protocol in peace.seconds)
    print(f"p99 under attack over p99 in peace: {ratio:.2f} (at most {options.most:g})")
    wrong = peace.wrong + attack.wrong
    print(f"wrong answers: {len(wrong)}", *wrong[:10], sep="\n  ")
    flat = attack.growth() <= max(MEMORY, peace.growth())
    return 0 if ratio <= options.most and flat and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
