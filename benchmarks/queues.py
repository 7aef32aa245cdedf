"""Groups per second through the task buffers of workers, and CPU-seconds of a group, beside a peer.

python benchmarks/queues.py                                     # ours alone
python benchmarks/queues.py --peer-python=/tmp/tq_venv/bin/python
python benchmarks/queues.py --cells "1 x 4,000:4" --seconds=3   # a quick look

A group is samples with tokens and log-probs (peers/groups.py). A client leases a prompt of a task
buffer and submits its group. Then it runs a second task on a group that any client has submitted:
it leases it, reads its tokens and log-probs, and submits a score for each response, upon which the
task buffer frees the group. Each task buffer is a process, as a trainer is; clients are threads of
up to 16 processes, and each asks the task buffers in turn.

The peer (peers/queue_peer.py, in an environment of its own) is TransferQueue, with a controller and
storage units as processes: a client puts a group, a second task claims one (get_meta), reads it
(get_data) and frees it (clear_samples).

Prints the table of docs/peers.md, a row per cell and side. All processes share this machine: with
few cores rates say what a group costs, not how far servers scale.
"""

import argparse
import functools
import itertools
import json
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from command_line import parser_of, print_header, print_row, write_json
from peers.groups import MOST_PROCESSES, SHAPES, Cycle, Processes, Shape, measured, received, report
from peers.paced import peer_command
from programs import finished

from distflow_jax.batch import Prompt
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.plan import Unit
from distflow_jax.dag.planner import plan
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import REASONS, Episode
from distflow_jax.layout import Layout
from distflow_jax.rollout.requests import GroupRequest, Response, SamplingParams
from distflow_jax.rollout.response_checks import ResponseLimits
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

PEER = "TransferQueue"
TOKEN = b"a token of thirty-two bytes or so"
RUN = "benchmark"
NODE, TASK, STOP = "rollout", "reward", 50_000
IDLE_SECONDS = 0.001  # between two questions for a second task where none is there
CELLS = ("8 x 200:1", "8 x 200:64", "8 x 4,000:4", "1 x 200:1", "1 x 200:16", "1 x 4,000:4")


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
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
    """Serves groups until the process is killed; sends its port, then what it used."""
    lock = threading.Condition()
    rule = Rule(groups=1 << 30, max_staleness=1)
    buffer = TaskBuffer(
        rule, exact=False, version=0, lease_seconds=60.0, max_tries=3, served=[TASK]
    )
    requests, unit = SampleRequests(buffer, lock), second_task()
    answers = BufferService(
        requests, lock, {}, {"attempt": RUN}, limits=ResponseLimits(1 << 17, [STOP])
    )
    server = WireServer("127.0.0.1:0", TOKEN, answers.methods(), quick=QUICK)
    prompt, counters = np.arange(64, dtype=np.int32), itertools.count(place, buffers)

    def submit() -> None:
        counter = next(counters)
        asked = Prompt(counter, counter, prompt, "", "", None, {})
        sampling = SamplingParams(shape.samples, shape.most)
        requests.begin((counter, NODE), GroupRequest(asked, sampling, turn=1), Progress())

    def hand_over(number: int, episodes: list[Episode]) -> None:
        responses = [episode.response for episode in episodes]
        columns = [[r.tokens for r in responses], [r.logp for r in responses]]

        def free(result: NodeResult) -> None:
            assert len(result.values[0]) == shape.samples
            with lock:
                buffer.forget([number])
            submit()

        key = (number, TASK)
        content = task_frame(key, unit, columns)
        tokens = [len(response.tokens) for response in responses]
        read = functools.partial(read_result, unit=unit, lengths=tokens)
        with lock:
            buffer.begin(NodeTask(key=key, content=content, read=read, then=free))

    def serve() -> None:
        while True:
            with lock:
                lock.wait_for(lambda: requests.has_news)
            for (number, _), episodes, _ in requests.take_complete():
                hand_over(number, episodes)

    for _ in range(waiting):
        submit()
    threading.Thread(target=serve, daemon=True).start()
    pipe.send(server.port)
    report(pipe)
    pipe.recv()


# -- clients, as threads of a process -------------------------------------------------------------


def run_clients(pipe: Connection, addresses: list[str], names: list[str], shape: Shape) -> None:
    """Puts and reads groups until the process is killed; sends what it used."""
    cycles: list[Cycle] = []
    unit = second_task()

    def run_second(client: WireClient) -> None:
        facts = {"attempt": RUN, "nodes": [TASK]}
        while True:
            asked = Frame({**facts, "capacity": 1}).to_bytes()
            answer = Frame.of_bytes(client.call("lease_node", asked, 60))
            if "task" not in answer.facts:
                time.sleep(IDLE_SECONDS)
                continue
            work = work_of_task(answer)
            tokens, logps = work.values
            score = [len(t) + float(p[-1]) for t, p in zip(tokens, logps, strict=True)]
            found = result_frame(work.key, unit, [np.array(score, np.float32)], {})
            told = Frame({**found.facts, **facts}, found.arrays)
            client.call("submit_node", told.to_bytes(), 60)
            return

    def client(number: int, name: str) -> None:
        draw = np.random.default_rng(number)
        bodies = [responses(draw, shape) for _ in range(16)]
        clients = [WireClient(address, TOKEN, name) for address in addresses]
        turn = number
        while True:
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

    for name in names:
        number = hash(name) & 0xFFFF
        threading.Thread(target=client, args=(number, name), daemon=True).start()
    pipe.send("ready")
    report(pipe, cycles)
    pipe.recv()


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


def measure(name: str, buffers: int, clients: int, seconds: float) -> dict[str, Any]:
    """One cell of ours, with groups of a shape of SHAPES."""
    waiting, shape = max(8, 4 * clients // buffers), SHAPES[name]
    names, count = [f"client {i}" for i in range(clients)], min(clients, MOST_PROCESSES)
    with Processes() as started:
        servers = [started.start(run_buffer, i, buffers, waiting, shape) for i in range(buffers)]
        addresses = [f"127.0.0.1:{received(pipe)}" for pipe in servers]
        of_clients = [
            started.start(run_clients, addresses, names[i::count], shape) for i in range(count)
        ]
        found = measured(servers, of_clients, seconds)
    side = f"{buffers} task buffer{'s' if buffers > 1 else ''}"
    return cell(name, side, clients, found)


def cell(name: str, side: str, clients: int, found: dict[str, Any]) -> dict[str, Any]:
    """Numbers of one cell; `found`: as of peers.groups.measured."""
    servers, of_clients = found["servers"], found["clients"]
    cycles = sorted(1e3 * took for ended, *_ in of_clients for took in ended)
    cpu = [spent for _, spent, _ in servers]
    memory = [1024 * sum(gb for *_, gb in some) for some in (servers, [*servers, *of_clients])]
    per_group = 1e3 / max(len(cycles), 1)
    return {
        "group": name,
        "side": side,
        "clients": clients,
        "groups/s": round(len(cycles) / found["seconds"], 1),
        "CPU-ms": round(per_group * (sum(cpu) + sum(spent for _, spent, _ in of_clients)), 2),
        "of servers": round(per_group * sum(cpu), 2),
        "of the busiest": round(per_group * max(cpu), 2),
        "ms, median": round(statistics.median(cycles), 1) if cycles else None,
        "99 % below": round(cycles[int(0.99 * (len(cycles) - 1))], 1) if cycles else None,
        "MiB of servers": round(memory[0]),
        "MiB of all": round(memory[1]),
    }


def main() -> None:
    options, cells = arguments(), []
    peers = {PEER: [], f"{PEER}, defaults": ["--defaults"]} if options.peer_python else {}
    command = peer_command(options.peer_python, "queue_peer")
    for named in options.cells:
        shape, _, clients = named.partition(":")
        found = [measure(shape, n, int(clients), options.seconds) for n in options.buffers]
        for side, flags in peers.items():
            sizes = (f"--shape={shape}", f"--clients={clients}", f"--seconds={options.seconds}")
            taken = finished([*command, *sizes, *flags])[-1]
            found.append(cell(shape, side, int(clients), json.loads(taken)))
        if not cells:
            print_header(*found[0])
        for one in found:
            print_row(*one.values())
        cells += found
    if options.peer_python:
        taken = finished([*command, "--mixing"])[-1]
        print(f"\nwhat the peer's sampler of groups took for one: {taken}")
    write_json(options.json, cells)


if __name__ == "__main__":
    main()
