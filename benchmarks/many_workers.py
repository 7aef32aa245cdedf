"""CPU of a task buffer with many workers, and open files of a worker with many task buffers.

python benchmarks/many_workers.py               # 1,000 workers on 64 task buffers, 30 s a cell
python benchmarks/many_workers.py --seconds=5 --workers=200

One task buffer is real, in a process as a trainer's is, with those of all workers that ask it; the
others are arithmetic. Each worker asks 16 of 64 task buffers (worker_pool.py), so 250 of 1,000 ask
the real one; each is a thread with the talk of a real worker, in 4 processes, and a sampler that
only takes time.

idle: nothing waits for anyone. working: a group ends each second, as of 64 a second over all task
buffers. A group is 8 responses of 200 tokens in the mean that take 60 s, so 60 of the 250 workers
hold one of this buffer, and say every 5 s what is under way. The others are busy with groups of
other buffers. Groups always wait. files: a worker joins 256 task buffers, asks all of them since it
is alone, and pulls weights from all; its open files are counted meanwhile.

Prints a line per cell, and exit code 1 where a goal is missed: 2 % of a core, 5 % of a core, 1,024
files.
"""

import argparse
import collections
import contextlib
import os
import random
import sys
import threading
import time
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp
import numpy as np
import queues
from jax.sharding import SingleDeviceSharding

from distflow_jax.batch import Prompt
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.rollout.requests import GroupRequest, Partial, SamplingParams
from distflow_jax.rollout.response_checks import ResponseLimits
from distflow_jax.stream.border import Border
from distflow_jax.stream.links.buffer_links import Joining, Links
from distflow_jax.stream.links.buffer_service import QUICK, BufferService
from distflow_jax.stream.links.buffer_talk import BufferTalk, Talks
from distflow_jax.stream.links.remote_link import WorkerState
from distflow_jax.stream.links.worker_pool import places_of
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.weight_client import pull_target, pull_weights
from distflow_jax.stream.weight_store import WeightStore
from distflow_jax.stream.weight_wire import weight_methods
from distflow_jax.stream.wire.calls import Unreachable
from distflow_jax.stream.wire.wire_client import WireClient
from distflow_jax.stream.wire.wire_server import WireServer

GROUP_SECONDS, SAVE_SECONDS, LOOK_SECONDS = 60.0, 5.0, 0.05
PROCESSES, WAITING, MANY, SAMPLES = 4, 64, 256, queues.SAMPLES
WARM_SECONDS = 12.0  # for questions to spread
GOALS = {"idle": 2.0, "working": 5.0, "files": 1024}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--buffers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0, help="that are measured, per cell")
    parser.add_argument("--warm_seconds", type=float, default=WARM_SECONDS)
    return parser.parse_args()


# -- a task buffer, as a process ------------------------------------------------------------------


def run_buffer(pipe: Connection, buffers: int, works: bool) -> None:
    """Serves until the pipe says close; sends [CPU-seconds, groups, questions] of the window."""
    lock, counter = threading.Condition(), 0
    tasks = TaskBuffer(Rule(1 << 30, 1), exact=False, version=0, lease_seconds=60.0, max_tries=3)
    requests, asked = SampleRequests(tasks, lock), collections.Counter[str]()
    limits = ResponseLimits(1 << 17, [queues.STOP])
    facts = {"attempt": queues.RUN}
    service = BufferService(requests, lock, {}, facts, border=Border(limits))

    def counted(name, method):
        def call(worker, payload):
            asked[name] += 1
            return method(worker, payload)

        return call

    methods = {name: counted(name, method) for name, method in service.methods().items()}
    server = WireServer("127.0.0.1:0", queues.TOKEN, methods, quick=QUICK)
    pipe.send(server.port)
    prompt, done = np.arange(64, dtype=np.int32), 0
    begun = 0.0, 0, 0
    while True:
        while works and tasks.open.num_waiting.total() < WAITING:
            request = GroupRequest(
                Prompt(counter, counter, prompt, "", "", None, {}),
                SamplingParams(SAMPLES, queues.MOST),
                turn=1,
            )
            requests.begin((counter, queues.NODE), request)
            counter += buffers
        with lock:  # as the lease monitor looks
            tasks.expire(now := time.monotonic())
            service.answer_waiting(now)
            lock.wait(LOOK_SECONDS)
        done += len(requests.take_complete())
        requests.handed_on()
        if pipe.poll():
            word = pipe.recv()
            if word == "close":
                break
            found = time.process_time(), done, asked.total()
            if word == "begin":
                begun = found
            else:
                pipe.send([b - a for a, b in zip(begun, found, strict=True)])
    server.close()


# -- workers, as threads of a process -------------------------------------------------------------


class Stub:
    """A worker that asks one real task buffer, and whose groups take their time."""

    def __init__(self, name: str, address: str, buffers: int, holds: bool, works: bool):
        client = WireClient(address, queues.TOKEN, name)
        links = Links(queues.RUN, "", 0, False, 0, 0, [client] * buffers, (0,))
        self._draw = np.random.default_rng(hash(name) & 0xFFFF)
        self._holds = holds
        self.state = WorkerState(links=links, version=0, newest=0, slots=4 * SAMPLES)
        self.state.capacity = 0 if works else 4 * SAMPLES
        self._begin = time.monotonic() + random.random() * GROUP_SECONDS
        self._groups: dict = {}
        talk = BufferTalk(Talks(self.state, NodeRunner({}), SAVE_SECONDS), links, 0)
        threading.Thread(target=talk.run, daemon=True).start()

    def look(self, now: float) -> None:
        """Takes groups, ends those whose time is over, and shows what is under way."""
        with self.state.lock:
            if self._holds and now >= self._begin and not self._groups:
                self._begin = now + GROUP_SECONDS  # the first one, at a moment of its own
                self.state.capacity = SAMPLES
                self.state.lock.notify_all()
            while self.state.assigned:
                work = self.state.assigned.popleft()
                found = queues.answered(work.request, queues.responses(self._draw))
                self._groups[work.key] = [work.request, found, now, now + SAVE_SECONDS]
            for key, group in list(self._groups.items()):
                request, found, began, save = group
                if now >= began + GROUP_SECONDS:
                    self.state.whole[key] = found
                    self.state.capacity = SAMPLES
                    del self._groups[key]
                elif now >= save:
                    group[3] = now + SAVE_SECONDS
                    self.state.partial[key] = _shown(request, found, (now - began) / GROUP_SECONDS)
            self.state.dropped.clear()
            if self.state.whole or self.state.partial:
                self.state.lock.notify_all()


def _shown(request: GroupRequest, found: Progress, share: float) -> Progress:
    """The responses of a group that are under way, by the share of its time."""
    partials = []
    for sample, episode in found.episodes.items():
        r = episode.response
        most = max(1, int(share * len(r.tokens)) - 1)
        if most < len(r.tokens):
            chunk = r.tokens[:most], r.logp[:most], r.margin[:most], r.version[:most]
            partials.append(Partial(request, sample, np.zeros(0, np.int32), [chunk]))
    return Progress({}, partials)


def run_workers(
    pipe: Connection, address: str, names: list[str], buffers: int, holding: int, works: bool
) -> None:
    """Workers, of which some hold groups, until the pipe says stop."""
    stubs = [Stub(n, address, buffers, i < holding, works) for i, n in enumerate(names)]
    pipe.send("ready")
    while not pipe.poll(LOOK_SECONDS):
        for stub in stubs:
            stub.look(time.monotonic())


def measure(options: argparse.Namespace, cell: str) -> tuple[float, str]:
    """(% of a core of the task buffer, text) of a cell."""
    workers, buffers = options.workers, options.buffers
    of_all = [places_of(rank, workers, buffers) for rank in range(workers)]
    names = [f"worker-{i}" for i, places in enumerate(of_all) if 0 in places]
    works = cell == "working"
    holding = round(GROUP_SECONDS) if works else 0
    with queues.processes(run_buffer, [(buffers, works)]) as (server,):
        address = f"127.0.0.1:{queues.received(server)}"
        parts = [
            (address, names[i::PROCESSES], buffers, -(-(holding - i) // PROCESSES), works)
            for i in range(PROCESSES)
        ]
        with queues.processes(run_workers, parts) as pipes:
            for pipe in pipes:
                queues.received(pipe)
            time.sleep(options.warm_seconds + (GROUP_SECONDS if works else 0))
            server.send("begin")
            began = time.monotonic()
            time.sleep(options.seconds)
            server.send("end")
            cpu, groups, questions = queues.received(server)
            seconds = time.monotonic() - began
            server.send("close")
            for pipe in pipes:
                pipe.send("stop")
    share = 100 * cpu / seconds
    return share, (
        f"{share:.2f} % of a core; {len(names)} of {workers} workers ask it, "
        f"{groups / seconds:.2f} groups and {questions / seconds:.1f} calls a second"
    )


# -- files ----------------------------------------------------------------------------------------


def run_many(pipe: Connection, count: int) -> None:
    """So many task buffers, with weights, until the pipe says close."""
    with contextlib.ExitStack() as stack:
        addresses, services = [], []
        store = WeightStore(queues.RUN, lambda params: params, "float32")  # of equal weights
        store.put(0, {f"w{i}": jnp.ones((64, 64)) for i in range(16)})
        for _ in range(count):
            lock, rule = threading.Condition(), Rule(1 << 30, 1)
            tasks = TaskBuffer(rule, exact=False, version=0, lease_seconds=60.0, max_tries=3)
            facts = {"attempt": queues.RUN, "after": "", "began": 0, "exact": False}
            border = Border(ResponseLimits(1 << 17, [queues.STOP]))
            service = BufferService(SampleRequests(tasks, lock), lock, {}, facts, border=border)
            methods = service.methods() | weight_methods(store)
            server = WireServer("127.0.0.1:0", queues.TOKEN, methods, quick=QUICK)
            stack.callback(server.close)
            addresses.append(f"127.0.0.1:{server.port}")
            services.append(service)
        for service in services:
            service.meet(addresses)
        pipe.send(addresses)
        pipe.recv()


def open_files() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def _talk(talks: Talks, links: Links, place: int) -> None:
    with contextlib.suppress(Unreachable):  # at the end
        BufferTalk(talks, links, place).run()


def files(count: int) -> tuple[float, str]:
    """(most open files of a worker of so many task buffers, text)."""
    os.environ["DISTFLOW_TOKEN"] = queues.TOKEN.decode()
    most, over = [0], threading.Event()
    with queues.processes(run_many, [(count,)]) as (pipe,):
        addresses = queues.received(pipe)

        def watch():
            while not over.wait(0.002):
                most[0] = max(most[0], open_files())

        watching = threading.Thread(target=watch)
        watching.start()
        links = Joining(addresses[0], "worker", {}).first(60.0)
        state = WorkerState(links=links, version=0, newest=0, slots=8, capacity=8)
        talks = Talks(state, NodeRunner({}), SAVE_SECONDS)
        for place in links.places:
            threading.Thread(target=_talk, args=(talks, links, place), daemon=True).start()
        shapes = {f"w{i}": jax.ShapeDtypeStruct((64, 64), np.float32) for i in range(16)}
        shardings = dict.fromkeys(shapes, SingleDeviceSharding(jax.devices()[0]))
        target = pull_target(shapes, shardings, "float32")
        pull_weights(links.weights, 0, target, 120.0, queues.RUN)
        pulled = open_files()
        links.rest()
        rests = open_files()
        over.set()
        watching.join()
        state.end()
        links.close()
        pipe.send("close")
    return most[0], (
        f"at most {most[0]} open files of a worker that asks {len(links.places)} of {count} task "
        f"buffers; {pulled} after a pull of weights from all, {rests} until the next one"
    )


def main() -> int:
    """Measures all cells; the exit code."""
    options, missed = arguments(), []
    for cell, goal in GOALS.items():
        found, text = files(MANY) if cell == "files" else measure(options, cell)
        print(f"{cell:8} {text}", flush=True)
        if found >= goal:
            missed.append(f"{cell}: the goal is below {goal:g}")
    print("\n".join(missed) or "all goals are met")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
