"""The link of a program that samples for a run to the task buffers of its groups."""

import dataclasses
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import single_turn
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.parameters import abstract_params, param_shardings
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.rollout.occupancy import Occupancy
from distflow_jax.rollout.requests import GroupRequest, Response
from distflow_jax.stream.frames.frames import Frame, samples_frame, work_of
from distflow_jax.stream.links.buffer_links import Links, deregister
from distflow_jax.stream.tasks import Key
from distflow_jax.stream.weight_client import pull_target, pull_weights
from distflow_jax.stream.wire.calls import Refused, Unreachable

PULL_SECONDS = 60.0


@dataclasses.dataclass
class _OpenGroup:
    """A group that the program samples."""

    request: GroupRequest
    progress: Progress

    @property
    def missing(self) -> list[int]:
        """Samples that have not ended."""
        return [s for s in self.request.samples if s not in self.progress.episodes]


class OutsideSampler:
    """Groups that a program has taken to sample, and their leases, from any thread."""

    def __init__(self, links: Links, network: DecoderConfig, dtype: str, lease_seconds: float):
        """`network`, `dtype`: of the weights; the links are closed with this."""
        self._links, self._lock = links, threading.RLock()
        shardings = param_shardings(network, mesh_lib.replica_mesh(1, jax.local_devices()[:1]))
        self._target = pull_target(abstract_params(network), shardings, dtype)
        self._open: dict[Key, _OpenGroup] = {}
        self._held = -1  # the version that the program has asked for work by
        self._closing, self.ended = threading.Event(), False
        self._beat = threading.Thread(
            target=self._keep_leases, args=(lease_seconds / 3,), name="leases", daemon=True
        )
        self._beat.start()

    def ask(self, held: int, room: int) -> int:
        """Takes groups for so many responses by a version; returns the newest version."""
        self._held, newest = held, []
        for client in self._links.clients:
            answer = self._call(client, "lease", Frame({"version": held, "capacity": room}))
            if self.ended:
                return held
            work = work_of(answer)
            newest.append(int(answer.facts["newest"]))
            with self._lock:
                for key, request, progress in work:
                    # tokens of an unfinished response have no place in the columns
                    self._open[key] = _OpenGroup(request, Progress(dict(progress.episodes)))
                    room -= len(self._open[key].missing)
        return min(newest)

    def missing(self) -> dict[tuple[int, int], GroupRequest]:
        """The requests of responses that are to be sampled, by prompt and sample."""
        with self._lock:
            return {
                (key[0], sample): entry.request
                for key, entry in sorted(self._open.items())
                for sample in entry.missing
            }

    def bring(self, responses: list[Response]) -> None:
        """Takes responses; groups that are complete go to their task buffers."""
        with self._lock:
            by_counter = {key[0]: key for key in self._open}
            for response in responses:
                key = by_counter.get(response.prompt.counter)
                if key is not None:
                    entry = self._open[key]
                    entry.progress.episodes.setdefault(response.sample, single_turn(response))
            whole = {k: e.progress for k, e in self._open.items() if not e.missing}
            for key in whole:
                del self._open[key]
        self._bring(whole, goes_on=False, calls=1)

    def pull(self, version: int) -> Any:
        """The weights of a version, in the form of training. Refused where it is gone."""
        links = self._links
        return pull_weights(links.weights, version, self._target, PULL_SECONDS, links.attempt)

    def close(self) -> None:
        """Ends the connections; groups that are not complete are for others."""
        self._closing.set()
        self._beat.join()
        deregister(self._links)
        self._links.close()

    def _bring(self, found: Mapping[Key, Progress], *, goes_on: bool, calls: int) -> None:
        for place, client in enumerate(self._links.clients):
            own = {k: p for k, p in found.items() if k[0] % len(self._links.clients) == place}
            if own and not self.ended:
                frame = samples_frame({"spent": _spent(calls), "goes_on": goes_on}, own)
                answer = self._call(client, "submit", frame)
                if why := answer.facts.get("refused"):
                    raise Refused(str(why))
                with self._lock:
                    for counter, node in answer.facts.get("dropped", []) if goes_on else []:
                        self._open.pop((int(counter), str(node)), None)

    def _call(self, client: Any, method: str, frame: Frame) -> Frame:
        with self._lock:
            answer = self._links.call(client, method, frame)
        self.ended = self.ended or bool(answer.facts["ended"])
        return answer

    def _keep_leases(self, seconds: float) -> None:
        """Tells task buffers that the program lives, and that its groups are under way."""
        with ThreadPoolExecutor(1, thread_name_prefix="beat") as pool:
            while not self._closing.wait(seconds) and not self.ended:
                try:
                    beat = pool.submit(self._tell_of_life)
                except RuntimeError:  # the interpreter ends, and close() was not called
                    return
                try:
                    beat.result()
                except (Unreachable, Refused):
                    time.sleep(seconds)  # the next call of the program says why

    def _tell_of_life(self) -> None:
        with self._lock:
            held = {key: Progress() for key in self._open}
        self._bring(held, goes_on=True, calls=0)
        self.ask(self._held, 0)  # task buffers of no group hear of it too


def _spent(calls: int) -> list[float]:
    """Facts of what the slots did, of which decode calls alone are known."""
    return list(Occupancy(calls=calls))
