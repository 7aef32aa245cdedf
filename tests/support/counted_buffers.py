"""Task buffers and workers over real sockets in one process, with a sampler that only counts."""

import contextlib
import dataclasses
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from distflow_jax.environments.episode_sampler import Counts, Progress
from distflow_jax.environments.episodes import Episode, single_turn
from distflow_jax.rollout.occupancy import Occupancy
from distflow_jax.rollout.requests import GroupRequest, Partial, Response, SamplingParams
from distflow_jax.rollout.response_checks import ResponseLimits
from distflow_jax.stream.links.buffer_addresses import BufferAddresses, start_before
from distflow_jax.stream.links.buffer_client import BufferClient
from distflow_jax.stream.links.buffer_links import Joining
from distflow_jax.stream.links.buffer_service import QUICK, BufferService
from distflow_jax.stream.links.remote_link import RemoteLink, WorkerState
from distflow_jax.stream.links.run_token import make_run_token
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.sample_requests import SampleRequests, differs
from distflow_jax.stream.schedule import Admission, Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.wire.wire_server import WireServer
from distflow_jax.stream.worker import Worker
from support.tiny_model import prompt_of
from support.waiting import HANG, until

SAMPLES, GROUPS, STALENESS, TABLES = 2, 4, 1, {"config": {"seed": "1"}}
STOP, VOCABULARY = 9_999, 10_000
LIMITS = ResponseLimits(VOCABULARY, [STOP])


def length_of(counter, sample):
    """Tokens of a response."""
    return 1 + (5 * counter + 3 * sample) % 7


def response_of(request, sample, versions):
    """A response whose tokens have these versions; all that sample it find the same tokens."""
    tokens = np.arange(len(versions), dtype=np.int32) + request.prompt.counter % 1000
    if len(versions) == length_of(request.prompt.counter, sample):
        tokens[-1] = STOP
    ones = np.ones(len(versions), np.float32)
    version = np.array(versions, np.int32)
    return Response(request.prompt, sample, tokens, -ones, ones, True, version)


def request_of(counter, turn=1):
    """The request for the group of a prompt."""
    prompt = dataclasses.replace(prompt_of(counter + 1, [1, 2, 3]), counter=counter)
    return GroupRequest(prompt, SamplingParams(SAMPLES, 16), turn=turn, rank=(0.5, 1.0))


class Sampler:
    """Has the calls of an EpisodeSampler: each round adds a token to every response."""

    def __init__(self, version, seconds=0.0):
        self.version, self._seconds = version, seconds
        self._open, self._calls, self.refuses = {}, 0, ()

    @property
    def busy(self):
        return bool(self._open)

    @property
    def lacks(self):
        return sum(
            len(found) < length_of(key[0], sample)
            for key, (_, versions) in self._open.items()
            for sample, found in versions.items()
        )

    @property
    def counts(self):
        return Counts(occupancy=Occupancy(calls=self._calls))

    def submit(self, key, request, progress):
        if key[0] in self.refuses:
            raise ValueError("too long")
        versions = {s: [] for s in request.samples}
        for sample, episode in progress.episodes.items():
            versions[sample] = list(episode.response.version)
        for partial in progress.partials:
            versions[partial.sample] = [v for chunk in partial.chunks for v in chunk[3]]
        self._open[key] = (request, versions)

    def round(self):
        self._calls += 1
        time.sleep(self._seconds * random.random())
        complete = []
        for key, (request, versions) in list(self._open.items()):
            for sample, found in versions.items():
                if len(found) < length_of(key[0], sample):
                    found.append(self.version)
            if all(len(v) == length_of(key[0], s) for s, v in versions.items()):
                del self._open[key]
                complete.append((key, [self._episode(request, s, v) for s, v in versions.items()]))
        return complete

    def _episode(self, request, sample, versions) -> Episode:
        return single_turn(response_of(request, sample, versions))

    def progress(self):
        found = {}
        for key, (request, versions) in self._open.items():
            progress = found[key] = Progress()
            for sample, known in versions.items():
                if len(known) == length_of(key[0], sample):
                    progress.episodes[sample] = self._episode(request, sample, known)
                elif known:
                    r = response_of(request, sample, known)
                    chunk = (r.tokens, r.logp, r.margin, r.version)
                    progress.partials.append(
                        Partial(request, sample, np.zeros(0, np.int32), [chunk])
                    )
        return found

    def drop(self, keys):
        for key in keys:
            self._open.pop(key, None)

    def free_weights(self):
        """There are none."""

    def load(self, weights, version, *, cache):
        assert weights == f"weights {version}"
        self.version = version


class Trainers:
    """Task buffers of some processes, and a loop that trains on what they have."""

    def __init__(
        self,
        folder,
        *,
        exact,
        processes=2,
        step=0,
        position=0,
        attempt="one",
        through=lambda port: port,
        lease=HANG,
        served=("score",),
    ):
        """`through(port)`: the port at which workers reach a task buffer that listens at `port`."""
        self.rule, self.folder, self.exact = Rule(GROUPS, STALENESS), folder, exact
        self.step, self.first, self.trained = step, step, {}
        self.locks = [threading.Condition() for _ in range(processes)]
        self.requests, self.servers, self.answers = [], [], []
        self.admissions = [Admission(self.rule, step=step, counter=position) for _ in self.locks]
        self.next, self.complete = [position] * processes, {}
        self.given_up = set()
        token = make_run_token(folder)
        for lock in self.locks:
            buffer = TaskBuffer(
                self.rule,
                exact=exact,
                version=step,
                lease_seconds=lease,
                max_tries=2,
                served=served,
                differs=differs,
            )
            self.requests.append(SampleRequests(buffer, lock))
            facts = {"attempt": attempt, "exact": exact}
            facts |= {"began": step, "after": start_before(folder)}
            self.answers.append(
                BufferService(self.requests[-1], lock, TABLES, facts, limits=LIMITS)
            )
            self.servers.append(
                WireServer("127.0.0.1:0", token, self.answers[-1].methods(), quick=QUICK)
            )
        self.admit()
        buffers = [f"127.0.0.1:{through(server.port)}" for server in self.servers]
        for answers in self.answers:
            answers.meet(buffers)
        BufferAddresses(attempt, tuple(buffers)).write(folder)

    def admit(self):
        for place, requests in enumerate(self.requests):
            admission = self.admissions[place]
            end = admission.end(requests.buffer.newest)
            for counter in range(self.next[place], end):
                if counter % len(self.requests) == place:
                    request = request_of(counter, admission.step_of(counter))
                    requests.begin((counter, "gen"), request, Progress())
            self.next[place] = max(self.next[place], end)

    def look(self):
        """Takes what is there, and trains a step if it is whole."""
        self.admit()
        for requests, lock, answers in zip(self.requests, self.locks, self.answers, strict=True):
            with lock:
                requests.buffer.expire(now := time.monotonic())
                answers.answer_waiting(now)
                self.given_up |= set(requests.give_up())
            for (counter, _), episodes, _ in requests.take_complete():
                assert counter not in self.complete
                responses = [episode.response for episode in episodes]
                assert [response.sample for response in responses] == list(range(SAMPLES))
                assert {response.prompt.counter for response in responses} == {counter}
                self.complete[counter] = episodes
        for counter in self.given_up:
            for admission in self.admissions:
                admission.judge(counter, False)
        step = self.step + 1
        cut = self.admissions[0].cut(step)
        if not all(counter in self.complete for counter in cut.kept):
            return
        for counter in cut.kept:
            for sample, episode in enumerate(self.complete[counter]):
                version = episode.response.version
                assert len(version) == length_of(counter, sample)
                assert step - 1 - STALENESS <= version.min() <= version.max() <= step - 1
                if self.exact:
                    assert set(version.tolist()) == {max(self.first, step - 1 - STALENESS)}
        for admission in self.admissions:
            admission.finish(step)
        self.step, self.trained[step] = step, cut.kept
        for requests, lock in zip(self.requests, self.locks, strict=True):
            with lock:
                requests.buffer.publish(step)

    def train(self, steps):
        def trained():
            self.look()
            return self.step >= steps

        until(trained, lambda: f"stands at step {self.step}", pause=0.002)

    def close(self, *, ended=True):
        if ended:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda answers: answers.end(HANG), self.answers))
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def working(folder, *, seconds=0.0, orphan=HANG, refuses=(), name=""):
    """A worker in a thread; yields (worker, its end, what stops it)."""
    joining = Joining(str(folder), name or f"w{random.random()}", TABLES)
    links = joining.first(HANG)
    sampler = Sampler(links.first_version, seconds)
    sampler.refuses = refuses
    state = WorkerState(links=links, capacity=12, version=links.first_version, slots=12)
    link = RemoteLink(state, lambda links, version: f"weights {version}", save_seconds=0.05)
    worker = Worker(sampler, link, cache="keep")
    client = BufferClient(state, joining, NodeRunner(), save_seconds=0.05, orphan_seconds=orphan)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(client.sample, worker, link, stop.is_set)
        try:
            yield worker, end, stop
        finally:
            stop.set()
            end.exception(HANG)
