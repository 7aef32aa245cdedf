"""Groups per second through the task buffers of workers, and CPU-seconds of a group, beside a peer.

python benchmarks/queues.py                                     # ours alone
python benchmarks/queues.py --peer-python=/tmp/tq_venv/bin/python
python benchmarks/queues.py --cells "1 x 4,000:4" --seconds=3   # a quick look

A group is samples with tokens and log-probs (peers/groups.py): 8 of uneven lengths with 200 tokens
in the mean, 8 of 4,000, or a single one. A client leases a prompt of a task buffer and submits its
group. Then it runs a second task on a group that any client has submitted: it leases it, reads its
tokens and log-probs, and submits a score for each response, upon which the task buffer frees the
group. Each task buffer is a process, as a trainer is; clients are threads of up to 16 processes,
and each asks the task buffers in turn. Versions and margins go with what is submitted.

The peer (benchmarks/peers/queue_peer.py, in an environment of its own) is TransferQueue, with a
controller and storage units as processes: a client puts a group, a second task claims one
(get_meta), reads it (get_data) and frees it (clear_samples).

Prints the table of docs/peers.md, a row per cell and side: groups per second, CPU-ms of a group in
all processes, in the servers and in the busiest of them, milliseconds of a client's cycle (median,
99th percentile), MiB of the servers and of all processes at their peak. Then a line per goal for 64
clients, and exit code 1 if one is missed. All processes share this machine: with few cores rates
say what a group costs, not how far servers scale.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from peers.groups import SHAPES, Shape
from peers.paced import peak_resident_gb

from distflow_jax.batch import Prompt
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.plan import Unit
from distflow_jax.dag.planner import plan
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import REASONS, Episode
from distflow_jax.layout import Layout
from distflow_jax.rollout.requests import GroupRequest, Response, SamplingParams
from distflow_jax.rollout.response_checks import ResponseLimits
from distflow_jax.stream.border import Border
from distflow_jax.stream.frames.frames import Frame, samples_frame, work_of
from distflow_jax.stream.frames.node_frames import (
    NodeResult,
    read_result,
    result_frame,
    task_frame,
    work_of_task,
)
from distflow_jax.stream.links.buffer_service import QUICK, BufferService
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import NodeTask
from distflow_jax.stream.wire.wire_client import WireClient
from distflow_jax.stream.wire.wire_server import WireServer

PEER, PEER_NAME = pathlib.Path(__file__).parent / "peers" / "queue_peer.py", "TransferQueue"
MOST_PROCESSES = 16
TOKEN = b"a token of thirty-two bytes or so"
RUN = "benchmark"
NODE, TASK, STOP = "rollout", "reward", 50_000
WARM_SECONDS = 1.0
START_SECONDS = 180.0
IDLE_SECONDS = 0.001  # between two questions for a second task where none is there
CELLS = ("8 x 200:1", "8 x 200:64", "8 x 4,000:4", "1 x 200:1", "1 x 200:16", "1 x 4,000:4")
GOAL_CLIENTS, GOAL_RATE, GOAL_CPU, GOAL_BUSIEST = 64, 5.0, 0.2, 0.35


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--buffers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--cells", nargs="+", default=CELLS, help="samples x tokens:clients")
    parser.add_argument("--seconds", type=float, default=6.0, help="that are measured, per cell")
    parser.add_argument("--json", help="file for the cells")
    parser.add_argument("--peer-python", help="Python of the peer's environment; default: no peer")
    found = parser.parse_args()
    for cell in found.cells:
        shape, _, clients = cell.partition(":")
        if shape not in SHAPES or not clients.isdecimal():
            parser.error(f"--cells {cell!r}: shape:clients with a shape of {', '.join(SHAPES)}")
    return found


def second_task() -> Unit:
    """The node that clients run on a group that is there."""
    nodes = [
        Node(NODE, "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"], ["response", "logp"]),
        Node(TASK, "REWARD", "COMPUTE", [NODE], ["response", "logp"], ["score"]),
    ]
    host = dict.fromkeys(("ROLLOUT", "REWARD"), Layout("host"))
    units = plan(Graph("queue", nodes), host, ("uid", "prompt")).units
    return next(unit for unit in units if unit.name == TASK)


# -- a task buffer, as a process ------------------------------------------------------------------


def run_buffer(pipe: Connection, place: int, buffers: int, waiting: int, shape: Shape) -> None:
    """Serves groups until the pipe says close; sends [groups, CPU-seconds, peak GiB]."""
    lock = threading.Condition()
    rule = Rule(groups=1 << 30, max_staleness=1)
    buffer = TaskBuffer(
        rule, exact=False, version=0, lease_seconds=60.0, max_tries=3, served=[TASK]
    )
    requests, unit = SampleRequests(buffer, lock), second_task()
    answers = BufferService(
        requests, lock, {}, {"attempt": RUN}, border=Border(ResponseLimits(1 << 17, [STOP]))
    )
    server = WireServer("127.0.0.1:0", TOKEN, answers.methods(), quick=QUICK)
    prompt, freed, counter = np.arange(64, dtype=np.int32), 0, place

    def submit() -> None:
        nonlocal counter
        asked = Prompt(counter, counter, prompt, "", "", None, {})
        sampling = SamplingParams(shape.samples, shape.most)
        requests.begin((counter, NODE), GroupRequest(asked, sampling, turn=1), Progress())
        counter += buffers

    def hand_over(number: int, episodes: list[Episode]) -> None:
        responses = [episode.response for episode in episodes]
        columns = [[r.tokens for r in responses], [r.logp for r in responses]]

        def free(result: NodeResult) -> None:
            nonlocal freed
            freed += len(result.values[0]) == shape.samples
            with lock:
                buffer.forget([number])
            submit()

        key = (number, TASK)
        content = task_frame(key, unit, columns)
        tokens = [len(response.tokens) for response in responses]
        read = functools.partial(read_result, unit=unit, lengths=tokens)
        with lock:
            buffer.begin(NodeTask(key=key, content=content, read=read, then=free))

    for _ in range(waiting):
        submit()
    pipe.send(server.port)
    begun = 0, 0.0
    while True:
        with lock:
            lock.wait_for(lambda: requests.has_news, 0.05)
        for (number, _), episodes, _ in requests.take_complete():
            hand_over(number, episodes)
        if pipe.poll():
            word = pipe.recv()
            if word == "close":
                break
            if word == "begin":
                begun = freed, time.process_time()
            else:
                spent = time.process_time() - begun[1]
                pipe.send([freed - begun[0], spent, peak_resident_gb()])
    server.close()


# -- clients, as threads of a process -------------------------------------------------------------


def run_clients(pipe: Connection, addresses: list[str], names: list[str], shape: Shape) -> None:
    """Puts and reads groups until the pipe says stop; sends [seconds of cycles, CPU-seconds, peak
    GiB]."""
    cycles: list[tuple[float, float]] = []
    over, unit = threading.Event(), second_task()
    inputs = {TASK: [(edge.source, edge.field) for edge in unit.inputs]}

    def run_second(client: WireClient) -> None:
        facts = {"attempt": RUN, "nodes": [TASK]}
        while not over.is_set():
            asked = Frame({**facts, "capacity": 1}).to_bytes()
            answer = Frame.of_bytes(client.call("lease_node", asked, 60))
            if "task" not in answer.facts:
                time.sleep(IDLE_SECONDS)
                continue
            work = work_of_task(answer, inputs)
            tokens, logps = work.values
            score = [len(t) + float(p[-1]) for t, p in zip(tokens, logps, strict=True)]
            found = result_frame(work.key, unit, [np.array(score, np.float32)], {})
            client.call("submit_node", found.joined(facts).to_bytes(), 60)
            return

    def client(number: int, name: str) -> None:
        draw = np.random.default_rng(number)
        bodies = [responses(draw, shape) for _ in range(16)]
        clients = [WireClient(address, TOKEN, name) for address in addresses]
        turn = number
        while not over.is_set():
            began = time.monotonic()
            client = clients[turn % len(clients)]
            turn += 1
            facts = {"attempt": RUN, "version": 0, "capacity": 1}
            answer = client.call("lease", Frame(facts).to_bytes(), 60)
            for key, request, _ in work_of(Frame.of_bytes(answer)):
                found = {key: answered(request, bodies[turn % len(bodies)])}
                facts = {"attempt": RUN, "spent": [0.0] * 7, "goes_on": False}
                client.call("submit", samples_frame(facts, found).to_bytes(), 60)
                run_second(client)
                cycles.append((time.monotonic(), time.monotonic() - began))
        for client in clients:
            client.close()

    threads = [
        threading.Thread(target=client, args=(hash(name) & 0xFFFF, name), daemon=True)
        for name in names
    ]
    for thread in threads:
        thread.start()
    report(pipe, cycles, over.set)
    for thread in threads:
        thread.join(70)


def report(pipe: Connection, cycles: list[tuple[float, float]], stop: Callable[[], Any]) -> None:
    """Waits for "begin" and "end", and sends what happened between them."""
    pipe.send("ready")
    pipe.recv()
    since, cpu = time.monotonic(), time.process_time()
    pipe.recv()
    until, cpu = time.monotonic(), time.process_time() - cpu
    found = [took for at, took in list(cycles) if since <= at <= until]
    pipe.send([found, cpu, peak_resident_gb()])
    stop()


def responses(draw: np.random.Generator, shape: Shape) -> list[tuple[np.ndarray, ...]]:
    """(tokens, log-probs, margins, versions) of a group's responses, [T] each."""
    return [
        (
            np.append(draw.integers(0, STOP, n - 1), STOP).astype(np.int32),
            -draw.random(n, np.float32),
            draw.random(n, np.float32),
            np.zeros(n, np.int32),
        )
        for n in shape.lengths(draw)
    ]


def answered(request: GroupRequest, body: list[tuple[np.ndarray, ...]]) -> Progress:
    """A request with whole responses."""
    found = {}
    for sample, (tokens, logp, margin, version) in enumerate(body):
        response = Response(request.prompt, sample, tokens, logp, margin, True, version)
        mask = np.ones(len(tokens), bool)
        found[sample] = Episode(response, mask, 0.0, 1, REASONS[0], {})
    return Progress(found)


# -- cells ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def processes(target: Callable[..., None], tuples: list[tuple]) -> Iterator[list[Connection]]:
    """Pipes of processes that run target(pipe, *arguments)."""
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    for values in tuples:
        ours, theirs = context.Pipe()
        started.append(context.Process(target=target, args=(theirs, *values), daemon=True))
        started[-1].start()
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for process in started:
            process.join(5)
            process.kill()


def received(pipe: Connection) -> Any:
    """The next message of a process."""
    if not pipe.poll(START_SECONDS):
        raise RuntimeError("a process of the benchmark does not answer; see its messages above")
    return pipe.recv()


def measure(name: str, buffers: int, clients: int, seconds: float) -> dict[str, Any]:
    """One cell of ours, with groups of a shape of SHAPES."""
    waiting, shape = max(8, 4 * clients // buffers), SHAPES[name]
    of_buffers = [(i, buffers, waiting, shape) for i in range(buffers)]
    with processes(run_buffer, of_buffers) as servers:
        addresses = [f"127.0.0.1:{received(pipe)}" for pipe in servers]
        names, count = [f"client {i}" for i in range(clients)], min(clients, MOST_PROCESSES)
        of_clients = [(addresses, names[i::count], shape) for i in range(count)]
        with processes(run_clients, of_clients) as pipes:
            for pipe in pipes:
                received(pipe)
            time.sleep(WARM_SECONDS)
            for pipe in (*servers, *pipes):
                pipe.send("begin")
            began = time.monotonic()
            time.sleep(seconds)
            for pipe in (*servers, *pipes):
                pipe.send("end")
            took = time.monotonic() - began
            served = [received(pipe) for pipe in servers]
            asked = [received(pipe) for pipe in pipes]
        for pipe in servers:  # when no client calls any more
            pipe.send("close")
    side = f"{buffers} task buffer{'s' if buffers > 1 else ''}"
    return cell((name, side, clients), took, sum(n for n, *_ in served), served, asked)


def cell(
    named: tuple[str, str, int],
    seconds: float,
    groups: int,
    servers: list[Any],
    clients_of: list[Any],
) -> dict[str, Any]:
    """Numbers of one cell, `named` by shape, side and clients; `servers` and `clients_of`: (groups
    or cycles, CPU-seconds, peak GiB) of each process."""
    cycles = sorted(1e3 * took for found, *_ in clients_of for took in found)
    cpu = [seconds for _, seconds, _ in servers]
    memory = [1024 * sum(gb for *_, gb in some) for some in (servers, [*servers, *clients_of])]
    per_group = 1e3 / max(groups, 1)
    return {
        **dict(zip(("group", "side", "clients"), named, strict=True)),
        "groups/s": round(groups / seconds, 1),
        "CPU-ms": round(per_group * (sum(cpu) + sum(c for _, c, _ in clients_of)), 2),
        "of servers": round(per_group * sum(cpu), 2),
        "of the busiest": round(per_group * max(cpu), 2),
        "ms, median": round(statistics.median(cycles), 1) if cycles else None,
        "99 % below": round(cycles[int(0.99 * (len(cycles) - 1))], 1) if cycles else None,
        "MiB of servers": round(memory[0]),
        "MiB of all": round(memory[1]),
    }


def run_peer(python: str, *flags: str) -> dict[str, Any]:
    """The last line that the peer prints."""
    done = subprocess.run(
        [python, str(PEER), *flags], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_peer(
    python: str, name: str, clients: int, seconds: float, *flags: str
) -> dict[str, Any]:
    """A cell of the peer."""
    given = (f"--shape={name}", f"--clients={clients}", f"--seconds={seconds}", *flags)
    found = run_peer(python, *given)
    side = f"{PEER_NAME}, defaults" if flags else PEER_NAME
    keys = ("seconds", "groups", "servers", "clients")
    return cell((name, side, clients), *(found[key] for key in keys))


def goals(cells: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """(sentence, whether it is met) for each goal that the cells of 64 clients decide."""
    at = {one["side"]: one for one in cells if one["clients"] == GOAL_CLIENTS}
    at.pop(f"{PEER_NAME}, defaults", None)
    peer, found = at.pop(PEER_NAME, None), []
    for name, one in at.items() if peer else ():
        rate = one["groups/s"] / peer["groups/s"]
        found.append((f"{name}: {rate:.2f} times the peer's groups per second", rate >= GOAL_RATE))
        cpu = one["CPU-ms"] / peer["CPU-ms"]
        found.append((f"{name}: {cpu:.3f} of the peer's CPU-seconds per group", cpu <= GOAL_CPU))
    few, many = (at.get(f"{n} task buffer{s}") for n, s in ((1, ""), (4, "s")))
    if few and many:
        busy = many["of the busiest"] / few["of the busiest"]
        text = f"busiest process of 4 task buffers: {busy:.3f} of that of 1 task buffer, per group"
        found.append((text, busy <= GOAL_BUSIEST))
    return found


def main() -> None:
    """Measures all cells and prints them."""
    options, cells = arguments(), []
    for named in options.cells:
        shape, clients = named.partition(":")[0], int(named.partition(":")[2])
        found = [measure(shape, n, clients, options.seconds) for n in options.buffers]
        for flags in ((), ("--defaults",)) if options.peer_python else ():
            given = (options.peer_python, shape, clients, options.seconds, *flags)
            found.append(measure_peer(*given))
        if not cells:
            print(f"| {' | '.join(found[0])} |\n{'|---' * len(found[0])}|")
        for one in found:
            print(f"| {' | '.join(map(str, one.values()))} |", flush=True)
        cells += found
    if options.peer_python:
        taken = run_peer(options.peer_python, "--mixing")["prompts_of_a_group"]
        print(f"\nthe peer's sampler of groups took samples of these prompts for one: {taken}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(cells, indent=1) + "\n")
    decided = goals(cells)
    for text, met in decided:
        print(f"{'met' if met else 'MISSED'}: {text}")
    sys.exit(not all(met for _, met in decided))


if __name__ == "__main__":
    main()
