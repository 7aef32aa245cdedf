"""The watchdog process beside each controller, in its own session, with the standard library only.

Watchdog (watchdog/controller.py) starts it with `main(settings as JSON)`. File descriptors:

  0  lines from the controller, each a JSON list:
       ["at", sequence, step, phase]   a beat, or progress; none means that it does not respond
       ["connect", token, addresses]   the watchdogs of all processes, by index
       ["done"]                        an orderly end
       ["failed", message]             an exception ends the process
     End of file means that the controller is gone (a pidfd reports that too, since a forked child
     may hold the pipe).
  1  one line of JSON to the controller: {"address": "host:port"} or {"error": "why"}
  2  the controller's stderr, for the verdict
  stacks_fd  a file that the controller's faulthandler writes into on SIGUSR1

Watchdogs exchange datagrams (watchdog/gossip.py): the whole table once per beat, and news (an end,
a verdict) every 0.1 s while there is any. The first verdict of any watchdog is adopted by all.
After SETTLE_SECONDS, in which a competing verdict could still arrive, it is printed, followed by
the stack traces of the watchdog's own controller if that still runs. The controller is ended by
SIGKILL, so that its exit code is not zero (SIGTERM would mean: write a checkpoint, and start
again). A watchdog ends at most about a second after its controller.
"""

import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

from distflow_jax.watchdog.gossip import (
    CAUSE_CHARS,
    DIED,
    DONE,
    ENDED,
    FAILED,
    PHASE_CHARS,
    RUNNING,
    STOPPED,
    GossipDeadlines,
    Peer,
    Record,
    Verdict,
    better,
    bodies,
    describe,
    find_verdict,
    gossip_targets,
    merge,
    names,
    parse,
    position,
    time_of_day,
)
from distflow_jax.watchdog.seals import GENERATION_BITS, Opener, Sealer
from distflow_jax.watchdog.target import Target, arrange_stacks, print_lines

# Upper bound of one advance of the clock: after a pause of the whole host (suspended, swapping)
# other processes must not seem to have been silent.
MAX_GAP_SECONDS = 1.0
WAIT_SECONDS = 0.5  # longest sleep
POLL_SECONDS = 0.05  # looking for the controller where there are no pidfds
URGENT_SECONDS = 0.1  # between datagrams while there is news
URGENT_ROWS = 12  # ended processes that news names; a job of 1,000 dies at once
SETTLE_SECONDS = 0.25  # from a verdict to acting on it: a competing one may arrive
LINGER_SECONDS = 1.0  # for sending to other watchdogs after the own controller's end
FAILED_GRACE_SECONDS = 5.0  # for a controller that reported an exception to end by itself
PASSED_ON_SECONDS = 10.0  # for a controller to end after a SIGTERM that another one received
UNKILLABLE_SECONDS = 10.0  # after SIGKILL, when a controller hangs in the kernel


class Settings(NamedTuple):
    """Settings that the controller passes at the start. Durations in seconds."""

    pid: int  # of the controller, our parent
    index: int
    count: int
    host: str
    port: int  # 0: any
    generation: int  # number of watchdogs that this process had before
    limits: list[float]  # as in GossipDeadlines
    stacks_fd: int
    main_thread: int  # threading's ident


def main(argument: str) -> None:
    """Watches until the controller ends, or until the watchdog has ended it."""
    # ignored, to outlive the controller: some clusters send SIGTERM to all processes, and the
    # controller then still writes a checkpoint
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = Settings(**json.loads(argument))
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_DGRAM)[0]
        peers = socket.socket(found[0], socket.SOCK_DGRAM)
        peers.bind(found[4])
    except OSError as error:
        os.write(1, json.dumps({"error": str(error)}).encode() + b"\n")
        return
    host, port = peers.getsockname()[:2]
    os.write(1, json.dumps({"address": f"{host}:{port}"}).encode() + b"\n")
    silence(1)
    Watch(settings, peers).run()


class Watch:
    """The state of one watchdog, and its loop."""

    def __init__(self, settings: Settings, peers: socket.socket):
        self.settings, self.index = settings, settings.index
        self.limits = GossipDeadlines(*settings.limits)  # a list in JSON
        self.controller = Target(settings.pid)
        self.socket = peers
        self.socket.setblocking(False)
        os.set_blocking(0, False)
        self.draw = random.Random(settings.index)
        self.seals: tuple[Sealer, Opener] | None = None  # once connected
        self.targets: list[tuple[str, int]] = []  # the watchdogs of all processes, by index
        self.now, self.read_clock = 0.0, time.monotonic()
        self.last_beat = self.next_tick = self.next_urgent = self.next_judgement = 0.0
        self.tick = 0
        self.has_news = False  # an end or a verdict that must reach the others at once
        self.pipe_open, self.line_start = True, b""
        # newer than the records of the watchdogs before
        first = Record(self.index, settings.generation << GENERATION_BITS)
        self.table = {self.index: Peer(first, 0.0, 0.0)}
        self.verdict: Verdict | None = None
        self.act_at = self.finish_at = self.kill_at = float("inf")
        self.passed_on_at = float("inf")  # when the controller got another one's SIGTERM
        self.printed = False

    @property
    def own(self) -> Peer:
        """This process's entry of the table."""
        return self.table[self.index]

    def run(self) -> None:
        """Watches until all news is sent and the controller has ended."""
        while self.now < self.finish_at:
            self.wait()
            gone = self.controller.is_gone()
            self.read_controller()  # the lines that it wrote before its end
            self.read_peers()
            if gone:
                self.note_end()
            self.judge()
            self.act()
            self.send_due()

    def wait(self) -> None:
        """Sleeps until something arrives or is due; advances the clock."""
        due = min(self.next_tick, self.act_at, self.kill_at, self.finish_at)
        if self.has_news:
            due = min(due, self.next_urgent)
        longest = WAIT_SECONDS if self.controller.pidfd is not None else POLL_SECONDS
        sources = [self.socket]
        if self.pipe_open:
            sources.append(0)
        if self.controller.pidfd is not None and not self.controller.gone:
            sources.append(self.controller.pidfd)
        select.select(sources, [], [], min(max(0.0, due - self.now), longest))
        before, self.read_clock = self.read_clock, time.monotonic()
        self.now += min(self.read_clock - before, MAX_GAP_SECONDS)

    # -- input ------------------------------------------------------------------------------------

    def read_controller(self) -> None:
        """Processes all lines that the controller has written."""
        data = self.line_start
        while self.pipe_open:
            try:
                part = os.read(0, 1 << 16)
            except BlockingIOError:
                break
            self.pipe_open = bool(part)
            data += part
        *lines, self.line_start = data.split(b"\n")
        for line in lines:
            kind, *rest = json.loads(line)
            if kind == "at":
                self.last_beat = self.now
                self.note_progress(*rest)
            elif kind == "connect":
                self.connect(*rest)
            elif kind in (DONE, STOPPED):
                self.note_orderly_end(kind)
            elif kind == "failed":
                self.finish(FAILED, rest[0])

    def note_progress(self, sequence: int, step: int, phase: str) -> None:
        """Records the position that the controller reports."""
        own = self.own
        if own.record.state == RUNNING:
            record = own.record._replace(sequence=sequence, step=step, phase=phase[:PHASE_CHARS])
            moved = self.now if sequence > own.record.sequence else own.moved
            self.table[self.index] = own._replace(record=record, moved=moved)

    def connect(self, token: str, addresses: list[str]) -> None:
        """Begins to exchange datagrams with the other watchdogs."""
        key, settings = token.encode(), self.settings
        self.seals = (
            Sealer(key, self.index, settings.generation),
            Opener(key, self.index, settings.count),
        )
        for index, address in enumerate(addresses):
            host, _, port = address.rpartition(":")
            self.targets.append((host, int(port)))
            if index != self.index:
                self.table[index] = Peer(Record(index), self.now, self.now)
        self.next_tick = self.now

    def note_orderly_end(self, state: str) -> None:
        """Records an end that is no failure, which the other watchdogs still have to receive."""
        if self.own.record.state != RUNNING:
            return
        silence(2)  # a launcher waits until all processes have closed the pipe
        own = self.own
        record = own.record._replace(version=own.record.version + 1, state=state)
        self.table[self.index] = own._replace(record=record, heard=self.now)
        self.spread_news()
        self.finish_at = self.now + (LINGER_SECONDS if self.targets[1:] else 0.0)

    def note_end(self) -> None:
        """Records that the controller is gone."""
        if self.own.record.state == RUNNING and self.verdict is None:
            self.finish(DIED, self.controller.exit_status())

    def finish(self, state: str, cause: str) -> None:
        """Records that the controller ends by itself, not by a verdict."""
        if self.own.record.state != RUNNING or self.verdict:
            return
        if state == FAILED and self.settings.count == 1:
            # it reports the exception itself, and may be a notebook's kernel that lives on
            self.finish_at = self.now
            return
        before = [peer for peer in self.table.values() if peer.record.state in ENDED]
        before.sort(key=lambda peer: peer.ended)
        record = self.own.record._replace(
            version=self.own.record.version + 1,
            state=state,
            after=before[0].record.index if before else -1,
            cause=" ".join(cause.split())[:CAUSE_CHARS],
            detail=f"last beat {self.now - self.last_beat:.1f} s before; {self.controller.where()}",
        )
        self.table[self.index] = Peer(record, self.now, self.own.moved, self.now)
        self.spread_news()

    def read_peers(self) -> None:
        """Receives datagrams of other watchdogs and merges them into the table."""
        arrived: list[Record] = []
        for _ in range(1000):  # bounded: a flood must not starve the rest of the loop
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            body = self.seals[1].open(data) if self.seals else None
            if body is None:
                continue
            records, verdict = parse(body)
            arrived += records
            if verdict and not self.printed:
                self.adopt(verdict)
        self.table = merge(self.table, arrived, self.now)
        if any(record.state in ENDED for record in arrived):
            self.spread_news()
        stopped = [record.index for record in arrived if record.state == STOPPED]
        if stopped and self.own.record.state == RUNNING and self.passed_on_at == float("inf"):
            self.passed_on_at = self.now
            self.spread_news()
            self.controller.signal(signal.SIGTERM)

    # -- verdicts ---------------------------------------------------------------------------------

    def judge(self) -> None:
        """Declares a verdict if there is a reason and no verdict yet."""
        if self.verdict or self.own.record.state in (DONE, STOPPED):
            return
        if self.now > self.passed_on_at + PASSED_ON_SECONDS and self.own.record.state == RUNNING:
            gone = names([i for i, p in self.table.items() if p.record.state == STOPPED])
            text = f"{gone} stopped by SIGTERM before a step had ended, and the others wait for it"
            self.adopt(Verdict("died", self.index, text))
            return
        if not self.has_news and self.now < self.next_judgement:
            return  # going through a large table at every datagram would cost too much
        self.next_judgement = self.now + WAIT_SECONDS
        beat_age = self.now - self.last_beat
        found = find_verdict(self.table, self.index, self.now, beat_age, self.limits)
        if not found:
            return
        kind, indices = found
        if kind == "silent":
            since = time_of_day(time.time() - beat_age)
            detail = f"{self.controller.state()}; last beat at {since}; {self.controller.where()}"
            record = self.own.record._replace(detail=detail)
            self.table[self.index] = self.own._replace(record=record)
        text = describe(
            kind,
            indices,
            self.table,
            self.now,
            wall=time.time(),
            limits=self.limits,
            hosts=[host for host, _ in self.targets],
        )
        self.adopt(Verdict(kind, self.index, text))

    def adopt(self, verdict: Verdict) -> None:
        """Adopts a verdict, of this watchdog or of another."""
        if self.verdict is None:
            self.act_at = self.now + (SETTLE_SECONDS if self.targets[1:] else 0.0)
            self.spread_news()
        self.verdict = better(self.verdict, verdict)

    def act(self) -> None:
        """Prints the verdict when it is settled, and ends the controller."""
        if self.own.record.state in (DONE, STOPPED):
            return
        if self.verdict and not self.printed and self.now >= self.act_at:
            self.printed, self.act_at = True, float("inf")
            self.print_verdict()
            grace = FAILED_GRACE_SECONDS if self.own.record.state == FAILED else 0.0
            self.kill_at = self.now + grace
            self.finish_at = self.kill_at + UNKILLABLE_SECONDS
        if not self.printed:
            return
        if self.controller.is_gone():
            self.kill_at = float("inf")
            self.finish_at = min(self.finish_at, self.now + LINGER_SECONDS / 2)
        elif self.now >= self.kill_at:
            self.kill_at = float("inf")
            self.controller.signal(signal.SIGKILL)
            print_lines(
                self.index, [f"process {self.index} ({self.controller.where()}) ended by SIGKILL"]
            )

    def print_verdict(self) -> None:
        """Prints the verdict, the controller's position and its stack traces."""
        print_lines(self.index, [self.verdict.text])
        if self.own.record.state != RUNNING or self.controller.is_gone():
            return
        since = time_of_day(time.time() - (self.now - self.own.moved))
        where = f"this process ({self.index}) is {position(self.own.record)} since {since}"
        stacks = self.controller.stacks(self.settings.stacks_fd)
        if not stacks:
            print_lines(self.index, [f"{where}; no stack traces: it does not answer SIGUSR1"])
            return
        print_lines(self.index, [f"{where}:", *arrange_stacks(stacks, self.settings.main_thread)])

    # -- output -----------------------------------------------------------------------------------

    def spread_news(self) -> None:
        """Starts to send ends and verdicts at once, and repeatedly."""
        if not self.has_news:
            self.has_news, self.next_urgent = True, self.now

    def send_due(self) -> None:
        """Sends the datagrams that are due: the news, or the whole table."""
        if self.has_news and self.now >= self.next_urgent:
            self.next_urgent = self.now + URGENT_SECONDS
            ended = [p for p in self.table.values() if p.record.state in (*ENDED, STOPPED)]
            ended.sort(key=lambda peer: peer.ended)
            others = [peer for peer in ended if peer is not self.own]
            self.send([self.own, *others[:URGENT_ROWS]])
        if self.now >= self.next_tick:
            self.next_tick = self.now + self.limits.heartbeat
            own = self.own
            if own.record.state == RUNNING:
                record = own.record._replace(version=own.record.version + 1)
                self.table[self.index] = own._replace(record=record, heard=self.now)
            self.send(self.table.values())

    def send(self, peers: Iterable[Peer]) -> None:
        """Sends entries of the table to this beat's targets."""
        if not self.targets[1:]:
            return
        self.tick += 1
        parts = [self.seals[0].seal(body) for body in bodies(peers, self.verdict, self.now)]
        for target in gossip_targets(self.index, len(self.targets), self.tick, self.draw):
            for part in parts:
                try:
                    self.socket.sendto(part, self.targets[target])
                except OSError:  # no route, no buffers: a datagram may be lost
                    break


def silence(fd: int) -> None:
    """Redirects a file descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
