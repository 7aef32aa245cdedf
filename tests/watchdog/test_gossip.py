"""Tables that watchdogs exchange, and the verdicts that follow from them."""

import random
import time

import pytest

from distflow_jax.watchdog.gossip import (
    ALL_TO_ALL,
    BODY_BYTES,
    COLLECT_SECONDS,
    DIED,
    DONE,
    FAILED,
    FANOUT,
    NOTE,
    OTHERS,
    PHASE_CHARS,
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
    order_of_deaths,
    parse,
)
from distflow_jax.watchdog.target import STACK_LINES, arrange_stacks

LIMITS = GossipDeadlines(heartbeat=1.0, dead=30.0, stuck=1800.0)


# -- tables ---------------------------------------------------------------------------------------


def table_of(*peers):
    return {peer.record.index: peer for peer in peers}


def running(index, sequence=10, heard=100.0, moved=100.0, phase="rollout"):
    return Peer(Record(index, 5, sequence, 7, phase), heard, moved)


def ended(index, at, *, after=-1, cause="", state=DIED, heard=None):
    record = Record(index, 6, 10, 7, "rollout", state, 0, after, cause, "host b, pid 9")
    return Peer(record, at if heard is None else heard, 0.0, at)


def test_the_higher_version_wins_and_times_are_those_of_arrival():
    before = table_of(running(0), running(1))
    newer = Record(1, 6, 11, 7, "reward")
    after = merge(before, [newer, Record(0, 4, 99), Record(5, 1)], 107.0)
    assert after[1] == Peer(newer, 107.0, 107.0)
    assert after[0] == before[0] and 5 not in after
    assert before == table_of(running(0), running(1))
    beat = merge(after, [newer._replace(version=7)], 108.0)[1]
    assert (beat.heard, beat.moved) == (108.0, 107.0)


def test_the_time_of_a_death_is_that_of_the_fastest_copy():
    death = Record(1, 6, 10, 7, "rollout", DIED, ended_ms=300)
    table = merge(table_of(running(0), running(1)), [death], 110.0)
    assert (table[1].ended, table[1].heard) == (pytest.approx(109.7), 110.0)
    table = merge(table, [death._replace(ended_ms=700)], 110.2)
    assert table[1].ended == pytest.approx(109.5) and table[1].heard == 110.0
    table = merge(table, [death._replace(ended_ms=700)], 111.0)  # a slow one
    assert table[1].ended == pytest.approx(109.5)


def test_a_table_travels_in_datagrams_that_are_not_fragmented():
    peers = [running(i, phase="actor_old_log_prob") for i in range(200)]
    peers += [ended(200, 99.5, cause="ValueError: " + "x" * 200, after=3)]
    peers += [Peer(Record(201, 9, state=DONE), 1.0, 1.0)]
    verdict = Verdict("died", 3, "process 200 failed: Ärger" + "y" * 500)
    parts = bodies(peers, verdict, 100.0)
    assert max(map(len, parts)) <= BODY_BYTES
    decoded = [parse(part) for part in parts]
    assert all(said == verdict for _, said in decoded)
    records = [record for rows, _ in decoded for record in rows]
    assert records == [
        p.record._replace(ended_ms=500) if p.record.state == DIED else p.record for p in peers
    ]


def test_small_jobs_tell_everybody():
    draw = random.Random(0)
    assert gossip_targets(1, 4, 9, draw) == [0, 2, 3]
    assert len(gossip_targets(3, ALL_TO_ALL, 0, draw)) == ALL_TO_ALL - 1
    assert gossip_targets(0, 1, 0, draw) == []


@pytest.mark.parametrize("lost", [0.0, 0.5])
def test_in_large_jobs_everything_is_known_soon_everywhere(lost):
    count = 40
    draws = [random.Random(i) for i in range(count)]
    network = random.Random(1)
    tables = [{j: Peer(Record(j), 0.0, 0.0) for j in range(count)} for _ in range(count)]
    oldest = []
    for tick in range(1, 41):
        for i, table in enumerate(tables):
            table[i] = Peer(Record(i, version=tick), tick, 0.0)
        before = [dict(table) for table in tables]
        for i in range(count):
            told = gossip_targets(i, count, tick, draws[i])
            assert len(set(told)) == FANOUT and i not in told
            parts = bodies(before[i].values(), None, tick)
            for j in told:
                if network.random() >= lost:
                    for part in parts:
                        tables[j] = merge(tables[j], parse(part)[0], tick)
        oldest.append(tick - min(p.record.version for t in tables for p in t.values()))
    # what find_verdict allows for
    assert max(oldest[20:]) <= (6 if lost == 0 else 12)


# -- verdicts -------------------------------------------------------------------------------------


def judge(table, now, own=0, beat_age=0.5):
    return find_verdict(table, own, now, beat_age, LIMITS)


def words(kind, who, table, now):
    wall = time.mktime((2025, 1, 2, 12, 0, 0, 0, 0, -1))
    hosts = [f"10.0.0.{i}" for i in range(len(table))]
    return describe(kind, who, table, now, wall=wall, limits=LIMITS, hosts=hosts)


def test_a_healthy_job_has_no_verdict():
    assert judge(table_of(running(0), running(1)), 110.0) is None
    assert judge(table_of(running(0)), 110.0) is None


def test_deaths_are_collected_before_one_is_named():
    table = table_of(running(0), ended(1, at=109.9, heard=110.0))
    assert judge(table, 110.0 + 0.9 * COLLECT_SECONDS) is None
    assert judge(table, 110.0 + 1.1 * COLLECT_SECONDS) == ("died", [1])
    assert judge(table_of(ended(0, at=110.0)), 110.0) == ("died", [0])  # nobody to wait for


def test_a_death_seen_after_another_is_its_consequence():
    # clocks of arrival say that 0 was first, its watchdog knows better
    table = table_of(ended(0, at=110.0, after=2), ended(1, at=110.3), ended(2, at=110.1))
    assert order_of_deaths(table) == ([2], [0, 1])


def test_a_signal_explains_an_abort_but_not_the_reverse():
    table = table_of(ended(0, at=110.0, cause="SIGABRT"), ended(1, at=110.1, cause="SIGKILL"))
    assert order_of_deaths(table) == ([1], [0])
    table = table_of(ended(0, at=110.0, cause="SIGABRT"), ended(1, at=111.0, cause="SIGKILL"))
    assert order_of_deaths(table) == ([0], [1])


def test_a_lost_connection_is_a_consequence_even_where_it_is_noticed_first():
    gloo = "JaxRuntimeError: Gloo AllGather failed: Connection reset by peer"
    table = table_of(
        ended(0, at=110.01, after=3),  # killed, and noticed late by a busy host
        ended(1, at=110.01, after=3, cause=gloo, state="failed"),
        ended(2, at=110.2, after=3, cause="SIGABRT"),
        ended(3, at=110.0, cause=gloo, state="failed"),
    )
    assert order_of_deaths(table) == ([0], [3, 1, 2])
    alone = table_of(running(0), ended(1, at=110.0, cause=gloo, state="failed"))
    assert order_of_deaths(alone) == ([1], [])


def test_deaths_at_the_same_time_are_both_named():
    table = table_of(ended(0, at=110.01), ended(1, at=110.0), ended(2, at=110.2), running(3))
    assert order_of_deaths(table) == ([1, 0], [2])
    text = words("died", [1, 0], table, 112.0)
    assert text == (
        "process 1 died at step 7 in node 'rollout', 11:59:58 (reason unknown; host b, pid 9); "
        "process 0 died at step 7 in node 'rollout', 11:59:58 (reason unknown; host b, pid 9); "
        "within 0.02 s, so the order is not certain; after that ended 2 (+0.20 s); nothing was "
        "heard of process 3 for some time before"
    )


def test_a_failure_is_told_with_its_message():
    table = table_of(running(0, heard=110.0), ended(1, at=110.0, state=FAILED, cause="OSError: x"))
    assert words("died", [1], table, 110.0) == (
        "process 1 failed at step 7 in node 'rollout', 12:00:00, with OSError: x (host b, pid 9)"
    )


def test_only_the_own_watchdog_says_that_a_process_is_silent():
    table = table_of(running(0, heard=131.0), running(1, heard=131.0))
    assert judge(table, 131.0, beat_age=29.0) is None
    assert judge(table, 131.0, beat_age=31.0) == ("silent", [0])
    closed = {0: Peer(Record(0, state=DONE), 100.0, 100.0), 1: table[1]}
    assert judge(closed, 131.0, beat_age=31.0) is None


def test_hosts_not_heard_of_are_unreachable():
    table = table_of(running(0), running(1, heard=131.0), running(2), running(3))
    assert judge(table, 129.0) is None
    assert judge(table, 131.0) == ("unreachable", [2, 3])  # one's own entry is not judged
    assert words("unreachable", [2, 3], table, 131.0) == (
        "the host of processes 2, 3 (10.0.0.2, 10.0.0.3) is unreachable, or its watchdog has "
        "ended: nothing heard since 11:59:29, last at step 7 in node 'rollout'"
    )
    done = {**table, 2: Peer(Record(2, state=DONE), 0.0, 0.0), 3: running(3, heard=130.0)}
    assert judge(done, 131.0) is None


def test_gossip_has_more_time():
    table = {i: running(i, heard=100.0 if i == 5 else 140.0) for i in range(40)}
    assert judge(table, 131.0) is None
    assert judge(table, 143.0) == ("unreachable", [5])


LONGER = "; if it only needs longer, raise health.stuck_seconds"


def test_those_behind_are_named_when_nobody_moves():
    heard = 2000.0
    table = table_of(
        running(0, 12, heard, 190.0, "actor_train"),
        running(1, 11, heard, 150.0),
        running(2, 11, heard, 100.0),
        running(3, 12, heard, 200.0, "actor_train"),
    )
    assert judge(table, 1999.0) is None
    assert judge(table, 2001.0) == ("stuck", [1, 2])
    assert words("stuck", [1, 2], table, 2001.0) == (
        "no progress since 11:29:59: processes 1, 2 are behind, at step 7 in node 'rollout'; the "
        "others wait at step 7 in node 'actor_train'; if it only needs longer, raise "
        "health.stuck_seconds"
    )
    same = table_of(running(0, 12, heard), running(1, 12, heard))
    assert judge(same, 2001.0) == ("stuck", [0, 1])
    assert words("stuck", [0, 1], same, 2001.0).endswith(
        f": all processes stuck at step 7 in node 'rollout'{LONGER}"
    )
    left = same | {2: Peer(Record(2, state=DONE), 0.0, 0.0)}
    assert words("stuck", [0, 1], left, 2001.0).endswith(f"; process 2 had ended in order{LONGER}")


def test_processes_that_wait_for_others_are_not_the_ones_that_are_stuck():
    """All are in one phase; what it waits for tells them apart."""
    waits = f"wait_for_samples{NOTE}{OTHERS}"
    late = f"wait_for_samples{NOTE}reward of prompt 1234567"
    assert len(late) <= PHASE_CHARS
    table = table_of(
        running(0, 12, 2000.0, phase=waits),
        running(1, 12, 2000.0, phase=late),
        running(2, 12, 2000.0, phase=waits),
    )
    assert judge(table, 2001.0) == ("stuck", [1])
    assert words("stuck", [1], table, 2001.0).endswith(
        f": process 1 is behind, at step 7 in node {late!r}; the others wait at step 7 in node "
        f"{waits!r}{LONGER}"
    )
    all_wait = table_of(*(running(i, 12, 2000.0, phase=waits) for i in range(2)))
    assert judge(all_wait, 2001.0) == ("stuck", [0, 1])


def test_all_prefer_the_same_verdict():
    died, late = Verdict("died", 0, "a"), Verdict("died", 3, "b")
    silent = Verdict("silent", 2, "c")
    assert better(None, late) == late
    assert better(late, died) == better(died, late) == died
    assert better(died, silent) == better(silent, died) == silent


def test_long_lists_of_processes_are_cut():
    assert names([3]) == "process 3"
    assert names(range(100)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
    table = {i: ended(i, at=100.0 + i, cause="x" * 300) for i in range(1000)}
    assert len(words("died", [0], table, 1100.0)) <= 800


def test_stack_traces_begin_with_the_main_thread():
    text = (
        "Thread 0x00000000000000aa (most recent call first):\n  File w.py, line 1 in work\n\n"
        "Thread 0x00000000000000bb (most recent call first):\n  File t.py, line 1 in _send_beats\n"
        "\nCurrent thread 0x00000000000000cc (most recent call first):\n  File m.py, line 1 in m\n"
    )
    assert [line.split()[-1] for line in arrange_stacks(text, 0xCC)] == [
        "first):",
        "m",
        "first):",
        "work",
    ]
    many = arrange_stacks("\n\n".join([text.strip()] * 50), 0xCC)
    assert len(many) == STACK_LINES + 1 and many[-1] == "  (140 more lines)"
