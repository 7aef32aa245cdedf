"""Workers: seconds until one that joins answers, seconds that weights stop it, and 1 GB of weights.

python benchmarks/workers.py                    # all three parts
python benchmarks/workers.py --parts joins wire
python benchmarks/workers.py --quick            # the smallest form; its numbers mean nothing

joins   configs/tiny.py with one trainer. A worker fills a compilation cache and is killed; others
        join after it, one at a time, with that cache. From the start of its process: until it has
        the weights and its programs, and until the trainer's next step is done, which needs all
        groups of the step.
loads   configs/grpo_smollm2.py with one trainer and one worker. Seconds in which a load of weights
        stops the worker's decoding: it waits for the decode call in flight, and takes the weights.
wire    A pull of weights from another process of this machine, and calls of 1 kB: by the wire
        (sockets with signed frames), by gRPC, and by plain sockets, in turn; the same chunks,
        threads and checksums. The latter two prove nothing. Medians.

Prints a line per measurement; docs/benchmarks.md has the goals.
"""

import argparse
import concurrent.futures
import contextlib
import pathlib
import re
import signal
import socket
import socketserver
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import grpc
import jax
import numpy as np
from command_line import parser_of, write_json
from peers.groups import Processes, received
from peers.paced import clocked
from programs import end, running

from distflow_jax.report.run_writer import read_metrics
from distflow_jax.stream.weight_client import pull_weights
from distflow_jax.stream.weight_store import WeightStore
from distflow_jax.stream.weight_wire import WireWeights, weight_methods
from distflow_jax.stream.wire.calls import Method
from distflow_jax.stream.wire.wire_client import WireClient
from distflow_jax.stream.wire.wire_server import WireServer

PARTS = ("joins", "loads", "wire")
COMMON = (
    "stream.workers=True",
    "stream.max_staleness=1",
    "algorithm.correction=token_tis",
    "eval.dataset=",
    "observe.trackers=()",
)
CALLS, CALL_BYTES = 2000, 1000  # of a measurement of small calls
WAIT_SECONDS = 900.0  # for a step, whatever the machine does
LEASE_SECONDS, SAVE_SECONDS = 2.0, 0.5  # after which a killed worker's groups are for others
SKIPPED_STEPS, STEPS = 2, 6  # of `loads`: those in which programs compile, and those timed
TENSOR, TENSORS = (2048, 4096), 29  # of float32: 973 MB
TOKEN = b"a token of thirty-two bytes or so"


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="of joins, and of pulls")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="file for the numbers")
    found = parser.parse_args()
    if found.quick:
        found.rounds = 1
    return found


# -- runs -----------------------------------------------------------------------------------------


class Run(contextlib.ExitStack):
    """A run with one trainer in a new folder; its processes end with the block."""

    def __init__(self, config: str, folder: pathlib.Path, settings: Sequence[str]):
        super().__init__()
        cache = f"compilation_cache={folder.parent / 'programs'}"
        flags = [f"--config.{flag}" for flag in (*COMMON, *settings, cache)]
        self._common = [f"--config=configs/{config}", *flags]
        self.folder = folder
        launch = ["scripts/launch_local.py", "--processes=1", "--", "scripts/train.py"]
        self.trainers = self._start("trainers", [*launch, f"--workdir={folder}"])

    def join(self, name: str) -> subprocess.Popen:
        """Starts a worker."""
        return self._start(name, ["scripts/worker.py", f"--join={self.folder}"])

    def wait_for_trainers(self) -> None:
        """Waits until they answer workers."""
        self.wait(lambda: (self.folder / "task_buffers.json").exists())

    def log(self, name: str) -> str:
        """Output of a process so far."""
        return (self.folder.parent / f"{name}.log").read_text()

    def rows(self) -> list[dict[str, float]]:
        """Rows of the steps that are done."""
        path = self.folder / "metrics.jsonl"
        return [row for row in read_metrics(path) if row["step"]] if path.exists() else []

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits until something is true while the trainers run."""
        end_ = time.monotonic() + WAIT_SECONDS
        while not until():
            if time.monotonic() > end_ or self.trainers.poll() is not None:
                raise RuntimeError(f"the run does not go on:\n{self.log('trainers')[-3000:]}")
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        """Waits until the trainers have trained on all that a killed worker brought."""
        done, since = len(self.rows()), time.monotonic()
        while time.monotonic() < since + 2 * LEASE_SECONDS:
            time.sleep(0.1)
            if len(self.rows()) > done:
                done, since = len(self.rows()), time.monotonic()

    def _start(self, name: str, command: list[str]) -> subprocess.Popen:
        log = self.folder.parent / f"{name}.log"
        return self.enter_context(running([*command, *self._common], log))


# -- parts ----------------------------------------------------------------------------------------


def measure_joins(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Seconds of workers that join, the first one with an empty cache."""
    settings = ["training.steps=1000000", "checkpoint.every=1000000"]
    settings += [f"stream.lease_seconds={LEASE_SECONDS:g}", f"stream.save_seconds={SAVE_SECONDS:g}"]
    found: dict[str, Any] = {"ready": [], "first_step": []}
    with Run("tiny.py", folder / "joins", settings) as run:
        for number in range(options.rounds + 1):
            name = f"worker{number}"
            run.wait_for_trainers()
            done, began = len(run.rows()), time.monotonic()
            process = run.join(name)
            run.wait(lambda name=name: "ready as " in run.log(name))
            ready = time.monotonic() - began
            run.wait(lambda done=done: len(run.rows()) > done)
            first_step = time.monotonic() - began
            end(process, signal.SIGKILL)
            run.wait_until_idle()
            print(
                f"joins | {'a warm' if number else 'an empty'} cache | ready {ready:.1f} s | "
                f"first step {first_step:.1f} s",
                flush=True,
            )
            if number:
                found["ready"].append(ready)
                found["first_step"].append(first_step)
    return found


def measure_loads(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Seconds of a load of weights, as a share of a step."""
    config = "tiny.py" if options.quick else "grpo_smollm2.py"
    count = SKIPPED_STEPS + (1 if options.quick else STEPS)
    settings = (f"training.steps={count}", "checkpoint.every=1000000")
    with Run(config, folder / "loads", settings) as run:
        run.wait_for_trainers()
        worker = run.join("worker")
        if run.trainers.wait(count * WAIT_SECONDS) or worker.wait(60):
            raise RuntimeError(run.log("trainers")[-3000:] + run.log("worker")[-3000:])
        steps = [row["perf/time_per_step"] for row in run.rows()[SKIPPED_STEPS:]]
        told = re.search(r"(\d+) loads of weights stopped it for (\S+) s", run.log("worker"))
    count, step = int(told[1]), statistics.median(steps)
    one = float(told[2]) / max(count, 1)
    print(
        f"loads | {config} | {count} loads of {1e3 * one:.1f} ms | step {step:.2f} s | "
        f"{100 * one / step:.2f} % of a step"
    )
    return {"loads": count, "load_seconds": one, "step_seconds": step}


def measure_wire(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Seconds and CPU-seconds of a pull, by transport."""
    count = 1 if options.quick else TENSORS
    size = count * 4 * int(np.prod(TENSOR)) / 1e6
    with Processes() as started:
        server = started.start(run_store, count)
        ports = received(server)
        found: dict[str, dict[str, list[float]]] = {
            name: {transport: [] for transport in ports}
            for name in ("seconds", "cpu_seconds", "call_cpu_ms")
        }
        for number in range(options.rounds + 1):  # the first one is not counted
            for name, port in ports.items():
                took, spent = timed(server, pull, name, port, count)
                _, calling = timed(server, call_often, name, port)
                if number or options.quick:
                    found["seconds"][name].append(took)
                    found["cpu_seconds"][name].append(spent)
                    found["call_cpu_ms"][name].append(1e3 * calling / CALLS)
    for name in ports:
        took, spent, call = (statistics.median(of[name]) for of in found.values())
        print(
            f"wire | {name} | {size:.0f} MB | {took:.2f} s | {size / took:.0f} MB/s | "
            f"{spent:.2f} CPU-s | {[round(one, 2) for one in found['seconds'][name]]} | "
            f"a call {call:.3f} CPU-ms"
        )
    return {"megabytes": size} | found


def timed(server: Connection, function: Callable, *given: Any) -> tuple[float, float]:
    """(seconds, CPU-seconds of both processes) of a call."""
    server.send("cpu")
    before = received(server)
    _, took, cpu = clocked(function, *given)
    server.send("cpu")
    return took, received(server) - before + cpu


# -- transports -----------------------------------------------------------------------------------

ECHO = "echo"
_GRPC_OPTIONS = [("grpc.max_receive_message_length", -1)]
_HEAD = struct.Struct(">QQ")  # bytes of the method's name, and of the rest
_SERVERS: list[grpc.Server] = []


def serve_by_sockets(methods: Mapping[str, Method]) -> int:
    """Answers calls on connections of their own, each with a thread; returns the port."""

    class Handler(socketserver.StreamRequestHandler):
        disable_nagle_algorithm = True

        def handle(self) -> None:
            while head := self.rfile.read(_HEAD.size):
                name, size = _HEAD.unpack(head)
                method = methods[self.rfile.read(name).decode()]
                answer = method("", self.rfile.read(size))
                self.wfile.write(_HEAD.pack(0, len(answer)))
                self.wfile.write(answer)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


class SocketSource:
    """Calls what serve_by_sockets answers, as WireClient calls a WireServer."""

    def __init__(self, address: str):
        self.address = address
        self._idle: list[BinaryIO] = []

    def call(self, method: str, payload: bytes, seconds: float) -> bytes:
        """The answer to one call."""
        file = self._idle.pop() if self._idle else self._connect()
        name = method.encode()
        file.write(_HEAD.pack(len(name), len(payload)) + name + payload)
        file.flush()
        _, size = _HEAD.unpack(file.read(_HEAD.size))
        answer = file.read(size)
        self._idle.append(file)
        return answer

    def close(self) -> None:
        """Ends the connections."""
        for file in self._idle:
            file.close()

    def _connect(self) -> BinaryIO:
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection.makefile("rwb")  # which keeps it open


def serve_by_grpc(methods: Mapping[str, Method]) -> int:
    """Answers calls over gRPC; returns the port."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            method = methods[details.method.rpartition("/")[2]]
            return grpc.unary_unary_rpc_method_handler(lambda payload, _: method("", payload))

    pool = concurrent.futures.ThreadPoolExecutor(8)
    server = grpc.server(pool, handlers=[Handler()], options=_GRPC_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _SERVERS.append(server)  # which ends without a reference
    return port


class GrpcSource:
    """Calls what serve_by_grpc answers, as WireClient calls a WireServer."""

    def __init__(self, address: str):
        self.address, self._channel = address, grpc.insecure_channel(address, _GRPC_OPTIONS)

    def call(self, method: str, payload: bytes, seconds: float) -> bytes:
        """The answer to one call."""
        return self._channel.unary_unary(f"/Benchmark/{method}")(payload, timeout=seconds)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def run_store(pipe: Connection, count: int) -> None:
    """Serves so many tensors by all transports; sends {transport: port}, then CPU-seconds."""
    draw, store = np.random.default_rng(0), WeightStore("benchmark")
    tensors = (draw.random(TENSOR, np.float32) for _ in range(count))
    cpu = jax.devices("cpu")[0]
    store.put(0, {f"t{i}": jax.device_put(x, cpu) for i, x in enumerate(tensors)})
    methods = {**weight_methods(store), ECHO: lambda _, payload: payload}
    wire = WireServer("127.0.0.1:0", TOKEN, methods, quick=[ECHO])
    ports = {"gRPC": serve_by_grpc(methods), "sockets": serve_by_sockets(methods)}
    pipe.send({"wire": wire.port} | ports)
    while pipe.recv():
        pipe.send(time.process_time())


def source(transport: str, port: int) -> Any:
    """Caller of a server, by its transport."""
    address = f"127.0.0.1:{port}"
    if transport == "wire":
        return WireClient(address, TOKEN, "pull")
    return {"gRPC": GrpcSource, "sockets": SocketSource}[transport](address)


def pull(transport: str, port: int, count: int) -> None:
    """Pulls all tensors once."""
    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    shape = jax.ShapeDtypeStruct(TENSOR, np.float32, sharding=here)
    target = {f"t{i}": shape for i in range(count)}
    with contextlib.closing(source(transport, port)) as one:
        params = pull_weights([WireWeights(one)], 0, target, WAIT_SECONDS)
    jax.tree.map(lambda x: x.delete(), params)


def call_often(transport: str, port: int) -> None:
    """Makes small calls, one after the other."""
    with contextlib.closing(source(transport, port)) as one:
        for _ in range(CALLS):
            one.call(ECHO, bytes(CALL_BYTES), WAIT_SECONDS)


# -- all ------------------------------------------------------------------------------------------


def main() -> None:
    options = arguments()
    measures = {"joins": measure_joins, "loads": measure_loads, "wire": measure_wire}
    found = {}
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="workers-") as folder:
            found[part] = measures[part](options, pathlib.Path(folder))
    write_json(options.json, found)


if __name__ == "__main__":
    main()
