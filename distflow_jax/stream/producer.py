"""The groups of a process from their prompts on: begun by the rule, sampled, and passed on."""

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distflow_jax.batch import Prompt
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.dag.graph import Node
from distflow_jax.data.step_columns import group_numbers, loader_columns
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import Episode
from distflow_jax.layout import Layout
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.sampling_order import Order, longest
from distflow_jax.stages.rollout import environment_parts, is_greedy, written_columns
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.saved_samples import SavedSamples
from distflow_jax.stream.schedule import Admission
from distflow_jax.stream.tasks import Key

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class SamplingNode:
    """A node that samples ahead of training, and its sampling parameters."""

    node: Node
    sampling: SamplingParams
    environment_prefix: str | None  # of the environment's metrics; None: no environment
    order: Order = longest  # of its requests that wait for slots


class Producer:
    """The groups of one process: begun, sampled, and complete.

    A prompt that workers cannot answer is given up: its group ends without responses, and its
    filter decision is to drop it. `admission` and the groups are shared with the training thread,
    under `lock`.
    """

    def __init__(
        self,
        requests: SampleRequests,
        admission: Admission,
        nodes: Sequence[SamplingNode],
        draw: Callable[[], list[Prompt] | None],
        *,
        writers: Mapping[str | None, Layout],
        num_samples: int,
        saved: SavedSamples,
        size: Callable[[Prompt], int] = lambda prompt: 0,
    ):
        """`draw()`: this process's prompts of the next batch, None at the end of the data. `saved`:
        samples of a checkpoint, which the groups go on with. Prompts that were given up before it
        stay so: otherwise groups that exist would belong to later steps. `size`: bytes of a prompt
        that is sent; ValueError for one that is too large."""
        self.requests, self.admission, self.lock = requests, admission, requests.lock
        self.buffer = requests.buffer
        self._nodes, self._draw = tuple(nodes), draw
        self._writers, self._num_samples, self._size = dict(writers), num_samples, size
        self.saved = saved
        batch = admission.rule.groups
        self._drawn = admission.position // batch * batch  # counters of all batches that are drawn
        self._waiting: collections.deque[Prompt] = collections.deque()  # drawn, not begun
        self.groups: dict[int, Group] = {}  # begun and not trained on, by counter
        self._lost = set(saved.given_up)  # given up, as all processes know
        for counter in sorted(self._lost):
            admission.judge(counter, False)

    @property
    def name(self) -> str:
        """The id of the node that samples; of several the first."""
        return self._nodes[0].node.id

    @property
    def version(self) -> int:
        """The newest version of the weights that workers can get."""
        return self.buffer.newest

    def admit(self, up_to: int | None = None) -> bool:
        """Begins all groups that may begin with the newest weights, and draws the batches of their
        prompts, which nothing else draws.

        `up_to`: none of later steps. Returns whether any began.
        """
        with self.lock:
            end = self.admission.end(self.version)
            if up_to is not None:
                end = min(end, self.admission.cut(up_to).end)
        while self._drawn < max(end, self.saved.end):
            batch = self._draw()
            if batch is None:
                break
            with self.lock:
                first = self.admission.position
                wanted = [p for p in batch if p.counter >= first and p.counter not in self._lost]
                self._waiting.extend(sorted(wanted, key=lambda prompt: prompt.counter))
                self._drawn += self.admission.rule.groups
        if self._drawn >= self.saved.end:  # the rest are prompts of other processes
            self.saved.keep({prompt.counter for prompt in self._waiting})
        # what an earlier run has begun goes on, even if this one's max_staleness is smaller
        ready = [p for p in self._waiting if p.counter < end or p.counter in self.saved]
        for prompt in ready:
            self._begin(prompt)
            with self.lock:  # until then it is waiting or begun to every thread, or both
                self._waiting.remove(prompt)
        return bool(ready)

    def evaluate(self, version: int, requests: Iterable[GroupRequest]) -> None:
        """Begins the requests of an evaluation of a version; under `lock`."""
        for request in requests:
            self.requests.evaluate(version, request, self._size(request.prompt))

    @property
    def starving(self) -> bool:
        """Whether a sampler has nothing to do after `admit`, and the run has groups that newer
        weights may begin."""
        with self.lock:
            if self.requests.busy and not self.buffer.starving:
                return False
            newest = self.admission.rule.newest_step(self.version)
            return self.admission.has_step(max(newest, self.admission.finished) + 1)

    def collect(self) -> list[Group]:
        """Takes what workers have submitted; returns groups whose samples are complete now."""
        with self.lock:
            for counter, why in self.requests.give_up().items():
                log.warning("prompt %d is given up, the next one takes its place: %s", counter, why)
                self._give_up(self.groups[counter])
        ended = []
        for (counter, node_id), episodes, workers in self.requests.take_complete():
            self.groups[counter].workers |= workers
            ended.append((self.groups[counter], node_id, episodes))
        for group, node_id, episodes in ended:
            self._take(group, node_id, episodes)
        with self.lock:
            for group, node_id, episodes in ended:
                group.samples[node_id] = episodes
                group.sampling.remove(node_id)
            self.requests.handed_on()
        groups = dict.fromkeys(group for group, _, _ in ended)
        return [group for group in groups if not group.sampling]

    @property
    def under_way(self) -> int:
        """Tokens that were sampled for groups which no step has taken; under `lock`."""
        return self.requests.under_way + sum(group.tokens for group in self.groups.values())

    def progress(self) -> dict[Key, Progress]:
        """Samples of all groups, by counter and node; not beside `collect`."""
        return self.requests.progress() | complete_samples(self.groups.values())

    @property
    def oldest(self) -> str:
        """The node and the prompt of the oldest group that is being sampled; "": none is."""
        with self.lock:
            sampling = [group for group in self.groups.values() if group.sampling]
        oldest = min(sampling, key=lambda group: group.counter, default=None)
        return "" if oldest is None else f"{min(oldest.sampling)} of prompt {oldest.counter}"

    def wake(self) -> None:
        """Has threads look again that wait under the lock."""
        with self.lock:
            self.lock.notify_all()

    def begun_up_to(self, end: int) -> bool:
        """Whether all groups below a counter have begun that are this process's."""
        return self._drawn >= end and not (self._waiting and self._waiting[0].counter < end)

    @property
    def lacks_prompts(self) -> bool:
        """Whether prompts of groups that may begin were not there after `admit`; under `lock`."""
        return self._drawn < self.admission.end(self.version)

    def facts(self) -> dict[str, Any]:
        """JSON values for checkpoints, which this process's samples need; under `lock`."""
        return {"given_up": sorted(self._lost)}

    def measured(self) -> dict[str, float]:
        """Workers of other jobs, and what became of their results since the run began; under
        `lock`."""
        buffer = self.buffer
        if math.isinf(buffer.seconds):  # none can come
            return {}
        found = {
            "alive": len(buffer.workers.keys() - buffer.stalled),
            "expired": buffer.expired,
            "second": buffer.counts.second,
            "ended": len(buffer.ended),
        }
        return {f"perf/workers/{name}": float(n) for name, n in found.items()}

    def judge(self, counter: int, keep: bool) -> None:
        """Notes a decision of any process on a group; without a region the next prompt takes the
        place of one that is left out. Under `lock`."""
        self.admission.judge(counter, keep)
        if not (keep or self.admission.judged):
            self._lost.add(counter)
            self.groups.pop(counter, None)

    def forget(self, counters: Sequence[int]) -> list[Group]:
        """Takes groups out, those of a finished step, and returns them without those that were
        given up; under `lock`."""
        self.buffer.forget(counters)
        found = [self.groups.pop(counter) for counter in counters if counter in self.groups]
        return [group for group in found if not group.given_up]

    def _give_up(self, group: Group) -> None:
        """Ends a group that no worker can answer: nothing trains on its tokens."""
        group.samples.clear()
        group.keep, group.given_up, group.done = False, True, True

    def _begin(self, prompt: Prompt) -> None:
        """Makes the group of a prompt, and its requests."""
        size = self._size(prompt)
        store = FieldStore.of_step(self._writers, loader_columns([prompt], self._num_samples))
        group = Group(prompt.counter, store, {n.node.id for n in self._nodes})
        with self.lock:
            turn = self.admission.step_of(prompt.counter)
            self.groups[prompt.counter] = group
        requests = {n.node.id: self._request(n, prompt, turn) for n in self._nodes}
        found = self.saved.take(prompt.counter, requests)
        for node, request in requests.items():
            self.requests.begin((prompt.counter, node), request, found.get(node, Progress()), size)

    def _request(self, node: SamplingNode, prompt: Prompt, turn: int) -> GroupRequest:
        request = GroupRequest(prompt, node.sampling, turn=turn)
        return dataclasses.replace(request, rank=node.order(request))

    def _take(self, group: Group, node_id: str, episodes: list[Episode]) -> None:
        (found,) = (n for n in self._nodes if n.node.id == node_id)
        node = found.node
        if is_greedy(node):  # one answer for all entries of a prompt
            episodes = [episodes[i] for i in group_numbers(group.store.uid)]
        columns: dict[str, Any] = written_columns(node, episodes)
        for name, field in node.writes.items():
            group.store.put(node.id, field, columns[name])
        if found.environment_prefix is not None:
            parts = environment_parts(episodes, found.environment_prefix)
            group.metrics.setdefault(node.id, []).append(parts)


def complete_samples(groups: Iterable[Group]) -> dict[Key, Progress]:
    """The samples of groups, by counter and node; of nodes whose samples are complete."""
    return {
        (group.counter, node): Progress(dict(enumerate(episodes)))
        for group in groups
        for node, episodes in list(group.samples.items())
    }
