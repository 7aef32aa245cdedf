"""Connections of a worker to the task buffers of a run: joining, and rejoining after a restart."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distflow_jax.stream.frames.frames import FRAME_BYTES, Frame
from distflow_jax.stream.links.buffer_addresses import addresses, read_addresses
from distflow_jax.stream.links.run_token import find_run_token
from distflow_jax.stream.links.worker_pool import MOST_PLACES, places_of
from distflow_jax.stream.weight_wire import WireWeights
from distflow_jax.stream.wire.calls import Bytes, Refused, Unreachable
from distflow_jax.stream.wire.wire_client import WireClient

START_THEM = (
    "if it is still starting (it loads and compiles first), start the worker again or wait longer "
    "with --join_seconds={:.0f}; on another host, check stream.listen, its port and the firewall"
)
ANSWER_SECONDS = 9.0  # of one task buffer
TELL_SECONDS = 60.0  # between two words on trainers that do not answer
CALL_SECONDS = 30.0
TRY_SECONDS = 0.5  # between two tries

log = logging.getLogger("distflow_jax")


class NobodyAnswers(ValueError):
    """No trainer answers in time: the address is wrong, or the trainers are not running."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds for which a worker waits for trainers.

    Attributes:
      join: for the first answer.
      orphan: for an answer of trainers that answered before.
    """

    join: float
    orphan: float


@dataclasses.dataclass
class Links:
    """Clients of all task buffers of one attempt, in process order."""

    attempt: str
    after: str  # attempt of the start before; "": there is none
    began: int  # version of the checkpoint that this start goes on from
    exact: bool
    newest: int  # version that all task buffers have
    first_version: int  # that a worker which joins should hold
    clients: Sequence[WireClient]
    places: tuple[int, ...] = ()  # of the task buffers that the worker asks for work
    ranked: bool = False  # whether the roster says which these are
    # addresses of the hosts of the run's environments, by name; None: samplers run these
    hosts: Mapping[str, str] | None = None

    @property
    def weights(self) -> list[WireWeights]:
        """The trainer processes, as sources of weights."""
        return [WireWeights(client) for client in self.clients]

    def kept_of(self, attempt: str) -> int:
        """The newest version that this start has in common with an earlier one; -1: none is known.

        Later versions of the earlier one are other weights, though their numbers come again.
        """
        return self.began if attempt == self.after else -1

    def call(self, client: WireClient, method: str, frame: Frame) -> Frame:
        """The answer of one task buffer; Refused or Unreachable."""
        facts = {**frame.facts, "attempt": self.attempt}
        sent = Frame(facts, frame.arrays).to_bytes()
        return _read(client, client.call(method, sent, CALL_SECONDS))

    def assign(self) -> None:
        """Has the roster say anew which task buffers the worker asks; Refused or Unreachable."""
        if self.ranked:
            answer = self.call(self.clients[0], "assign", Frame({}))
            self.places = _places(answer.facts, len(self.clients))

    def rest(self) -> None:
        """Ends idle connections, but for one to each task buffer that the worker asks."""
        for place, client in enumerate(self.clients):
            client.rest(int(place in self.places))

    def close(self) -> None:
        """Ends the connections."""
        for client in self.clients:
            client.close()


class Joining:
    """Discovery of a run's task buffers by a worker.

    `join`: HOST:PORT[,HOST:PORT] or the run's folder. `name`: of this worker. `tables`: the
    settings in which it must agree with the trainers. Raises ValueError if the run's token is not
    known.
    """

    def __init__(
        self,
        join: str,
        name: str,
        tables: Mapping[str, Mapping[str, str]],
        nodes: Sequence[str] = (),
        *,
        everywhere: bool = False,
    ):
        """`nodes`: that the worker serves; () for one that samples. `everywhere`: whether it asks
        all task buffers, however many these are."""
        self._join, self._name = join, name
        self._tables: Mapping[str, Any] = {**tables, **({"nodes": list(nodes)} if nodes else {})}
        self._given, self._everywhere = addresses(join), everywhere

    @property
    def token(self) -> bytes:
        """The run's token. ValueError where it is not known."""
        return find_run_token(None if self._given else self._join)

    @property
    def name(self) -> str:
        """Of this worker."""
        return self._name

    def first(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> Links | None:
        """Links to the task buffers; None if the run has ended. NobodyAnswers, with its address,
        where a task buffer does not answer in time, or before `stopped()`; ValueError with the
        reason for which it refuses."""
        links, why = self._joined(seconds, stopped)
        if why:
            raise NobodyAnswers(f"{why} within {seconds:g} s; {START_THEM.format(5 * seconds)}")
        return links

    def again(self, seconds: float, stopped: Callable[[], bool]) -> Links | None:
        """Links to the task buffers of a run that was started again, or answers again.

        None after `stopped()`, or if the run has ended. NobodyAnswers if none answers in time.
        """
        end = time.monotonic() + seconds
        while True:  # in short passes: the file of addresses is read anew before each
            left = end - time.monotonic()
            links, why = self._joined(min(ANSWER_SECONDS, max(left, TRY_SECONDS)), stopped)
            if not why:
                return links
            if stopped():
                return None
            if left <= 0:
                raise NobodyAnswers(f"{why}; waited {seconds:g} s (--orphan_seconds)")

    def _joined(self, seconds: float, stopped: Callable[[], bool]) -> tuple[Links | None, str]:
        """(links or None after the end of the run, "" or why there are none)."""
        end, why = time.monotonic() + seconds, ""
        told = time.monotonic() + ANSWER_SECONDS - TELL_SECONDS
        while True:
            addresses = None if self._given else read_addresses(self._join)
            if addresses is not None and addresses.ended:
                return None, ""
            buffers = self._given or (addresses.buffers if addresses else ())
            if not buffers:
                why = f"no trainer has opened {self._join!r}"
            for place, address in enumerate(buffers):
                left = (end - time.monotonic()) / (len(buffers) - place)
                try:
                    return self._meet(address, max(TRY_SECONDS, min(ANSWER_SECONDS, left))), ""
                except Unreachable as error:
                    why = f"no trainer answers at {error}"
            if time.monotonic() >= end - TRY_SECONDS or stopped():
                return None, why
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                log.warning("%s; waiting for the trainers, up to %.0f s more", why, end - told)
            time.sleep(TRY_SECONDS)

    def _meet(self, address: str, seconds: float) -> Links:
        """Links to all task buffers, whose addresses that of `address` names."""
        token, end = self.token, time.monotonic() + seconds

        with contextlib.ExitStack() as on_failure:
            with contextlib.closing(WireClient(address, token, self._name)) as first:
                facts = self._register(first, end)
            buffers = facts["buffers"]
            made = (WireClient(b, token, self._name, limit_bytes=FRAME_BYTES) for b in buffers)
            clients = [on_failure.enter_context(contextlib.closing(one)) for one in made]
            many = needs_roster(buffers) and not self._everywhere
            ranked = self._ask(clients[0], "assign", Frame({}), end) if many else {}
            places = _places(ranked, len(buffers))
            told = [self._register(clients[place], end) for place in places]
            on_failure.pop_all()
        return Links(
            facts["attempt"],
            facts["after"],
            facts["began"],
            facts["exact"],
            min(one["newest"] for one in told),
            min(one["wanted"][0] for one in told),
            clients,
            places,
            many,
            hosts_of(told),
        )

    def _register(self, client: WireClient, end: float) -> Mapping[str, Any]:
        facts = self._ask(client, "register", Frame(self._tables), end)
        if "buffers" not in facts:
            raise Unreachable(f"{client.address}: the trainers are starting")
        return facts

    def _ask(self, client: WireClient, method: str, frame: Frame, end: float) -> Mapping[str, Any]:
        seconds = max(TRY_SECONDS, end - time.monotonic())
        try:
            return _read(client, client.call(method, frame.to_bytes(), seconds)).facts
        except Refused as error:
            raise ValueError(f"{client.address}: {error}") from error


def hosts_of(told: Iterable[Mapping[str, Any]]) -> dict[str, str] | None:
    """The hosts of environments that answers of task buffers name; None: the run has none."""
    found = [facts["hosts"] for facts in told if "hosts" in facts]
    return {name: at for hosts in found for name, at in hosts.items()} if found else None


def _read(client: WireClient, answer: Bytes) -> Frame:
    """An answer of a task buffer. ValueError, with its address, for what none answers."""
    try:
        return Frame.of_bytes(answer, FRAME_BYTES)
    except ValueError as error:
        raise ValueError(f"{client.address}: {error}") from error


def needs_roster(buffers: Sequence[Any]) -> bool:
    """Whether a worker may talk to some of the task buffers alone."""
    return len(buffers) > MOST_PLACES


def _places(ranked: Mapping[str, Any], buffers: int) -> tuple[int, ...]:
    """The places of a worker by the roster's answer; without one all are."""
    rank, workers = ranked.get("rank", 0), ranked.get("workers", 1)
    return places_of(min(rank, workers - 1), workers, buffers)


def deregister(links: Links, why: str = "") -> None:
    """Tells the task buffers that this worker goes; `why`: the error that ended it."""
    for client in [links.clients[place] for place in sorted({0, *links.places})]:
        with contextlib.suppress(Refused, Unreachable, ValueError):
            client.call("deregister", Frame({"why": why}).to_bytes(), 2.0)
