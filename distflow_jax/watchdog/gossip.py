"""The watchdogs' gossip: tables of process states, datagrams, and verdicts. Pure functions.

Each watchdog keeps a table of all processes, one `Peer` each, and sends it to others. A datagram is
sealed (watchdog/seals.py) compact JSON {"rows": [...], "verdict": [kind, by, text] or null}; a row
is a `Record` without its last fields while they are the defaults, about 45 bytes. The record
with the higher version wins; only a process's own watchdog raises its version. Ages are always
measured on the receiver's clock from the arrival of a new version: clocks of two hosts are never
compared. The only time in a datagram is an age, "ended 230 ms ago".

All times are seconds of the watchdog's own clock (`now`), which has an arbitrary origin.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from distflow_jax.watchdog.seals import SEAL_BYTES

RUNNING, DONE, STOPPED, FAILED, DIED = "running", "done", "stopped", "failed", "died"
STATES = (RUNNING, DONE, STOPPED, FAILED, DIED)  # stopped: by SIGTERM, before a step had ended
ENDED = (FAILED, DIED)  # states that end the job
# If two watchdogs declare at the same time, the earlier kind wins: verdicts cause deaths.
KINDS = ("unreachable", "silent", "stuck", "died")

DATAGRAM_BYTES = 1400  # below the 1,500 of Ethernet, so that nothing is fragmented
BODY_BYTES = DATAGRAM_BYTES - SEAL_BYTES
PHASE_CHARS, CAUSE_CHARS, VERDICT_CHARS = 64, 300, 800
NOTE = ": "  # between a phase and what it waits for
OTHERS = "other processes"  # what a phase waits for, if no other process waits for this one
ALL_TO_ALL = 16  # largest job in which every watchdog sends to every other
FANOUT = 4  # targets per beat in larger jobs; half of them by a fixed rule, half at random
# How long deaths are collected before one is named: within 0.5 s the JAX runtime has aborted all
# other processes, and the first death has reached all watchdogs in milliseconds (five hops of
# gossip: half a second).
COLLECT_SECONDS = 0.5
# Of two deaths within this time, each recorded before the other was received, a signal (SIGKILL,
# SIGSEGV) explains an abort or an exception, never the other way round.
SIGNAL_WINDOW_SECONDS = 0.5
TIE_SECONDS = 0.02  # the order of deaths closer than this is not certain
# starts of the exceptions of a controller that loses its connection to another
CONNECTION_ERRORS = ("JaxRuntimeError", "XlaRuntimeError", "ConnectionError", "BarrierTimeout")
NAMED = 8  # processes that a line lists before it says "and N more"


class Record(NamedTuple):
    """One process as its own watchdog last described it."""

    index: int
    version: int = 0  # rises with every update by its watchdog
    sequence: int = 0  # phases begun or ended; all processes go through the same ones
    step: int = 0
    phase: str = "start"
    state: str = RUNNING
    ended_ms: int = 0  # milliseconds between its end and the datagram
    after: int = -1  # a process whose earlier end its watchdog had recorded; -1: none
    cause: str = ""  # "SIGKILL", "exit code 1", the message of an exception; "": unknown
    detail: str = ""  # last beat, host, pid


class Peer(NamedTuple):
    """A record, and the times at which this watchdog saw it change."""

    record: Record
    heard: float  # when the version rose
    moved: float  # when the sequence rose
    ended: float = math.inf  # end; for other processes an upper bound, late by the datagram's delay


class Verdict(NamedTuple):
    """The reason why the job ends, as all watchdogs print it."""

    kind: str
    by: int  # the process whose watchdog declared it
    text: str


class GossipDeadlines(NamedTuple):
    """Deadlines in seconds, as in HealthConfig."""

    heartbeat: float
    dead: float
    stuck: float


Table = dict[int, Peer]


def merge(table: Table, records: Iterable[Record], now: float) -> Table:
    """Returns the table with all newer entries of `records`. Unknown processes are left out."""
    table = dict(table)
    for record in records:
        known = table.get(record.index)
        if known is None or record.version < known.record.version:
            continue
        ended = now - record.ended_ms / 1000 if record.state in ENDED else math.inf
        if record.version > known.record.version:
            moved = now if record.sequence > known.record.sequence else known.moved
            table[record.index] = Peer(record, now, moved, ended)
        elif ended < known.ended:  # another copy, less late
            table[record.index] = known._replace(ended=ended)
    return table


def gossip_targets(index: int, count: int, tick: int, draw: random.Random) -> list[int]:
    """Processes that process `index` sends to at beat `tick`: all, or FANOUT of a large job.

    Half of the FANOUT are at distances 1, 2, 4, 8, ... in turn, so that every process receives as
    often as it sends and news reaches all after log2(count) beats; the other half are drawn, so
    that news bypasses hosts that are gone.
    """
    if count <= ALL_TO_ALL:
        return [peer for peer in range(count) if peer != index]
    turns = (count - 1).bit_length()
    half = FANOUT // 2
    turn = [(tick + i * turns // half) % turns for i in range(half)]
    chosen = {(index + 2**t) % count for t in turn} - {index}
    while len(chosen) < FANOUT:
        chosen |= {draw.randrange(count)} - {index}
    return sorted(chosen)


# -- datagrams ------------------------------------------------------------------------------------


def bodies(peers: Iterable[Peer], verdict: Verdict | None, now: float) -> list[bytes]:
    """Encodes the peers' records in as few bodies of at most BODY_BYTES as needed."""
    head = f'{{"verdict":{_compact(verdict)},"rows":['.encode()
    parts, size = [[]], len(head) + 2
    for peer in peers:
        row = _compact(_row(peer, now)).encode()
        if parts[-1] and size + len(row) + 1 > BODY_BYTES:
            parts.append([])
            size = len(head) + 2
        parts[-1].append(row)
        size += len(row) + 1
    return [head + b",".join(rows) + b"]}" for rows in parts]


def parse(body: bytes) -> tuple[list[Record], Verdict | None]:
    """Decodes records and verdict of a datagram's body; ([], None) if it is damaged."""
    try:
        content = json.loads(body)
        records = [_record(row) for row in content["rows"]]
        verdict = None if content["verdict"] is None else _verdict(content["verdict"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return [], None
    return records, verdict


_RECORD_TYPES = tuple(Record.__annotations__[field] for field in Record._fields)
_compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _row(peer: Peer, now: float) -> tuple:
    if peer.record.state == RUNNING:
        return tuple(peer.record)[:5]
    if peer.ended == math.inf:
        return tuple(peer.record)[:6]
    return tuple(peer.record._replace(ended_ms=max(0, round((now - peer.ended) * 1000))))


def _record(row: Sequence) -> Record:
    record = Record(*row)
    if tuple(map(type, record)) != _RECORD_TYPES or record.state not in STATES:
        raise ValueError(row)
    return record


def _verdict(row: Sequence) -> Verdict:
    verdict = Verdict(*row)
    if tuple(map(type, verdict)) != (str, int, str) or verdict.kind not in KINDS:
        raise ValueError(row)
    return verdict


# -- verdicts -------------------------------------------------------------------------------------


def find_verdict(
    table: Table, own: int, now: float, beat_age: float, limits: GossipDeadlines
) -> tuple[str, list[int]] | None:
    """(kind, processes to name) of the job's failure, or None.

    `own` is the process of this watchdog, `beat_age` the seconds since its last beat: only a
    process's own watchdog can decide whether the process responds.
    """
    ended = [peer for peer in table.values() if peer.record.state in ENDED]
    if ended:
        collected = len(table) == 1 or now - min(p.heard for p in ended) >= COLLECT_SECONDS
        return ("died", order_of_deaths(table)[0]) if collected else None
    running = {i: peer for i, peer in table.items() if peer.record.state == RUNNING}
    if own in running and beat_age > limits.dead:
        return "silent", [own]
    late = limits.dead + _gossip_seconds(len(table), limits)
    gone = [i for i, peer in running.items() if i != own and now - peer.heard > late]
    if gone:
        return "unreachable", gone
    if running and now - max(peer.moved for peer in running.values()) > limits.stuck:
        lowest = min(peer.record.sequence for peer in running.values())
        behind = [i for i, peer in running.items() if peer.record.sequence == lowest]
        late = [i for i in behind if not running[i].record.phase.endswith(f"{NOTE}{OTHERS}")]
        return "stuck", late or behind
    return None


def order_of_deaths(table: Table) -> tuple[list[int], list[int]]:
    """(processes that ended first, later ones); several are first if their order is not certain.

    A kill explains the other deaths within SIGNAL_WINDOW_SECONDS, even those received before the
    kill was seen: the kernel closes a process's connections before it reports its end, and the
    others fail within milliseconds. Otherwise a death is a consequence if its watchdog had already
    recorded another one, and so is an exception over a lost connection if there is any other death.
    The remaining deaths are ordered by time.
    """
    ended = [peer for peer in table.values() if peer.record.state in ENDED]
    ended.sort(key=lambda peer: peer.ended)
    lost = {peer.record.index for peer in ended if _lost_connection(peer.record)}
    first = [p for p in ended if p.record.after < 0 or p.record.after in lost] or ended
    first = [peer for peer in first if peer.record.index not in lost] or first
    first = _killed(ended) or first
    first = [peer for peer in first if peer.ended - first[0].ended <= TIE_SECONDS]
    causes = [peer.record.index for peer in first]
    return causes, [p.record.index for p in ended if p.record.index not in causes]


def describe(
    kind: str,
    indices: Sequence[int],
    table: Table,
    now: float,
    *,
    wall: float,
    limits: GossipDeadlines,
    hosts: Sequence[str] = (),
) -> str:
    """Returns the text of a verdict, at most VERDICT_CHARS long.

    Args:
      kind: one of KINDS.
      indices: the processes to name.
      table: all processes.
      now: the watchdog's clock.
      wall: the time of day at `now`, in seconds since 1970.
      limits: deadlines.
      hosts: the processes' hosts, by index.
    """

    def clock(moment: float) -> str:
        return time_of_day(wall - (now - moment))

    if kind == "died":
        text = _deaths(table, clock) + _unheard(table, limits)
    elif kind == "silent":
        record = table[indices[0]].record
        text = (
            f"{names(indices)} is alive but does not respond, {position(record)} ({record.detail})"
        )
    elif kind == "unreachable":
        where = ", ".join(sorted({hosts[i] for i in indices})[:NAMED])
        since, record = clock(min(table[i].heard for i in indices)), table[indices[0]].record
        text = (
            f"the host of {names(indices)} ({where}) is unreachable, or its watchdog has ended: "
            f"nothing heard since {since}, last {position(record)}"
        )
    else:
        text = _standstill(indices, table, clock)
    return text[:VERDICT_CHARS]


def better(known: Verdict | None, other: Verdict) -> Verdict:
    """The one of two verdicts that all watchdogs prefer: by kind, then by declaring process."""
    if known is None:
        return other
    return min(known, other, key=lambda verdict: (KINDS.index(verdict.kind), verdict.by))


def names(indices: Sequence[int]) -> str:
    """[2] -> "process 2", [0, 1] -> "processes 0, 1"; at most NAMED of them."""
    shown = ", ".join(map(str, indices[:NAMED]))
    more = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"process{'es' if len(indices) > 1 else ''} {shown}{more}"


def position(record: Record) -> str:
    """A process's position: "at step 7 in node 'rollout'"."""
    return f"at step {record.step} in node {record.phase!r}"


def time_of_day(wall: float) -> str:
    """Seconds since 1970 as "12:03:04" of the local time zone."""
    return time.strftime("%H:%M:%S", time.localtime(wall))


def _gossip_seconds(count: int, limits: GossipDeadlines) -> float:
    """Longest delay of news in a large job, with every second datagram lost."""
    return 0.0 if count <= ALL_TO_ALL else 2 * (count - 1).bit_length() * limits.heartbeat


def _killed(ended: Sequence[Peer]) -> list[Peer]:
    """The processes, of those ordered by their ends, that a signal killed independently.

    SIGTERM does not count: launchers send it in answer to a failure. A cause may be unknown, since
    the process's parent may have collected its status first.
    """
    near = [p for p in ended if p.ended - ended[0].ended <= SIGNAL_WINDOW_SECONDS]
    killed = [
        p
        for p in near
        if p.record.cause.startswith("SIG") and p.record.cause not in ("SIGABRT", "SIGTERM")
    ] or [
        p
        for p in near
        if p.record.state == DIED and not p.record.cause and p.ended - ended[0].ended <= 0.1
    ]
    kills = {p.record.index for p in killed}
    return [p for p in killed if p.record.after not in kills] or killed


def _lost_connection(record: Record) -> bool:
    """Whether a process failed because another one did not respond."""
    return record.state == FAILED and record.cause.startswith(CONNECTION_ERRORS)


def _deaths(table: Table, clock: Callable[[float], str]) -> str:
    causes, followers = order_of_deaths(table)
    parts = []
    for record, ended in ((table[i].record, table[i].ended) for i in causes[:2]):
        start = f"process {record.index} {record.state} {position(record)}, {clock(ended)}"
        if record.state == FAILED:
            parts.append(f"{start}, with {record.cause} ({record.detail})")
        else:
            parts.append(f"{start} ({record.cause or 'reason unknown'}; {record.detail})")
    text = "; ".join(parts)
    if len(causes) > 2:
        text += f"; {names(causes[2:])} too"
    if len(causes) > 1:
        text += f"; within {TIE_SECONDS:g} s, so the order is not certain"
    if followers:
        first = table[causes[0]].ended
        later = [f"{i} ({table[i].ended - first:+.2f} s)" for i in followers[:NAMED]]
        more = f" and {len(followers) - NAMED} more" if len(followers) > NAMED else ""
        text += f"; after that ended {', '.join(later)}{more}"
    return text


def _unheard(table: Table, limits: GossipDeadlines) -> str:
    """Names processes not heard of for some time before the first end: their host may be gone."""
    first = min(peer.heard for peer in table.values() if peer.record.state in ENDED)
    late = 3 * limits.heartbeat + _gossip_seconds(len(table), limits)
    silent = [i for i, p in table.items() if p.record.state == RUNNING and first - p.heard > late]
    return f"; nothing was heard of {names(silent)} for some time before" if silent else ""


def _standstill(indices: Sequence[int], table: Table, clock: Callable[[float], str]) -> str:
    running = [peer for peer in table.values() if peer.record.state == RUNNING]
    done = [i for i, peer in table.items() if peer.record.state == DONE]
    here = position(table[indices[0]].record)
    text = f"no progress since {clock(max(peer.moved for peer in running))}: "
    if len(indices) < len(running):
        others = [peer for peer in running if peer.record.index not in indices]
        ahead = max(others, key=lambda peer: peer.record.sequence).record
        verb = "is" if len(indices) == 1 else "are"
        text += f"{names(indices)} {verb} behind, {here}; the others wait {position(ahead)}"
    else:
        text += f"{names(indices) if len(indices) == 1 else 'all processes'} stuck {here}"
    text += f"; {names(done)} had ended in order" if done else ""
    return f"{text}; if it only needs longer, raise health.stuck_seconds"
