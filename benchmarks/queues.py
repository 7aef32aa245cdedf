"""Groups per second through the homes of workers, and CPU-seconds of a group.

python benchmarks/queues.py                                   # 1, 2, 4 homes; 1, 4, 16, 64 clients
python benchmarks/queues.py --homes 1 --clients 4 --seconds=3 # a quick look

A group is 8 responses with tokens and log-probs of uneven lengths (lognormal, 200 tokens in the
mean, 1,024 at most). A client claims a group at a home (ask), and puts its responses there (bring);
the home's own task reads and frees them. Each home is a process, as a trainer is; clients are
threads of up to 16 processes, and each asks the homes in turn. Versions and margins go with them.

Prints a line per cell: groups per second, CPU-ms of a group in all processes and in the busiest
server, milliseconds of a client's cycle (median, 99th percentile). All processes share this
machine: with few cores rates say what a group costs, not how far servers scale.
"""

import argparse
import contextlib
import json
import multiprocessing
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import REASONS, Episode
from distflow_jax.flow.homes.home import Home
from distflow_jax.flow.homes.home_door import HomeDoor
from distflow_jax.flow.homes.home_sampler import HomeSampler
from distflow_jax.flow.lag_rule import Rule
from distflow_jax.flow.workers.frames import Frame, samples_frame, work_of
from distflow_jax.flow.workers.wire import Caller, Door
from distflow_jax.rollout.requests import GroupRequest, Response, SamplingParams

SAMPLES, MEAN, MOST = 8, 200, 1024
MOST_PROCESSES = 16
TOKEN = b"a token of thirty-two bytes or so"
RUN = "benchmark"
NODE = "rollout"
WARM_SECONDS = 1.0
START_SECONDS = 180.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--homes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="that are measured, per cell")
    parser.add_argument("--json", help="file for the cells")
    return parser.parse_args()


def lengths(draw: np.random.Generator) -> np.ndarray:
    """Tokens of the responses of one group, [8]."""
    drawn = draw.lognormal(np.log(MEAN) - 0.5, 1.0, SAMPLES)
    return np.clip(drawn, 1, MOST).astype(int)


# -- a home, as a process -------------------------------------------------------------------------


def run_home(pipe: Connection, place: int, homes: int, waiting: int) -> None:
    """Serves groups until the pipe says close; sends [groups, CPU-seconds] of the window."""
    lock = threading.Condition()
    rule = Rule(groups=1 << 30, max_lag=1)
    home = Home(rule, exact=False, version=0, lease_seconds=60.0, max_tries=3)
    sampler = HomeSampler(home, lock)
    answers = HomeDoor(sampler, lock, {}, {"incarnation": RUN})
    door = Door("127.0.0.1:0", TOKEN, answers.methods())
    prompt, freed, tokens = np.arange(64, dtype=np.int32), 0, 0
    counter = place

    def submit() -> None:
        nonlocal counter
        asked = Prompt(counter, counter, prompt, "", "", None, {})
        sampling = SamplingParams(SAMPLES, MOST)
        sampler.submit((counter, NODE), GroupRequest(asked, sampling, turn=1))
        counter += homes

    for _ in range(waiting):
        submit()
    pipe.send(door.port)
    begun = 0, 0.0
    while True:
        with lock:
            lock.wait_for(lambda: sampler.has_news, 0.05)
        for _, episodes in sampler.round():
            tokens += sum(len(e.response.tokens) + int(e.response.logp[-1]) for e in episodes)
            freed += 1
            submit()
        if pipe.poll():
            word = pipe.recv()
            if word == "close":
                break
            if word == "begin":
                begun = freed, time.process_time()
            else:
                pipe.send([freed - begun[0], time.process_time() - begun[1]])
    door.close()


# -- clients, as threads of a process -------------------------------------------------------------


def run_clients(pipe: Connection, addresses: list[str], names: list[str]) -> None:
    """Answers groups until the pipe says stop; then sends {seconds of cycles, CPU-seconds}."""
    cycles: list[tuple[float, float]] = []
    over = threading.Event()

    def client(number: int, name: str) -> None:
        draw = np.random.default_rng(number)
        bodies = [responses(draw) for _ in range(16)]
        callers = [Caller(address, TOKEN, name) for address in addresses]
        turn = number
        while not over.is_set():
            began = time.monotonic()
            caller = callers[turn % len(callers)]
            turn += 1
            facts = {"incarnation": RUN, "version": 0, "room": 1}
            answer = caller.call("ask", Frame(facts).to_bytes(), 60)
            for key, request, _ in work_of(Frame.of_bytes(answer)):
                found = {key: answered(request, bodies[turn % len(bodies)])}
                facts = {"incarnation": RUN, "calls": 1, "goes_on": False}
                caller.call("bring", samples_frame(facts, found).to_bytes(), 60)
                cycles.append((time.monotonic(), time.monotonic() - began))
        for caller in callers:
            caller.close()

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
    pipe.send([[took for at, took in list(cycles) if since <= at <= until], cpu])
    stop()


def responses(draw: np.random.Generator) -> list[tuple[np.ndarray, ...]]:
    """(tokens, log-probs, margins, versions) of a group's responses, [T] each."""
    return [
        (
            draw.integers(0, 50_000, n).astype(np.int32),
            -draw.random(n, np.float32),
            draw.random(n, np.float32),
            np.zeros(n, np.int32),
        )
        for n in lengths(draw)
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


def measure(homes: int, clients: int, seconds: float) -> dict[str, Any]:
    """One cell of ours."""
    waiting = max(8, 4 * clients // homes)
    with processes(run_home, [(i, homes, waiting) for i in range(homes)]) as servers:
        addresses = [f"127.0.0.1:{received(pipe)}" for pipe in servers]
        names = [f"client {i}" for i in range(clients)]
        count = min(clients, MOST_PROCESSES)
        with processes(run_clients, [(addresses, names[i::count]) for i in range(count)]) as pipes:
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
    return cell(f"homes {homes}", clients, took, sum(n for n, _ in served), served, asked)


def cell(
    name: str, clients: int, seconds: float, groups: int, servers: list[Any], clients_of: list[Any]
) -> dict[str, Any]:
    """Numbers of one cell; `servers`: (_, CPU-seconds), `clients_of`: (cycles, CPU-seconds)."""
    cycles = sorted(1e3 * took for found, _ in clients_of for took in found)
    cpu = [seconds for _, seconds in servers]
    per_group = 1e3 / max(groups, 1)
    return {
        "name": name,
        "clients": clients,
        "groups_per_second": round(groups / seconds, 1),
        "cpu_ms": round(per_group * (sum(cpu) + sum(c for _, c in clients_of)), 2),
        "cpu_ms_servers": round(per_group * sum(cpu), 2),
        "cpu_ms_busiest": round(per_group * max(cpu), 2),
        "p50_ms": round(statistics.median(cycles), 1) if cycles else None,
        "p99_ms": round(cycles[int(0.99 * (len(cycles) - 1))], 1) if cycles else None,
    }


def main() -> None:
    """Measures all cells and prints them."""
    options = arguments()
    cells = []
    columns = ("name", "clients", "groups_per_second", "cpu_ms", "cpu_ms_servers")
    columns += ("cpu_ms_busiest", "p50_ms", "p99_ms")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    for clients in options.clients:
        found = [measure(homes, clients, options.seconds) for homes in options.homes]
        for one in found:
            print("| " + " | ".join(str(one[name]) for name in columns) + " |", flush=True)
        cells += found
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(cells, indent=1) + "\n")


if __name__ == "__main__":
    main()
