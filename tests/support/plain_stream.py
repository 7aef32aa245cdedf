"""A source of one process with a sampler that only counts: its own code, without models."""

import math
import pathlib
import threading
import types

import numpy as np
from etils import epath

from distflow_jax.checkpoint.additions import AdditionWriter
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.dag.graph import Node
from distflow_jax.environments.episode_sampler import Counts, Progress
from distflow_jax.environments.episodes import single_turn
from distflow_jax.layout import Layout
from distflow_jax.rollout.requests import Response, SamplingParams
from distflow_jax.stream.ahead import Ahead, KeptGroups
from distflow_jax.stream.batches.group_facts import decision_of
from distflow_jax.stream.batches.partial_batches import CounterPlanner
from distflow_jax.stream.batches.recordings import RecordWriter
from distflow_jax.stream.driver import TrainerCalls
from distflow_jax.stream.host_nodes import NodesAhead
from distflow_jax.stream.links.local_link import make_local_link
from distflow_jax.stream.producer import Producer, SamplingNode
from distflow_jax.stream.resume import GroupRecords, SampleSaver, TokenAccount
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.saved_samples import SavedSamples
from distflow_jax.stream.schedule import Admission, Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from support.tiny_model import prompt_of

SAMPLES, TOKENS, BATCH = 2, 3, 8
NODE = Node(
    *("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"]), ["response", "response_mask"]
)


class PlainSampler:
    """Has the calls of an EpisodeSampler: a round answers the request that was submitted first."""

    in_turns = False

    def __init__(self, version=0):
        self.version, self._open = version, {}

    @property
    def busy(self):
        return bool(self._open)

    @property
    def counts(self):
        return Counts()

    def submit(self, key, request, progress=None):
        self._open[key] = request, progress or Progress()

    def round(self):
        key = next(iter(self._open))
        request, progress = self._open.pop(key)
        new = [s for s in request.samples if s not in progress.episodes]
        found = progress.episodes | {s: self._answer(request, s) for s in new}
        return [(key, [found[s] for s in sorted(found)])]

    def progress(self):
        return {key: Progress(dict(found.episodes)) for key, (_, found) in self._open.items()}

    def suspend(self):
        return None, []

    def resume(self, state, partials):
        """Nothing was suspended."""

    def drain(self):
        """Nothing is in flight."""

    def free_weights(self):
        """There are none."""

    def load(self, params, version, *, cache):
        self.version = version

    def close(self):
        self._open.clear()

    def _answer(self, request, sample):
        tokens = np.arange(TOKENS, dtype=np.int32)
        ones, version = np.ones(TOKENS, np.float32), np.full(TOKENS, self.version, np.int32)
        return single_turn(Response(request.prompt, sample, tokens, -ones, ones, True, version))


class PlainSync:
    """Weights that are a number."""

    def __call__(self, params):
        return params

    def leave(self, params):
        return Left()

    def arrive(self, left):
        return np.zeros(1)


class Left:
    """Weights that have left the trainer."""

    ready, nbytes = True, 8


def owned(*, first=0, mine=lambda counter: True, last=None):
    """Draws of a process: of each batch from that of `first` on the prompts that are `mine`."""
    starts = iter(range(first // BATCH * BATCH, 10_000 if last is None else last, BATCH))

    def draw():
        start = next(starts, None)
        if start is None:
            return None
        counters = [c for c in range(start, start + BATCH) if mine(c)]
        return [prompt_of(c, [1, 2, 3]) for c in counters]

    return draw


class PlainPlace:
    """The first prompt that no step has looked at."""

    counter, account = 0, None

    def look_at(self, counter):
        self.counter = counter


def plain_stream(
    folder,
    draw,
    *,
    until=None,
    own_devices=False,
    weight_update="in_flight",
    staleness=1,
    trainer=TrainerCalls(),  # noqa: B008
    **bounds,
):
    """A source of a run in `folder`; `bounds`: of its Admission, whose `judged` follows `until`."""
    folder, step = pathlib.Path(folder), bounds.get("step", 0)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    rule, bounds = Rule(BATCH, staleness), bounds | {"judged": until is not None}
    lock, boundary = threading.Condition(), weight_update == "boundary"
    config = StreamConfig(max_staleness=staleness, weight_update=weight_update)
    buffer = TaskBuffer(rule, exact=boundary, version=step, lease_seconds=math.inf, max_tries=1)
    producer = Producer(
        SampleRequests(buffer, lock),
        Admission(rule, **bounds),
        [SamplingNode(NODE, SamplingParams(SAMPLES, 8), None)],
        draw,
        writers={None: Layout("host"), "gen": Layout("host")},
        num_samples=SAMPLES,
        saved=SavedSamples(),
    )
    additions = AdditionWriter(epath.Path(folder / "checkpoints"))
    steps = staleness if boundary else None
    due = trainer.evaluator.due if trainer.evaluator else lambda version: False
    account, records = TokenAccount(), GroupRecords(folder, step)
    saver = SampleSaver(producer, additions, records, account, steps=steps, evaluates=due)
    source = Ahead(
        producer,
        NodesAhead(frozenset({"gen"}), (), {}, until),
        make_local_link(config, PlainSampler(step), producer, PlainSync(), own_devices=own_devices),
        CounterPlanner(Admission(rule, **bounds), BATCH, facts_of=decision_of),
        config,
        trainer=trainer,
        kept=KeptGroups(PlainPlace(), saver, RecordWriter(folder, step, None)),
    )
    close = source.close

    def close_all():
        additions.close()  # as a run's checkpointer does: what has no checkpoint waits for it
        return close()

    source.close = close_all
    return source


def train(source, step):
    """Takes the groups of a step; returns their fields and metrics, and the end of the step."""
    found = []
    coordinator = types.SimpleNamespace(
        use=found.append, merged=lambda m, strict: found.append(m) or m
    )
    source.fill(coordinator, step)
    return (*found, source._kept.place.counter)
