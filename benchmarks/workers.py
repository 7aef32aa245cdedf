"""Workers: seconds until one that joins answers, seconds that weights stop it, and 1 GB of weights.

python benchmarks/workers.py                    # all three parts
python benchmarks/workers.py --parts joins wire
python benchmarks/workers.py --quick            # the smallest form; its numbers mean nothing

joins   configs/tiny.py with one trainer. A worker fills a compilation cache and is killed; others
        join after it, one at a time, with that cache. From the start of its process: until it has
        the weights and its programs, and until the trainer's next step is done, which needs all
        groups of the step. Goal: a first group, so a step at most, within 30 s.
loads   configs/grpo_smollm2.py with one trainer and one worker. Seconds in which a load of weights
        stops the worker's decoding: it waits for the decode call in flight, and takes the weights.
        Goal: below 5 % of the median step.
wire    A pull of weights from another process of this machine, and calls of 1 kB: by the wire
        (sockets with signed frames), by gRPC, and by plain sockets, in turn; the same chunks,
        threads and checksums. The latter two prove nothing. Medians. Goals: the wire, with its
        proofs, takes at most a quarter longer for a pull than gRPC without any, and less for
        small calls.

Prints a line per measurement, and exits with 1 if a goal is missed, but not with --quick.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import grpc
import jax
import numpy as np

from distflow_jax.report.run_writer import read_metrics
from distflow_jax.stream.weight_client import pull_weights
from distflow_jax.stream.weight_store import WeightStore
from distflow_jax.stream.weight_wire import WireWeights, weight_methods
from distflow_jax.stream.wire.calls import Method
from distflow_jax.stream.wire.wire_client import WireClient
from distflow_jax.stream.wire.wire_server import WireServer

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = ("joins", "loads", "wire")
COMMON = (
    "stream.workers=True",
    "stream.max_staleness=1",
    "algorithm.correction=token_tis",
    "eval.dataset=",
    "observe.trackers=()",
)
JOIN_SECONDS, LOAD_SHARE, LEAST_PULL = 30.0, 0.05, 0.8  # goals
CALLS, CALL_BYTES = 2000, 1000  # of a measurement of small calls
WAIT_SECONDS = 900.0  # for a step, whatever the machine does
LEASE_SECONDS, SAVE_SECONDS = 2.0, 0.5  # after which a killed worker's groups are for others
SKIPPED_STEPS = 2  # of `loads`, in which programs compile
TENSOR = (2048, 4096)  # of float32: 32 MiB
TOKEN = b"a token of thirty-two bytes or so"


def arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="of joins, and of pulls")
    parser.add_argument("--steps", type=int, default=8, help="of loads")
    parser.add_argument("--megabytes", type=int, default=1000, help="of a pull")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="file for the numbers")
    found = parser.parse_args()
    if found.quick:
        found.rounds, found.steps, found.megabytes = 1, SKIPPED_STEPS + 1, 64
    return found


# -- runs -----------------------------------------------------------------------------------------


class Run:
    """A run with one trainer in a new folder; its processes end with the block."""

    def __init__(self, config: str, folder: pathlib.Path, settings: Sequence[str]):
        cache = f"compilation_cache={folder.parent / 'programs'}"
        flags = [f"--config.{flag}" for flag in (*COMMON, *settings, cache)]
        self._common = [f"--config=configs/{config}", *flags]
        self.folder, self._processes = folder, []
        launch = ["scripts/launch_local.py", "--processes=1", "--", "scripts/train.py"]
        self.trainers = self._start("trainers", [*launch, f"--workdir={folder}"])

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:  # the launcher passes it on
            end(process, signal.SIGTERM)

    def join(self, name: str) -> subprocess.Popen:
        """Starts a worker, once the trainers answer."""
        self.wait(lambda: (self.folder / "task_buffers.json").exists())
        return self._start(name, ["scripts/worker.py", f"--join={self.folder}"])

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

    def _start(self, name: str, command: list[str]) -> subprocess.Popen:
        # it has precedence over the config's, and programs are to be compiled once here
        found = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        with (self.folder.parent / f"{name}.log").open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *command, *self._common],
                cwd=ROOT,
                env={**found, "JAX_PLATFORMS": "cpu"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


def end(process: subprocess.Popen, number: int) -> None:
    """Ends a process by a signal, and waits for it."""
    if process.poll() is None:
        os.killpg(process.pid, number)
    try:
        process.wait(180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- parts ----------------------------------------------------------------------------------------


def measure_joins(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Seconds of workers that join, the first one with an empty cache."""
    settings = ["training.steps=1000000", "checkpoint.every=1000000"]
    settings += [f"stream.lease_seconds={LEASE_SECONDS:g}", f"stream.save_seconds={SAVE_SECONDS:g}"]
    found: dict[str, Any] = {"ready": [], "first_step": []}
    with Run("tiny.py", folder / "joins", settings) as run:
        for number in range(options.rounds + 1):
            name = f"worker{number}"
            run.wait(lambda: (run.folder / "task_buffers.json").exists())
            done, began = len(run.rows()), time.monotonic()
            process = run.join(name)
            run.wait(lambda name=name: "ready as " in run.log(name))
            ready = time.monotonic() - began
            run.wait(lambda done=done: len(run.rows()) > done)
            first_step, cpu = time.monotonic() - began, cpu_seconds(process)
            end(process, signal.SIGKILL)
            await_standstill(run)
            print(
                f"joins | {'a warm' if number else 'an empty'} cache | ready {ready:.1f} s | "
                f"first step {first_step:.1f} s | {cpu:.1f} CPU-s",
                flush=True,
            )
            if number:
                found["ready"].append(ready)
                found["first_step"].append(first_step)
    return found | {"passed": max(found["first_step"]) <= JOIN_SECONDS}


def cpu_seconds(process: subprocess.Popen) -> float:
    """CPU-seconds of a process that runs, from Linux."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def await_standstill(run: Run) -> None:
    """Waits until the trainers have trained on all that a killed worker brought."""
    done, since = len(run.rows()), time.monotonic()
    while time.monotonic() < since + 2 * LEASE_SECONDS:
        time.sleep(0.1)
        if len(run.rows()) > done:
            done, since = len(run.rows()), time.monotonic()


def measure_loads(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Seconds of a load of weights, as a share of a step."""
    config = "tiny.py" if options.quick else "grpo_smollm2.py"
    settings = (f"training.steps={options.steps}", "checkpoint.every=1000000")
    with Run(config, folder / "loads", settings) as run:
        worker = run.join("worker")
        if run.trainers.wait(options.steps * WAIT_SECONDS) or worker.wait(60):
            raise RuntimeError(run.log("trainers")[-3000:] + run.log("worker")[-3000:])
        steps = [row["perf/time_per_step"] for row in run.rows()[SKIPPED_STEPS:]]
        told = re.search(r"(\d+) loads of weights stopped it for ([\d.]+) ms", run.log("worker"))
    count, stopped, step = int(told[1]), float(told[2]) / 1e3, statistics.median(steps)
    one = stopped / max(count, 1)
    print(
        f"loads | {config} | {count} loads of {1e3 * one:.1f} ms | step {step:.2f} s | "
        f"{100 * one / step:.2f} % of a step"
    )
    passed = count > 0 and one <= LOAD_SHARE * step
    return {"loads": count, "load_seconds": one, "step_seconds": step, "passed": passed}


def measure_wire(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Seconds and CPU-seconds of a pull, by transport."""
    count = max(1, options.megabytes * 1_000_000 // (4 * int(np.prod(TENSOR))))
    size = count * 4 * int(np.prod(TENSOR)) / 1e6
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=run_store, args=(theirs, count), daemon=True)
    server.start()
    try:
        ports = received(ours)
        seconds: dict[str, list[float]] = {name: [] for name in ports}
        cpu: dict[str, list[float]] = {name: [] for name in ports}
        calls: dict[str, list[float]] = {name: [] for name in ports}
        for number in range(options.rounds + 1):  # the first one is not counted
            for name, port in ports.items():
                took, spent = timed(ours, functools.partial(pull, name, port, count))
                _, calling = timed(ours, functools.partial(call_often, name, port))
                if number or options.quick:
                    seconds[name].append(took)
                    cpu[name].append(spent)
                    calls[name].append(1e3 * calling / CALLS)
    finally:
        server.kill()
        server.join()
    for name in ports:
        took, spent = statistics.median(seconds[name]), statistics.median(cpu[name])
        print(
            f"wire | {name} | {size:.0f} MB | {took:.2f} s | {size / took:.0f} MB/s | "
            f"{spent:.2f} CPU-s | {[round(one, 2) for one in seconds[name]]} | "
            f"a call {statistics.median(calls[name]):.3f} CPU-ms"
        )
    passed = True
    for what, least, found in (("pull", LEAST_PULL, seconds), ("call", 1.0, calls)):
        ratio = statistics.median(found[GRPC]) / statistics.median(found[WIRE])
        passed = passed and ratio >= least
        print(f"wire | {what} | gRPC without proofs takes {ratio:.2f} of it")
    found = {"megabytes": size, "seconds": seconds, "cpu_seconds": cpu, "call_cpu_ms": calls}
    return found | {"passed": passed}


def timed(server: Connection, work: Callable[[], object]) -> tuple[float, float]:
    """(seconds, CPU-seconds of both processes) of some work."""
    server.send("cpu")
    before, began = received(server) + time.process_time(), time.monotonic()
    work()
    took = time.monotonic() - began
    server.send("cpu")
    return took, received(server) + time.process_time() - before


# -- transports -----------------------------------------------------------------------------------

WIRE, GRPC, SOCKETS = "wire", "gRPC", "sockets"
ECHO = "echo"
_GRPC_OPTIONS = [("grpc.max_receive_message_length", -1)]
_HEAD = struct.Struct(">QQ")  # bytes of the method's name, and of the rest


def exactly(connection: socket.socket, count: int) -> bytearray:
    """So many bytes; OSError at the end of the connection."""
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        if not (more := connection.recv_into(view[at:])):
            raise ConnectionError("the connection has ended")
        at += more
    return data


class SocketServer:
    """Answers calls on connections of their own, each with a thread.

    Attributes:
      port: where it listens.
    """

    def __init__(self, methods: Mapping[str, Method]):
        self._methods = methods
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError), connection:
            while True:
                name, size = _HEAD.unpack(exactly(connection, _HEAD.size))
                method = exactly(connection, name).decode()
                answer = self._methods[method]("", bytes(exactly(connection, size)))
                connection.sendall(_HEAD.pack(0, len(answer)))
                connection.sendall(answer)


class SocketSource:
    """Calls a SocketServer, as Caller calls a Server.

    Attributes:
      address: HOST:PORT.
    """

    def __init__(self, address: str):
        self.address, self._idle, self._open = address, [], []

    def call(self, method: str, payload: bytes, seconds: float) -> bytes:
        """The answer to one call; OSError without one."""
        connection = self._idle.pop() if self._idle else self._connect()
        connection.settimeout(seconds)
        name = method.encode()
        connection.sendall(_HEAD.pack(len(name), len(payload)) + name + payload)
        _, size = _HEAD.unpack(exactly(connection, _HEAD.size))
        answer = exactly(connection, size)
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Ends the connections."""
        for connection in self._open:
            connection.close()

    def _connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.append(connection)
        return connection


class GrpcServer(grpc.GenericRpcHandler):
    """Answers calls over gRPC.

    Attributes:
      port: where it listens.
    """

    def __init__(self, methods: Mapping[str, Method]):
        self._methods = methods
        pool = concurrent.futures.ThreadPoolExecutor(8)
        self._server = grpc.server(pool, handlers=[self], options=_GRPC_OPTIONS)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The handler of a call."""
        method = self._methods[details.method.rpartition("/")[2]]
        return grpc.unary_unary_rpc_method_handler(lambda payload, _: method("", payload))


class GrpcSource:
    """Calls a GrpcServer, as Caller calls a Server.

    Attributes:
      address: HOST:PORT.
    """

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
    addresses: dict[str, Any] = {WIRE: WireServer("127.0.0.1:0", TOKEN, methods, quick=[ECHO])}
    addresses |= {GRPC: GrpcServer(methods), SOCKETS: SocketServer(methods)}
    pipe.send({name: one.port for name, one in addresses.items()})
    while pipe.recv():
        pipe.send(time.process_time())


def source(transport: str, port: int) -> Any:
    """Caller of a server, by its transport."""
    address = f"127.0.0.1:{port}"
    if transport == WIRE:
        return WireClient(address, TOKEN, "pull")
    return {GRPC: GrpcSource, SOCKETS: SocketSource}[transport](address)


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


def received(pipe: Connection) -> Any:
    """The next message of the other process."""
    if not pipe.poll(WAIT_SECONDS):
        raise RuntimeError("the process that serves weights does not answer; see its messages")
    return pipe.recv()


# -- all ------------------------------------------------------------------------------------------


def main() -> int:
    """Measures the parts; returns the exit code."""
    options = arguments()
    measures = {"joins": measure_joins, "loads": measure_loads, "wire": measure_wire}
    found = {}
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="workers-") as folder:
            found[part] = measures[part](options, pathlib.Path(folder))
        print(f"{part} | goal {'met' if found[part]['passed'] else 'missed'}", flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if options.quick or all(one["passed"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
