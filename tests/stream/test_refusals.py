"""Workers that are ended for their results: they get nothing more, and their host waits."""

import pytest

from distflow_jax.stream.leases import MOST_ENDED, Leases
from distflow_jax.stream.links.refusals import (
    FIRST_PAUSE,
    LAST_PAUSE,
    MOST_NAMES,
    MOST_REFUSED,
    MOST_TEXT,
    Refusals,
)
from distflow_jax.stream.wire.calls import Refused

BAD, GOOD = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def refusals():
    return Refusals(Leases(100.0, 1))


def join(refusals, worker, host, now):
    refusals.meet(worker, host)
    refusals.check(worker, now)


def end(refusals, worker, now):
    for _ in range(MOST_REFUSED):
        told = refusals.refuse(worker, "token id -1", now)
    assert told == "token id -1; it is ended"


def test_a_worker_is_ended_after_some_refusals_and_no_sooner(refusals):
    join(refusals, "a", BAD, 0.0)
    for _ in range(MOST_REFUSED - 1):
        assert refusals.refuse("a", "token id -1", 1.0) == "token id -1"
        refusals.check("a", 1.0)
    assert refusals.refuse("a", "token id -1", 1.0) == "token id -1; it is ended"
    with pytest.raises(Refused, match="a is ended: 3 of its results .* for this: token id -1"):
        refusals.check("a", 1e9)  # for good


def test_nobody_joins_from_its_host_for_a_while_that_grows(refusals):
    join(refusals, "beside", BAD, 0.0)
    now = 0.0
    for number in range(4):
        join(refusals, f"liar{number}", BAD, now)
        end(refusals, f"liar{number}", now)
        pause = FIRST_PAUSE * 2**number
        with pytest.raises(Refused, match=f"workers of host {BAD} were refused, .* for "):
            join(refusals, f"liar{number + 1}", BAD, now + pause - 1.0)
        refusals.check("beside", now)  # it has joined before
        join(refusals, f"other{number}", GOOD, now)
        now += pause
    for number in range(4, 40):
        end(refusals, f"liar{number}", now)
    join(refusals, "repaired", BAD, now + LAST_PAUSE)


def test_names_of_no_worker_are_refused(refusals):
    for name in ("", "here"):
        with pytest.raises(Refused, match=f"no worker may be named '{name}'"):
            refusals.check(name, 0.0)


def test_a_reason_is_one_short_line_and_names_do_not_pile_up(refusals):
    assert refusals.refuse("a", "one\n2026 ERROR two\r" + "x" * 9999, 0.0).startswith("one 2026 ")
    assert len(refusals.refuse("a", "x" * 9999, 0.0)) == MOST_TEXT
    for number in range(MOST_NAMES + 5):
        refusals.meet(str(number), GOOD)
    assert len(refusals._callers) == MOST_NAMES


def test_one_that_lies_twice_under_each_of_many_names_waits_too(refusals):
    for number in range(3):
        join(refusals, f"liar{number}", BAD, 0.0)
    for number in range(3):
        for _ in range(MOST_REFUSED - 1):
            refusals.refuse(f"liar{number}", "token id -1", 1.0)
    with pytest.raises(Refused, match=f"workers of host {BAD} were refused"):
        join(refusals, "another", BAD, 2.0)
    join(refusals, "other", GOOD, 2.0)


def test_ten_thousand_names_do_not_make_a_host_forgotten_or_a_worker_that_calls(refusals):
    join(refusals, "beside", BAD, 0.0)
    join(refusals, "liar", BAD, 0.0)
    end(refusals, "liar", 0.0)
    for number in range(2 * MOST_NAMES):
        refusals.meet(f"name{number}", GOOD)
        if number % 100 == 0:
            refusals.check("beside", 1.0)
    with pytest.raises(Refused, match=f"workers of host {BAD} were refused"):
        join(refusals, "another", BAD, 1.0)
    refusals.check("beside", 1.0)


def test_a_host_waits_for_one_that_was_ended_for_its_log_probs(refusals):
    join(refusals, "liar", BAD, 0.0)
    refusals._leases.end("liar", "its log-probs", 0.0)
    with pytest.raises(Refused, match=f"workers of host {BAD} were refused"):
        join(refusals, "another", BAD, 1.0)


def test_names_of_ended_workers_do_not_pile_up(refusals):
    for number in range(MOST_ENDED + 5):
        refusals._leases.end(str(number), "why", 0.0)
    assert len(refusals._leases.ended) == MOST_ENDED
